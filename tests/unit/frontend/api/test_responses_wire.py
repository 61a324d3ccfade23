"""The request of `/v1/responses`: every field of the SDK is supported, or rejected by its name."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from openai.types.responses.response_create_params import (
    ResponseCreateParamsBase,
    ResponseCreateParamsNonStreaming,
    ResponseCreateParamsStreaming,
)
from openai.types.responses.response_includable import ResponseIncludable

from dynamo_trtllm.frontend.api.request_model import parse
from dynamo_trtllm.frontend.api.responses import (
    ENCRYPTED_REASONING,
    LOGPROBS,
    FunctionCallItem,
    FunctionOutputItem,
    ItemReference,
    MessageItem,
    NamedTool,
    ResponseRequest,
    ResponsesAllowedTools,
)
from dynamo_trtllm.protocol.errors import InvalidRequest, UnsupportedParameter
from dynamo_trtllm.protocol.messages import OutputFormat
from tests.kit.cases import each_case

TOOL = {
    "type": "function",
    "name": "get_system_health",
    "parameters": {"type": "object", "properties": {}},
}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}}

SUPPORTED: dict[str, Any] = {
    "include": [LOGPROBS],
    "input": "Is everything up?",
    "instructions": "Be short.",
    "max_output_tokens": 20,
    "max_tool_calls": 3,
    "metadata": {"run": "7"},
    "model": "m",
    "parallel_tool_calls": False,
    "previous_response_id": "resp_1",
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "store": False,
    "stream": True,
    "temperature": 0.5,
    "tools": [TOOL],
    "top_logprobs": 3,
    "top_p": 0.5,
    "user": "u",
}
IN_PART: dict[str, tuple[Any, Any]] = {  # what is taken, what is refused
    "background": (False, True),
    "prompt_cache_options": ({"mode": "implicit"}, {"mode": "implicit", "prewarm": True}),
    "reasoning": (
        {"effort": "low", "summary": "auto", "mode": "standard"},
        {"mode": "pro"},
    ),
    "service_tier": ("flex", "turbo"),
    "stream_options": ({"include_obfuscation": False}, {"include_obfuscation": True}),
    "text": (
        {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        {"verbosity": "low"},
    ),
    "tool_choice": ({"type": "function", "name": "get_system_health"}, {"type": "web_search"}),
    "truncation": ("disabled", "auto"),
}
NO_MATTER = {"prompt_cache_retention"}  # how long a cache is kept at most: never longer here
REFUSED: dict[str, Any] = {
    "access_programs": {"cyber": "standard"},
    "background_options": {"completion_window": "soonest"},
    "context_management": [{"type": "compaction"}],
    "conversation": "conv_1",
    "image": {"context_compression": "auto"},
    "moderation": {"model": "omni-moderation-latest"},
    "prompt": {"id": "pmpt_1"},
}


def asked(**fields: Any) -> ResponseRequest:
    return parse(ResponseRequest, orjson.dumps({"model": "m", "input": "hi"} | fields))


def check_refused(field: str, **fields: Any) -> str:
    with pytest.raises(UnsupportedParameter) as caught:
        asked(**fields)
    assert caught.value.field == field
    assert field in caught.value.message
    return caught.value.message


def test_all_fields_of_the_sdk_are_known_here() -> None:
    fields = set(ResponseCreateParamsBase.__annotations__)
    fields |= set(ResponseCreateParamsStreaming.__annotations__) | set(
        ResponseCreateParamsNonStreaming.__annotations__
    )
    assert fields == set(SUPPORTED) | set(IN_PART) | set(REFUSED) | NO_MATTER


@each_case("name", SUPPORTED)
def test_field_we_honour_then_it_is_what_was_sent(name: str) -> None:
    value = getattr(asked(**{name: SUPPORTED[name]}), name)
    if name == "input":
        assert [item.content for item in value] == [["Is everything up?"]]
    elif name == "tools":
        assert value[0].model_dump() == TOOL | {"description": "", "strict": False}
    else:
        assert value == SUPPORTED[name]


@each_case("name", IN_PART)
def test_partly_supported_field_rejects_the_rest_by_name(name: str) -> None:
    taken, refused = IN_PART[name]
    asked(stream=True, tools=[TOOL], **{name: taken})
    with pytest.raises(UnsupportedParameter) as caught:
        asked(stream=True, **{name: refused})
    assert (caught.value.field or "").startswith(name)


@each_case("name", REFUSED)
def test_field_we_do_not_honour_then_refused_by_its_name(name: str) -> None:
    check_refused(name, **{name: REFUSED[name]})


@each_case(
    "wanted",
    [name for name in ResponseIncludable.__args__ if name not in (LOGPROBS, ENCRYPTED_REASONING)],
)  # type: ignore[attr-defined]
def test_include_of_what_there_is_not_then_refused_with_its_name(wanted: str) -> None:
    assert wanted in check_refused("include", include=[wanted])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"include": [ENCRYPTED_REASONING]}, None),
        ({"include": [LOGPROBS]}, 0),
        ({"include": [LOGPROBS], "top_logprobs": 2}, 2),
        ({"top_logprobs": 2}, 2),
    ],
)
def test_logprobs_when_included_or_counted_then_asked_for(
    fields: dict[str, Any], expected: int | None
) -> None:
    assert asked(**fields).logprobs == expected


def test_max_tokens_then_taken_as_the_guides_say() -> None:
    assert asked(max_tokens=5).output_tokens == 5
    assert asked(max_tokens=5, max_output_tokens=5).output_tokens == 5
    with pytest.raises(InvalidRequest, match="differs from max_output_tokens"):
        asked(max_tokens=5, max_output_tokens=6)


def test_extensions_then_taken_as_in_chat() -> None:
    body = asked(
        min_tokens=2, top_k=4, seed=1, stop="x", stop_token_ids=[7], nvext={"ignore_eos": True}
    )
    assert (body.min_tokens, body.top_k, body.seed, body.stop, body.stop_token_ids) == (
        2,
        4,
        1,
        ["x"],
        [7],
    )
    assert body.past_eos
    check_refused("n", n=2)


def test_tool_choice_then_each_form() -> None:
    assert asked(tools=[TOOL], tool_choice="required").tool_choice == "required"
    assert asked(
        tools=[TOOL], tool_choice={"type": "function", "name": "f"}
    ).tool_choice == NamedTool(name="f")
    choice = asked(
        tools=[TOOL],
        tool_choice={
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "f"}],
        },
    ).tool_choice
    assert isinstance(choice, ResponsesAllowedTools)
    assert [tool.name for tool in choice.tools] == ["f"]


def test_text_format_then_the_schema_the_answer_keeps_to() -> None:
    assert asked().output_format is None
    assert asked(text={"format": {"type": "json_object"}}).output_format == OutputFormat(
        json_schema="{}"
    )
    wanted = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    taken = asked(text={"format": wanted}).output_format
    assert taken is not None
    assert orjson.loads(taken.json_schema) == SCHEMA


def test_items_when_they_come_back_from_an_answer_then_taken() -> None:
    part = {"type": "output_text", "text": "All green", "annotations": [], "logprobs": []}
    given = [
        {"role": "user", "content": "hi"},
        {
            "role": "developer",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "why"}],
        }
        | {"encrypted_content": None, "status": None},
        {"type": "function_call", "id": "fc_1", "call_id": "call-1", "name": "f", "arguments": "{}"}
        | {"status": "completed", "namespace": None},
        {"type": "function_call_output", "call_id": "call-1", "output": '{"status":"ok"}'},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        },
        {"type": "item_reference", "id": "msg_2"},
        {"id": "msg_3"},
    ]
    user, developer, thought, call, output, said, first, second = asked(input=given).input
    assert isinstance(user, MessageItem)
    assert isinstance(developer, MessageItem)
    assert (user.content, developer.content) == (["hi"], ["a", "b"])
    assert thought.type == "reasoning"
    assert isinstance(call, FunctionCallItem)
    assert isinstance(output, FunctionOutputItem)
    assert output.output == ['{"status":"ok"}']
    assert isinstance(said, MessageItem)
    assert said.content == ["All green"]
    assert (first, second) == (ItemReference(id="msg_2"), ItemReference(id="msg_3"))


@pytest.mark.parametrize(
    ("item", "field", "words"),
    [
        ({"type": "web_search_call", "id": "x"}, "input[0].type", "web_search_call"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
            "input[0].content",
            "input_image",
        ),
        (
            {"role": "user", "content": [{"type": "input_file", "file_id": "x"}]},
            "input[0].content",
            "input_file",
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "x"}]},
            "input[0].content",
            "refusal",
        ),
    ],
)
def test_item_we_do_not_take_then_refused_by_its_name(
    item: dict[str, Any], field: str, words: str
) -> None:
    assert words in check_refused(field, input=[item])


@each_case(
    ("fields", "field"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": 3}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content"),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            "input[0].call_id",
        ),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": {"k": "x" * 513}}, "metadata.k"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_invalid_value_then_the_field_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(**fields)
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize("kind", ["web_search", "file_search", "mcp", "code_interpreter"])
def test_built_in_tool_then_refused_by_its_name(kind: str) -> None:
    assert kind in check_refused("tools[0].type", tools=[{"type": kind}])
