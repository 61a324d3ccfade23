"""No request costs more than its size: every string, list and object has a bound, and one error is
made at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import orjson
import pytest
from pydantic import ValidationError

from dynamo_trtllm.frontend.api.chat import ChatRequest
from dynamo_trtllm.frontend.api.completions import CompletionRequest
from dynamo_trtllm.frontend.api.messages import MessagesRequest
from dynamo_trtllm.frontend.api.request_model import (
    MAX_CONTAINERS,
    MAX_ITEMS,
    MAX_KEYS,
    MAX_VALUES,
    check_size,
    parse,
    request_schemas,
)
from dynamo_trtllm.frontend.api.responses import ResponseRequest
from dynamo_trtllm.frontend.api.sampling import SamplingFields
from dynamo_trtllm.frontend.api.schemas import check_schema
from dynamo_trtllm.frontend.api.unknown_fields import MAX_IGNORED, IgnoredFields, collector
from dynamo_trtllm.protocol.errors import InvalidRequest
from tests.kit.cases import each_case

BODIES: tuple[type[SamplingFields], ...] = (
    ChatRequest,
    CompletionRequest,
    ResponseRequest,
    MessagesRequest,
)
SCHEMAS = request_schemas(*BODIES)
WRONG = True  # no list and no object of the API holds it
MANY = 3000
LONGEST = 1 << 20  # strings that may be longer are not tried
USE = {"type": "tool_use", "id": "c", "name": "f"}
TURNS = [{"role": "user", "content": "x"}]
# What a body needs so that no missing field is the first error.
REQUIRED: dict[type[SamplingFields], dict[str, Any]] = {
    ChatRequest: {"messages": TURNS},
    MessagesRequest: {"messages": TURNS, "max_tokens": 5},
}
BOUNDS = {"string": "maxLength", "array": "maxItems", "object": "maxProperties"}


def resolved(schema: Any) -> dict[str, Any]:
    while isinstance(schema, dict) and "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    return schema if isinstance(schema, dict) else {}


def variants(schema: dict[str, Any]) -> list[Any]:
    return [*schema.get("anyOf", ()), *schema.get("oneOf", ())]


def least(schema: Any) -> Any:
    """A small value that the schema takes."""
    schema = resolved(schema)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    if "default" in schema:
        return schema["default"]
    if found := variants(schema):
        return least(found[0])
    match schema.get("type"):
        case "object":
            return {name: least(schema["properties"][name]) for name in schema.get("required", ())}
        case "array":
            return [least(schema["items"])] * schema.get("minItems", 0)
        case "string":
            return "1" * max(1, schema.get("minLength", 0))
        case "boolean":
            return False
    return 1


def beyond(schema: Any) -> Iterator[Any]:
    """Values of the schema with one string, list or object in them that is too large, or full of
    wrong elements.
    """
    schema = resolved(schema)
    for variant in variants(schema):
        yield from beyond(variant)
    match schema.get("type"):
        case "string" if schema.get("maxLength", LONGEST) < LONGEST:
            yield "1" * (schema["maxLength"] + 1)
        case "array":
            yield [WRONG] * MANY
            if schema["maxItems"] <= MAX_ITEMS:
                yield [least(schema["items"])] * (schema["maxItems"] + 1)
            yield from ([value] for value in beyond(schema["items"]))
        case "object":
            around = least(schema)
            for name, field in schema.get("properties", {}).items():
                yield from (around | {name: value} for value in beyond(field))
            values = schema.get("additionalProperties")
            if isinstance(values, dict):
                yield {str(key): WRONG for key in range(MANY)}
                yield {str(key): least(values) for key in range(schema["maxProperties"] + 1)}
                yield from ({"1": value} for value in beyond(values))


def nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """All objects in a schema that has objects and lists in it, except what only describes a core
    schema.
    """
    if isinstance(schema, dict):
        yield schema
        inner = [value for key, value in schema.items() if key != "json_schema_input_schema"]
    else:
        inner = list(schema) if isinstance(schema, list | tuple) else []
    for value in inner:
        yield from nodes(value)


def test_every_field_then_the_api_reference_has_its_bound() -> None:
    unbounded = []
    for name, schema in SCHEMAS.items():
        for node in nodes(schema):
            kind = node.get("type")
            is_fixed = "enum" in node or "const" in node or "properties" in node
            if isinstance(kind, str) and kind in BOUNDS and not is_fixed:
                if BOUNDS[kind] not in node:
                    unbounded.append((name, node))
    assert len(SCHEMAS) > 50
    assert unbounded == []


@pytest.mark.parametrize("model", BODIES)
def test_every_collection_has_a_bound(model: type[SamplingFields]) -> None:
    found = [
        node for node in nodes(model.__pydantic_core_schema__) if isinstance(node.get("type"), str)
    ]
    collections = [
        node for node in found if node["type"] in ("list", "dict", "set", "frozenset", "tuple")
    ]
    assert collections
    checked_before = [node["schema"] for node in found if node["type"] == "function-before"]
    for node in collections:
        # pydantic below 2.14 has no fail_fast for them: a function checks them before
        if node["type"] == "dict":
            assert any(node is schema for schema in checked_before), node
        else:
            assert node.get("fail_fast"), node
        assert "max_length" in node, node
    for node in found:
        assert node["type"] != "str" or "max_length" in node, node


@pytest.mark.parametrize("model", BODIES)
def test_anything_goes_only_where_its_bytes_are_counted(model: type[SamplingFields]) -> None:
    """A value of any type is bounded by a validator around it, which counts the bytes of its
    JSON.
    """
    for node in nodes(model.__pydantic_core_schema__):
        for inner in node.values():
            if isinstance(inner, dict) and inner.get("values_schema", {}).get("type") == "any":
                assert node["type"] == "function-before", node
                names = node["function"]["function"].__code__.co_names
                assert check_size.__name__ in names or check_schema.__name__ in names


@pytest.mark.parametrize("model", BODIES)
def test_values_beyond_a_bound_then_one_error_is_made(model: type[SamplingFields]) -> None:
    bodies = list(beyond({"$ref": f"#/components/schemas/{model.__name__}"}))
    assert len(bodies) > 15
    for body in bodies:
        with pytest.raises(InvalidRequest) as refused:
            parse(model, orjson.dumps(body))
        cause = refused.value.__cause__
        assert isinstance(cause, ValidationError)
        assert cause.error_count() == 1
        assert len(refused.value.message) < 500
        assert refused.value.field


@pytest.mark.parametrize("field", ["metadata", "chat_template_args"])
def test_object_with_many_long_keys_then_one_error_is_made(field: str) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        field: {f"{number:0600}": "x" for number in range(16)},
    }
    with pytest.raises(
        InvalidRequest, match=r"may have keys of \d+ characters at most; '0+…' has 600"
    ) as refused:
        parse(ChatRequest, orjson.dumps(body))
    assert refused.value.field == field
    assert refused.value.__cause__.error_count() == 1  # type: ignore[union-attr]


@each_case(
    ("body", "words"),
    [
        (
            b'{"messages":[' + b"0," * MAX_VALUES + b"0]}",
            "values, counted by",
        ),
        (
            b'{"messages":[' + b"[]," * MAX_CONTAINERS + b"0]}",
            "lists and objects, counted by",
        ),
        (b'{"messages":{' + b'"":0,' * MAX_KEYS + b'"":0}}', "keys, counted by"),
        (b'{"' + b"k" * MAX_VALUES + b'":1}', "kkkk… is not a known field"),
        (b'{"model":"m","messages":[{"role":"' + b"r" * MAX_VALUES + b'"}]}', "not 'rrrr"),
        (b'{"model":"m","messages":[1' + b"0" * 400 + b"]}", "not valid JSON"),
        (
            b'{"prompt":[1,' + b"[" * 1000 + b"]" * 1000 + b"]}",
            "prompt is not supported: use messages",
        ),
    ],
)
def test_hostile_body_then_refused_in_few_words(body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(ChatRequest, body)
    assert words in refused.value.message
    assert len(refused.value.message) < 300
    assert len(refused.value.field or "") < 100


@each_case(
    ("model", "fields"),
    [
        (CompletionRequest, {"prompt": [1, "DEEP"]}),
        (CompletionRequest, {"prompt": "x", "logit_bias": {"1": "DEEP"}}),
        (ResponseRequest, {"input": "x", "include": ["DEEP"]}),
        (ResponseRequest, {"input": "x", "tool_choice": "DEEP"}),
        (ChatRequest, {"tools": "DEEP"}),
        (MessagesRequest, {"tools": "DEEP"}),
        (MessagesRequest, {"tools": [{"type": "DEEP"}]}),
        (MessagesRequest, {"messages": [{"role": "user", "content": ["DEEP"]}]}),
        (
            MessagesRequest,
            {"messages": [{"role": "assistant", "content": [USE | {"input": {"a": "DEEP"}}]}]},
        ),
        (ChatRequest, {"chat_template_args": {"a": "DEEP"}, "chat_template_kwargs": {"a": "DEEP"}}),
        (
            ChatRequest,
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": {"enum": ["DEEP"]}},
                }
            },
        ),
    ],
)
def test_deep_nesting_then_refused_wherever_it_is(
    model: type[SamplingFields], fields: dict[str, Any]
) -> None:
    whole = REQUIRED.get(model, {}) | fields | {"model": "m"}
    body = orjson.dumps(whole).replace(b'"DEEP"', b"[" * 1000 + b"]" * 1000)
    with pytest.raises(InvalidRequest) as refused:
        parse(model, body)
    assert "is required" not in refused.value.message


def test_unknown_fields_of_a_large_body_are_compared_in_part() -> None:
    known = frozenset({"max_tokens"})
    ignored = IgnoredFields(rejects_misspelled=True)
    assert ignored.meant("max_token", known) == "max_tokens"
    for number in range(1000):
        assert ignored.meant(f"zebra{number}", known) is None
    assert ignored.meant("max_tokenz", known) is None


def test_unknown_field_misspelled_at_another_place_is_rejected() -> None:
    ignored = IgnoredFields(rejects_misspelled=True)
    for _ in range(1000):  # as many messages
        assert ignored.meant("texts", frozenset({"role"})) is None
        ignored.add(["texts"])
    assert ignored.meant("texts", frozenset({"text"})) == "text"


@pytest.mark.parametrize("mode", ["warn", "ignore"])
def test_unknown_fields_are_looked_at_until_enough_are_named(
    mode: Literal["warn", "ignore"], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_looked_at = 0
    meant = IgnoredFields.meant

    def counted(self: IgnoredFields, name: str, known: frozenset[str]) -> str | None:
        nonlocal num_looked_at
        num_looked_at += 1
        return meant(self, name, known)

    monkeypatch.setattr(IgnoredFields, "meant", counted)
    unknown = collector(mode)
    body = {"model": "m", "prompt": "x"} | {f"other_{i}": i for i in range(5000)}
    parse(CompletionRequest, orjson.dumps(body | {"max_tokens": 3}), unknown)
    assert unknown is not None
    assert len(list(unknown)) == MAX_IGNORED
    assert num_looked_at <= 128
