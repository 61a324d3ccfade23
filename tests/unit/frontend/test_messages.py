"""`/v1/messages`: messages whole and streamed, errors in Anthropic's form, and counted tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo_trtllm.frontend.messages_api.message_builder import arguments_object
from dynamo_trtllm.protocol import errors
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import Chunk, FinishReason
from tests.kit.cases import each_case
from tests.kit.frontend_app import CALL, CONTENT, MODEL, REASONING, chunk, front, stop
from tests.kit.messages_client import (
    COUNT,
    HI,
    PATH,
    TOOL,
    accumulated,
    ask,
    body,
    check_error,
    events,
    made,
    parsed,
    post,
)

THINKS = {"thinking": {"type": "enabled", "budget_tokens": 2000}}
WHY = chunk("why", ids=[REASONING])


def contents(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the blocks without the ids of calls."""
    for block in message["content"]:
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("toolu_")
    return list(message["content"])


async def test_text_then_the_literal_message() -> None:
    message = await made(front(chunk("Hel"), stop("lo")))
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 0,
            "output_tokens": 6,
            "cache_read_input_tokens": 2,
            "cache_creation_input_tokens": 0,
        },
    }


async def test_text_when_streamed_then_the_literal_events() -> None:
    response = await post(front(chunk("Hel"), stop("lo")), stream=True)
    first, *rest = parsed(response.text)
    message = first["message"]
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2,
            "output_tokens": 0,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
        },
    }
    text = [{"type": "text_delta", "text": word} for word in ("Hel", "lo")]
    assert rest == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in text),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {
                "input_tokens": 0,
                "output_tokens": 6,
                "cache_read_input_tokens": 2,
                "cache_creation_input_tokens": 0,
            },
        },
        {"type": "message_stop"},
    ]


THOUGHT = {"type": "thinking", "thinking": "why", "signature": ""}
ANSWER = {"type": "text", "text": "so"}
CALLED = {"type": "tool_use", "name": "get_system_health", "input": {"a": [1]}}
ANSWERS: dict[str, tuple[list[Chunk], list[dict[str, Any]], str]] = {
    "reasoning and text": (
        [WHY, chunk("so", ids=[CONTENT]), stop()],
        [THOUGHT, ANSWER],
        "end_turn",
    ),
    "a call": ([WHY, chunk('{"a":', ids=[CALL]), stop("[1]}")], [THOUGHT, CALLED], "tool_use"),
    "two calls after text": (
        [chunk("so"), *[chunk('{"a": [1]}', ids=[CALL])] * 2, stop()],
        [ANSWER, CALLED, CALLED],
        "tool_use",
    ),
    "one step": ([stop(f'so{chr(CALL)}{{"a":[1]}}')], [ANSWER, CALLED], "tool_use"),
    "cut": ([chunk("s"), chunk("o", finish=FinishReason.LENGTH)], [ANSWER], "max_tokens"),
    "nothing": ([stop()], [], "end_turn"),
}


@each_case("name", ANSWERS)
async def test_streamed_and_unstreamed_messages_have_same_blocks(name: str) -> None:
    script, blocks, reason = ANSWERS[name]
    whole = await made(front(*script), tools=[TOOL], **THINKS)
    streamed = accumulated(await events(front(*script), tools=[TOOL], **THINKS))
    for message in (whole, streamed):
        assert contents(message) == [dict(block) for block in blocks]
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, None)
    assert whole["usage"] == streamed["usage"]


@pytest.mark.parametrize(
    ("thinking", "is_shown"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive", "display": "omitted"}, False),
        ({"type": "adaptive"}, True),
        ({"type": "enabled", "budget_tokens": 1024}, True),
    ],
)
async def test_reasoning_then_it_is_shown_only_on_request(thinking: Any, is_shown: bool) -> None:
    script = [WHY, chunk("so", ids=[CONTENT]), stop()]
    message = await made(front(*script), thinking=thinking)
    assert contents(message) == [THOUGHT, ANSWER] if is_shown else [ANSWER]
    streamed = await events(front(*script), thinking=thinking)
    assert contents(accumulated(streamed)) == contents(message)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_stop_sequence_then_it_is_named(is_streamed: bool) -> None:
    served = front(chunk("a E"), chunk("ND b"), stop())
    fields = {"stop_sequences": ["END", "never"]}
    if is_streamed:
        message = accumulated(await events(served, **fields))
    else:
        message = await made(served, **fields)
    assert contents(message) == [{"type": "text", "text": "a "}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")


async def test_stop_sequence_after_a_call_then_the_call_counts() -> None:
    served = front(chunk("{}", ids=[CALL]), chunk("END", ids=[CONTENT]), stop())
    message = await made(served, tools=[TOOL], stop_sequences=["END"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


async def test_parallel_calls_when_disabled_then_the_first_one_only() -> None:
    served = front(*[chunk('{"a":[1]}', ids=[CALL])] * 2, stop())
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = await made(served, tools=[TOOL], tool_choice=choice)
    assert contents(message) == [CALLED]
    assert message["stop_reason"] == "tool_use"


@each_case(
    ("arguments", "given"),
    [
        ("", {}),
        (" ", {}),
        ("null", {}),
        ("[1]", {}),
        ('"{\\"x\\": 1}"', {"x": 1}),
        ('"x"', {}),
        ('\n {"x": 1} ', {"x": 1}),
        ('{"x": 1}} trailing {', {"x": 1}),
        ('{"x": 123456789012345678901234567890}', {"x": 123456789012345678901234567890}),
        ('{"x": ' + "[" * 300 + "]" * 300 + "}", None),
    ],
)
async def test_arguments_of_any_form_then_clients_get_an_object(arguments: str, given: Any) -> None:
    script = [chunk(ids=[CALL]), *(chunk(char) for char in arguments), stop()]
    given = json.loads(arguments) if given is None else given
    long = front(*script)
    assert contents(await made(long, tools=[TOOL]))[0]["input"] == given
    streamed = accumulated(await events(front(*script), tools=[TOOL]))
    assert contents(streamed)[0]["input"] == given


BROKEN = ('{"x": 1', '{"x": 1 2}', '{"\\ud800": 1}', "{" * 5000)


@pytest.mark.parametrize("arguments", BROKEN)
def test_arguments_that_are_no_json_are_an_empty_object(arguments: str) -> None:
    assert arguments_object(arguments) == "{}"


async def test_arguments_that_are_no_json_stream_unchanged() -> None:
    script = [chunk('{"x": ', ids=[CALL]), chunk("1", finish=FinishReason.LENGTH)]
    found = await events(front(*script), tools=[TOOL])
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(delta["partial_json"] for delta in deltas) == '{"x": 1'
    assert found[-2]["delta"]["stop_reason"] == "max_tokens"


async def test_statistics_are_in_message_and_last_delta() -> None:
    headers = {"x-dynamo-stats": "1", "x-api-key": "k", "authorization": "Bearer k"}
    whole = await ask(front(stop("x")), "POST", PATH, json=body(), headers=headers)
    assert whole.json()["dynamo_trtllm"]["kv_bytes"] == 4096
    asked = body(stream=True)
    streamed = await ask(front(stop("x")), "POST", PATH, json=asked, headers=headers)
    assert accumulated(parsed(streamed.text))["dynamo_trtllm"]["kv_bytes"] == 4096


# --- errors ------------------------------------------------------------------------------

FAULTS: list[tuple[DynamoError, int, str]] = [
    (errors.InvalidRequest("wrong"), 400, "invalid_request_error"),
    (errors.Overloaded("full"), 429, "rate_limit_error"),
    (errors.NoInstances("none"), 503, "overloaded_error"),
    (errors.DeadlineExceeded("late"), 504, "timeout_error"),
    (errors.StreamIncomplete("lost"), 502, "api_error"),
    (errors.EngineFailed("broken"), 500, "api_error"),
]


@each_case(("error", "status", "kind"), FAULTS)
async def test_error_then_in_anthropics_form(error: DynamoError, status: int, kind: str) -> None:
    assert check_error(await post(front(error)), status, kind, error.code) == error.message


@each_case(("error", "status", "kind"), FAULTS)
async def test_error_in_a_stream_then_its_last_event(
    error: DynamoError,
    status: int,
    kind: str,
) -> None:
    response = await post(front(chunk("a"), error), stream=True)
    last = parsed(response.text)[-1]
    detail = {"type": kind, "message": error.message, "param": None, "code": error.code}
    request_id = response.headers["x-request-id"]
    assert last == {"type": "error", "error": detail, "request_id": request_id}


@pytest.mark.parametrize(
    ("method", "path", "status", "kind", "code"),
    [
        ("GET", PATH, 405, "invalid_request_error", "method_not_allowed"),
        ("POST", f"{PATH}/batches", 404, "not_found_error", "unknown_url"),
    ],
)
async def test_unknown_path_has_the_anthropic_error_form(
    method: str, path: str, status: int, kind: str, code: str
) -> None:
    check_error(await ask(front(), method, path), status, kind, code)


async def test_unknown_path_of_another_api_has_the_openai_form() -> None:
    assert set((await ask(front(), "GET", "/v1/message")).json()) == {"error"}


@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_model_when_unknown_then_404(path: str) -> None:
    response = await post(front(), path, model="other")
    check_error(response, 404, "not_found_error", "model_not_found")


async def test_body_when_too_large_then_413() -> None:
    response = await post(front(max_body_bytes=1000), system="x" * 1000)
    check_error(response, 413, "request_too_large", "payload_too_large")


async def test_content_type_when_not_json_then_in_anthropics_form() -> None:
    response = await ask(front(), "POST", PATH, content=b"x", headers={"content-type": "text/csv"})
    check_error(response, 415, "invalid_request_error", "unsupported_media")


async def test_too_long_prompt_has_the_words_clients_look_for() -> None:
    response = await post(front(), system="x" * 200)
    message = check_error(response, 400, "invalid_request_error", "context_length_exceeded")
    assert message.startswith("prompt is too long: ")


async def test_max_tokens_over_context_are_reduced_to_fit() -> None:
    served = front(stop("x"))
    await made(served, max_tokens=32_000)
    assert served.router.requests[0].sampling.max_tokens == 98


async def test_page_of_another_origin_may_send_anthropic_headers() -> None:
    served = front(cors_origins="https://chat.example.org")
    wanted = "anthropic-version, x-api-key"
    headers = {
        "origin": "https://chat.example.org",
        "access-control-request-method": "POST",
        "access-control-request-headers": wanted,
    }
    response = await ask(served, "OPTIONS", PATH, headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-headers"] == wanted


# --- count_tokens ------------------------------------------------------------------------------


async def test_count_equals_input_tokens_without_generation() -> None:
    served = front(stop("x"))
    fields = {"system": "be", "messages": HI, "tools": [TOOL]}
    counted = await post(served, COUNT, **fields)
    assert counted.json() == {"input_tokens": 4}
    assert served.router.requests == []
    usage = (await made(served, **fields))["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 4


async def test_count_without_max_tokens_after_an_answer_works() -> None:
    asked = {"model": MODEL, "messages": [*HI, {"role": "assistant", "content": "there"}]}
    response = await ask(front(), "POST", COUNT, json=asked)
    assert response.json() == {"input_tokens": 7}
