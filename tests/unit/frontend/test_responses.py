"""`/v1/responses` over HTTP against a scripted router: objects and events, held to the SDK's own
types.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import openai
import pytest
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
)

from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol import errors
from dynamo_trtllm.protocol.messages import Chunk, FinishReason, SamplingDefaults
from tests.kit.cases import each_case
from tests.kit.frontend_app import (
    CALL,
    CARD,
    CONTENT,
    HALF,
    MODEL,
    REASONING,
    chunk,
    front,
    stop,
)
from tests.unit.frontend.responses_client import (
    EVENT,
    PATH,
    TOOL,
    ask,
    body,
    check_error,
    check_unknown,
    events,
    made,
)

ANSWERS: dict[str, list[Chunk]] = {
    "content": [chunk("Hel"), chunk(ids=[HALF]), chunk("lo"), stop()],
    "reasoning and content": [chunk("why", ids=[REASONING]), chunk("so", ids=[CONTENT]), stop("!")],
    "both in one step": [chunk("w", ids=[REASONING]), chunk("x" + chr(CONTENT) + "y"), stop()],
    "reasoning again": [
        chunk("a" + chr(CONTENT) + "b", ids=[REASONING]),
        chunk("c", ids=[REASONING]),
        stop(),
    ],
    "a call": [chunk("why", ids=[REASONING]), chunk("{", ids=[CALL]), chunk("}"), stop()],
    "two calls": [chunk("{}", ids=[CALL]), chunk("{}", ids=[CALL]), stop()],
    "a call without arguments": [chunk(ids=[CALL]), stop()],
    "nothing": [stop()],
    "cut": [chunk("Hel"), chunk("l", finish=FinishReason.LENGTH)],
    "a call that is cut": [chunk("{", ids=[CALL], finish=FinishReason.LENGTH)],
    "with logprobs": [*(chunk(text, logprobs=True) for text in ("Hé", chr(HALF), "x")), stop()],
    "with logprobs before reasoning": [
        chunk("H", logprobs=True),
        chunk(chr(HALF), logprobs=True),
        chunk("w", ids=[REASONING]),
        stop(),
    ],
    "with logprobs at the end": [
        chunk("H", logprobs=True),
        chunk(chr(HALF), logprobs=True),
        stop(),
    ],
}


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        volatile = ("id", "call_id", "item_id", "created_at", "completed_at")
        return {name: without_ids(member) for name, member in value.items() if name not in volatile}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


@each_case("name", ANSWERS)
async def test_whole_and_streamed_then_the_same_and_of_the_sdks_types(name: str) -> None:
    fields: dict[str, Any] = {"tools": [TOOL]} | ({"top_logprobs": 1} if "logprobs" in name else {})
    whole = await made(front(*ANSWERS[name]), **fields)
    response = Response.model_validate_json(json.dumps(whole), strict=True)
    check_unknown(response)
    found = await events(front(*ANSWERS[name]), **fields)
    for event in found:
        check_unknown(EVENT.validate_json(json.dumps(event), strict=True))
    assert without_ids(found[-1]["response"]) == without_ids(whole)
    assert found[-1]["type"] == f"response.{whole['status']}"


@each_case("name", ANSWERS)
async def test_stream_then_its_deltas_add_up_to_its_items(name: str) -> None:
    found = await events(front(*ANSWERS[name]))
    items = found[-1]["response"]["output"]
    assert [
        event["item"] for event in found if event["type"] == "response.output_item.done"
    ] == items
    texts = ["" for _ in items]
    for event in found:
        if event["type"].endswith(".delta"):
            assert event["item_id"] == items[event["output_index"]]["id"]
            texts[event["output_index"]] += event["delta"]
    assert texts == [
        item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in items
    ]


@each_case("name", ANSWERS)
async def test_sdk_accumulates_the_final_response(name: str) -> None:
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=openai.omit)  # type: ignore[arg-type]
    for event in await events(front(*ANSWERS[name])):
        state.handle_event(EVENT.validate_python(event))
    if "cut" not in name:
        assert state._completed_response is not None


async def test_reasoning_content_and_call_then_an_item_each_in_order() -> None:
    served = front(
        chunk("why", ids=[REASONING]),
        chunk("Hel", ids=[CONTENT]),
        chunk("lo{}", ids=[CALL]),
        stop(),
    )
    response = Response.model_validate(await made(served, tools=[TOOL]))
    thought, said, call = response.output
    assert isinstance(thought, ResponseReasoningItem)
    assert thought.content is not None
    assert [part.text for part in thought.content] == ["why"]
    assert isinstance(said, ResponseOutputMessage)
    assert (response.output_text, said.status) == ("Hel", "completed")
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, call.arguments, call.status) == ("get_system_health", "lo{}", "completed")
    assert response.usage is not None
    assert response.usage.output_tokens == 14
    assert response.usage.output_tokens_details.reasoning_tokens == 3
    assert response.usage.input_tokens_details.cached_tokens == 2
    assert response.status == "completed"


async def test_stream_then_the_events_in_the_order_of_the_api() -> None:
    served = front(
        chunk("w", ids=[REASONING]), chunk("Hi", ids=[CONTENT]), chunk("{", ids=[CALL]), stop("}")
    )
    kinds = [
        event["type"].removeprefix("response.") for event in await events(served, tools=[TOOL])
    ]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


async def test_answer_when_it_is_cut_then_incomplete_says_why() -> None:
    response = await made(front(chunk("Hel", finish=FinishReason.LENGTH)), max_output_tokens=3)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["completed_at"] is None
    assert response["output"][0]["status"] == "incomplete"
    assert response["max_output_tokens"] == 3


async def test_answer_then_what_was_asked_is_echoed() -> None:
    asked = {
        "instructions": "Be short.",
        "metadata": {"run": "7"},
        "temperature": 0.25,
        "top_p": 0.5,
        "tools": [TOOL | {"description": "", "strict": False}],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "user": "u",
        "store": False,
        "top_logprobs": 2,
    }
    response = await made(front(stop("x")), reasoning={"effort": "low"}, **asked)
    assert {name: response[name] for name in asked} == asked
    assert response["reasoning"]["effort"] == "low"


async def test_answer_echoes_the_sampling_defaults() -> None:
    served = front(stop("x"))
    defaults = SamplingDefaults(temperature=0.5, top_p=0.75)
    card = msgspec.structs.replace(CARD, sampling_defaults=defaults)
    served.catalog.served[MODEL] = ServedModel(card, served.catalog.renderer)
    response = await made(served, top_p=1.0)
    assert (response["temperature"], response["top_p"]) == (0.5, 1.0)


async def test_stats_when_asked_for_then_on_the_response() -> None:
    response = await ask(
        front(chunk("a"), stop()), "POST", PATH, json=body(), headers={"x-dynamo-stats": "1"}
    )
    assert response.json()["dynamo_trtllm"]["prefill_instance"] == "ab"
    assert response.headers["x-decode-instance"] == "cd"


async def test_logprobs_when_included_then_on_deltas_and_on_the_text() -> None:
    served = front(
        chunk("Hé", logprobs=True),
        chunk(chr(HALF), logprobs=True),
        chunk("x", logprobs=True),
        stop(),
    )
    found = await events(served, include=["message.output_text.logprobs"])
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in event["logprobs"]] for event in deltas] == [
        ["H", "é"],
        ["\ufffd", "x"],
    ]
    part = found[-1]["response"]["output"][0]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["H", "é", "\ufffd", "x"]
    assert part["logprobs"][1]["bytes"] == list("é".encode())
    assert part["logprobs"][2]["bytes"] == []  # half a character has none that are known


async def test_stream_with_failed_worker_has_error_and_response() -> None:
    found = await events(front(chunk("Hel"), errors.TransferFailed("KV was lost")))
    for event in found:
        check_unknown(EVENT.validate_json(json.dumps(event), strict=True))
    *_, done, error, failed = found
    assert done["item"]["status"] == "incomplete"
    assert (error["type"], error["code"], error["message"]) == (
        "error",
        "transfer_failed",
        "KV was lost",
    )
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "KV was lost"}
    assert failed["response"]["output"][0]["content"][0]["text"] == "Hel"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.Overloaded("full"), "rate_limit_exceeded"),
        (errors.EngineFailed("gone"), "server_error"),
        (errors.ContextTooLong("long"), "invalid_prompt"),
    ],
)
async def test_stream_when_it_fails_then_the_code_is_one_of_the_api(
    error: errors.DynamoError, code: str
) -> None:
    *_, error_event, failed = await events(front(chunk("Hel"), error))
    assert (error_event["code"], failed["response"]["error"]["code"]) == (error.code, code)


async def test_failure_before_a_token_then_a_status_of_its_own() -> None:
    for stream in (False, True):
        response = await ask(
            front(errors.Overloaded("full")), "POST", PATH, json=body(stream=stream)
        )
        check_error(response, 429, "overloaded")
