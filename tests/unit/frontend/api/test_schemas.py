"""A schema that makes no sense is refused with the place in it; one that does is taken as it is."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from dynamo_trtllm.frontend.api.chat import ChatRequest
from dynamo_trtllm.frontend.api.request_model import parse
from dynamo_trtllm.protocol.errors import InvalidRequest
from tests.kit.cases import each_case

NODE = {
    "$defs": {
        "node": {"type": ["object", "null"], "properties": {"next": {"$ref": "#/$defs/node"}}}
    }
}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def asked(schema: Any) -> ChatRequest:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages = [{"role": "user", "content": "hi"}]
    return parse(
        ChatRequest, orjson.dumps({"model": "m", "messages": messages, "response_format": form})
    )


@each_case(
    "schema",
    [
        {},
        {
            "type": "object",
            "additionalProperties": False,
            "properties": {"a": True},
            "required": ["a"],
        },
        {"anyOf": [{"type": "string", "pattern": "^a"}, {"enum": [1, None]}]},
        {"items": [{"type": "integer"}], "x-anything": {"type": "objekt"}},
        {"const": {"type": "objekt"}},
        NODE | {"$ref": "#/$defs/node"},
        nested(48),
    ],
)
def test_schema_that_makes_sense_then_taken_as_it_is(schema: dict[str, Any]) -> None:
    taken = asked(schema).output_formats()["response_format"].json_schema
    assert taken is not None
    assert orjson.loads(taken) == schema


@each_case(
    ("schema", "reason"),
    [
        ([], "must be an object, not a list"),
        ({"type": "objekt"}, "must have one of array, boolean, .* at /type, not 'objekt'"),
        ({"type": ["string", 5]}, "at /type"),
        ({"properties": {"a": {"type": 5}}}, "at /properties/a/type, not 5"),
        ({"properties": []}, "must have an object at /properties, not a list"),
        ({"properties": {"a": 5}}, "must hold a schema at /properties/a, not a number"),
        ({"anyOf": {}}, "must have a list at /anyOf, not an object"),
        ({"allOf": [{"enum": []}]}, "must have a list of values at /allOf/0/enum"),
        ({"required": "a"}, "must have a list of names at /required"),
        (
            {"items": {"$ref": "https://example.com/x"}},
            r"may only refer to itself \(#/…\) at /items/\$ref",
        ),
        (nested(49), "is nested deeper than 48 schemas"),
        ({"description": "x" * 70_000}, "may have 65536 bytes of JSON at most"),
    ],
)
def test_schema_that_makes_none_then_refused_with_the_place(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        asked(schema)
    assert refused.value.field == "response_format.json_schema.schema"
    assert refused.value.message.startswith("response_format.json_schema.schema ")


def test_parameters_of_a_strict_tool_then_checked_too() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "dict"}}}
    tool["function"]["strict"] = True
    with pytest.raises(InvalidRequest, match=r"tools\[0\]\.function\.parameters must have one of"):
        parse(ChatRequest, orjson.dumps(body | {"tools": [tool]}))


def test_format_and_schema_that_do_not_go_together_then_refused() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    form = {"type": "text", "json_schema": {"name": "x", "schema": {}}}
    with pytest.raises(InvalidRequest, match="is only allowed with type 'json_schema'"):
        parse(ChatRequest, orjson.dumps(body | {"response_format": form}))


def in_form(form: dict[str, Any]) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    return parse(ChatRequest, orjson.dumps(body | {"response_format": form}))


@each_case("kind", ["json_object", "json_schema"])
def test_schema_beside_the_type_is_that_of_the_answer(kind: str) -> None:
    """llama.cpp's and Together's clients send it there, such as older ones of Instructor."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"json_schema": {"name": "x", "schema": schema}} if kind == "json_schema" else {}
    for form in ({"type": kind, "schema": schema}, {"type": kind, "schema": schema, **named}):
        taken = in_form(form).output_formats()["response_format"].json_schema
        assert taken is not None
        assert orjson.loads(taken) == schema
    assert in_form({"type": "text", "schema": {}}).output_formats() == {}


@each_case(
    ("form", "reason"),
    [
        ({"type": "text", "schema": NODE}, "is not allowed with type 'text'"),
        (
            {"type": "json_schema", "schema": NODE, "json_schema": {"name": "x", "schema": {}}},
            "differs from json_schema.schema; send one of them",
        ),
        ({"type": "json_object", "schema": {"type": "dict"}}, "at /type, not 'dict'"),
    ],
)
def test_schema_beside_the_type_that_does_not_fit_is_refused(
    form: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        in_form(form)
    assert refused.value.field == "response_format.schema"
