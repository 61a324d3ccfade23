"""Fields and values that client programs send on their own, and that change no response."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from dynamo_trtllm.frontend.api.chat import ChatRequest
from dynamo_trtllm.frontend.api.completions import CompletionRequest
from dynamo_trtllm.frontend.api.error_bodies import messages_error
from dynamo_trtllm.frontend.api.messages import MessagesRequest
from dynamo_trtllm.frontend.api.request_model import M, parse
from dynamo_trtllm.frontend.api.responses import ResponseRequest
from dynamo_trtllm.frontend.api.unknown_fields import collector
from dynamo_trtllm.protocol.errors import InvalidRequest, UnsupportedParameter
from tests.kit.cases import each_case

USER = {"role": "user", "content": "x"}


def parsed(model: type[M], fields: dict[str, Any]) -> tuple[M, list[str]]:
    """Return the request, and the names of its ignored fields."""
    ignored = collector("warn")
    request = parse(model, orjson.dumps({"model": "m"} | fields), ignored)
    return request, list(ignored or ())


def chat(**fields: Any) -> tuple[ChatRequest, list[str]]:
    return parsed(ChatRequest, {"messages": [USER]} | fields)


def responses(**fields: Any) -> tuple[ResponseRequest, list[str]]:
    return parsed(ResponseRequest, {"input": "x"} | fields)


def messages(**fields: Any) -> tuple[MessagesRequest, list[str]]:
    return parsed(MessagesRequest, {"messages": [USER], "max_tokens": 9} | fields)


def test_included_result_of_a_hosted_tool_is_ignored_and_named() -> None:
    include = ["web_search_call.action.sources", "message.output_text.logprobs"]
    request, ignored = responses(tools=[{"type": "web_search"}], include=include)
    assert request.include == ["message.output_text.logprobs"]
    assert ignored == ["tools.web_search", "include.web_search_call.action.sources"]


def test_unknown_value_of_include_is_rejected() -> None:
    with pytest.raises(UnsupportedParameter, match="include of 'everything' is not supported"):
        responses(include=["everything"])


def test_sixteen_stop_strings_are_accepted_everywhere() -> None:
    stops = [str(number) for number in range(16)]
    assert chat(stop=stops)[0].stop == stops
    assert parsed(CompletionRequest, {"prompt": "x", "stop": stops})[0].stop == stops
    assert responses(stop=stops)[0].stop == stops
    with pytest.raises(InvalidRequest, match="stop may hold 16 strings at most, not 17"):
        chat(stop=[*stops, "16"])


@pytest.mark.parametrize(
    ("malformed", "kept"),
    [
        ({"properties": None, "required": None}, {}),
        ({"anyOf": None, "items": None, "additionalProperties": None, "enum": None}, {}),
        ({"enum": []}, {}),
        ({"type": "any"}, {}),
        ({"type": ["string", "STRING"]}, {}),
        ({"$ref": "https://example.com/schema.json"}, {}),
        ({"required": "name"}, {}),
        ({"properties": {"a": None, "b": {"type": "string", "enum": None}}},
         {"properties": {"b": {"type": "string"}}}),
        ({"anyOf": [{"type": "string"}, None]}, {"anyOf": [{"type": "string"}]}),
        ({"items": {"type": "array", "items": {"type": "Any"}}},
         {"items": {"type": "array", "items": {}}}),
        ({"title": None, "default": None}, {"title": None, "default": None}),
    ],
)  # fmt: skip
def test_malformed_part_of_a_tool_is_left_out(
    malformed: dict[str, Any], kept: dict[str, Any]
) -> None:
    schema = {"type": "object"} | malformed
    expected = kept if "type" in malformed else {"type": "object"} | kept
    tool = {"name": "f", "parameters": schema}
    in_chat, ignored = chat(tools=[{"type": "function", "function": tool}])
    assert in_chat.functions[0].parameters == expected
    assert ignored == ([] if expected == schema else ["tools.malformed_schema"])
    in_responses = responses(tools=[{"type": "function"} | tool])[0].served_tools[0]
    assert in_responses.parameters == expected
    in_messages = messages(tools=[{"name": "f", "input_schema": schema}])[0].functions[0]
    assert in_messages.input_schema == expected


def test_malformed_part_is_rejected_where_unknown_fields_are() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": []}}}
    body = orjson.dumps({"model": "m", "messages": [USER], "tools": [tool]})
    with pytest.raises(InvalidRequest, match="parameters must have a list of values"):
        parse(ChatRequest, body)


@pytest.mark.parametrize("malformed", [{"properties": None}, {"enum": []}, {"type": "any"}])
def test_malformed_part_of_a_strict_tool_is_rejected(malformed: dict[str, Any]) -> None:
    tool = {"name": "f", "parameters": malformed, "strict": True}
    with pytest.raises(InvalidRequest, match="parameters must have"):
        chat(tools=[{"type": "function", "function": tool}])


def test_tool_nested_too_deeply_is_rejected() -> None:
    schema: dict[str, Any] = {}
    for _ in range(60):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="nested deeper than 48 schemas"):
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_message_without_content_is_empty_text(role: str) -> None:
    for message in ({"role": role, "content": None}, {"role": role}):
        request, _ = chat(messages=[message, USER])
        assert request.messages[0].content == ""


def test_tool_result_without_content_is_empty_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": None}
    assert chat(messages=[USER, asked, result])[0].messages[2].content == ""


def test_user_message_without_content_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="is required"):
        chat(messages=[{"role": "user", "content": None}])


@pytest.mark.parametrize("field", ["max_tokens", "n", "seed", "top_k", "min_tokens", "priority"])
def test_integer_with_a_zero_fraction_is_accepted(field: str) -> None:
    request, _ = chat(**{field: 3.0})
    value = getattr(request, field)
    assert (value, type(value)) == (3, int)


@pytest.mark.parametrize("value", [3.5, 1e300, True])
def test_number_that_is_no_integer_is_rejected(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens must be"):
        chat(max_tokens=value)


@pytest.mark.parametrize("name", ["models", "typ_p", "mode", "speed"])
def test_field_of_another_server_is_no_misspelling(name: str) -> None:
    assert chat(**{name: "fast"})[1] == [name]
    assert messages(**{name: "fast"})[1] == [name]


@pytest.mark.parametrize("summary", ["auto", "concise", "detailed"])
def test_any_summary_of_reasoning_is_accepted(summary: str) -> None:
    assert responses(reasoning={"summary": summary})[1] == []


def test_hints_of_a_function_of_responses_are_accepted() -> None:
    tool = {"type": "function", "name": "f", "parameters": {}, "defer_loading": True}
    tool |= {"output_schema": {"type": "string"}, "allowed_callers": ["code_execution"]}
    request, ignored = responses(tools=[{"type": "tool_search"}, tool])
    assert [served.name for served in request.served_tools] == ["f"]
    assert ignored == ["tools.tool_search"]


def test_items_of_another_server_without_text_are_left_out() -> None:
    reasoning = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gA"}
    search = {"type": "web_search_call", "id": "w", "status": "completed"}
    note = {"type": "url_citation", "url": "https://example.com", "start_index": 0}
    text = {"type": "output_text", "text": "y", "annotations": [note]}
    answer = {"type": "message", "role": "assistant", "content": [text]}
    request, ignored = responses(input=[USER, reasoning, search, answer, USER])
    assert [item.type for item in request.input] == ["message", "reasoning", "message", "message"]
    assert ignored == ["input.web_search_call"]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": -1},
        {"stop": ""},
        {"function_call": "none"},
        {"grammar": ""},
        {"json_schema": {}},
        {"min_length": 0},
        {"top_n_sigma": 0},
        {"kv_transfer_params": {}},
        {"system": ""},
        {"audio": {}},
    ],
)
def test_value_without_an_effect_is_accepted(fields: dict[str, Any]) -> None:
    request, ignored = chat(**fields)
    assert (request.max_tokens, request.stop, ignored) == (None, [], [])


@pytest.mark.parametrize("field", ["thread", "compaction"])
def test_field_that_would_lose_history_is_rejected(field: str) -> None:
    with pytest.raises(UnsupportedParameter) as rejected:
        messages(**{field: {"type": "continue"}})
    assert rejected.value.field == field


def test_rejected_thread_has_the_details_that_tool_runners_read() -> None:
    body = messages_error(
        400, "thread …", param="thread", code=UnsupportedParameter.code, request_id="r"
    )
    assert body["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


def test_text_cut_inside_a_character_is_named() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"a\\ud83d"}]}'
    with pytest.raises(InvalidRequest, match="cut inside a character"):
        parse(ChatRequest, body)


@each_case(
    ("encoding", "place"),
    [("latin-1", 55), ("cp1252", 55), ("utf-16", 1), ("utf-16-le", 2), ("utf-16-be", 1)],
)
def test_body_in_another_encoding_is_named(encoding: str, place: int) -> None:
    """PowerShell sends Latin-1 by default, and its files are in UTF-16."""
    body = '{"model":"m","messages":[{"role":"user","content":"caf\xe9"}]}'
    with pytest.raises(InvalidRequest, match=rf"is not UTF-8 at byte {place}; send JSON in UTF-8"):
        parse(ChatRequest, body.encode(encoding))
    with pytest.raises(InvalidRequest, match="is not UTF-8"):
        parse(ChatRequest, body.encode()[:55])  # cut inside the last character


@pytest.mark.parametrize("budget", [8000, 0, -1])
def test_budget_of_thinking_is_ignored_and_named(budget: int) -> None:
    assert chat(thinking_budget=budget)[1] == ["thinking_budget"]
    assert responses(thinking_budget=budget)[1] == ["thinking_budget"]
    assert messages(thinking_budget=budget)[1] == ["thinking_budget"]


def test_null_in_metadata_counts_as_absent() -> None:
    assert chat(metadata={"user_id": None, "a": "b"})[0].metadata == {"a": "b"}
    assert messages(metadata={"user_id": None})[0].metadata == {}


def test_name_of_an_author_may_have_any_letters() -> None:
    message = USER | {"name": "J.Müller"}
    assert chat(messages=[message])[0].messages[0].name == "J.Müller"
    assert chat(messages=[USER | {"name": ""}])[0].messages[0].name is None
    for name in ("a b", "<|end|>", "a/b"):
        with pytest.raises(InvalidRequest, match="name"):
            chat(messages=[USER | {"name": name}])


def test_tool_result_with_an_empty_name_has_none() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "name": "", "content": "1"}
    assert chat(messages=[USER, asked, result])[0].messages[2].name is None


def test_body_may_begin_with_a_byte_order_mark() -> None:
    body = b"\xef\xbb\xbf" + orjson.dumps({"model": "m", "messages": [USER]})
    assert parse(ChatRequest, body).model == "m"


def test_output_of_a_tool_may_have_text_parts_of_mcp() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    output = {"type": "function_call_output", "call_id": "c", "output": parts}
    assert responses(input=[USER, call, output])[0].input[2].output == ["a", "b"]


def test_fast_service_tier_is_accepted() -> None:
    assert chat(service_tier="fast")[1] == []
