"""`/v1/responses` over HTTP against a scripted pipeline: items, events and objects held to the SDK's own types."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
    ResponseStreamEvent,
)
from openai.types.responses.response_item import ResponseItem

from dynamo_trtllm import errors
from dynamo_trtllm.messages import Chunk, FinishReason, Message, ToolCall
from tests.unit.frontend.scripted import CALL, CONTENT, HALF, MODEL, REASONING, Front, chunk, front, stop

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "get_system_health", "parameters": {"type": "object", "properties": {}}}
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
ITEM: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseItem)

ANSWERS: dict[str, list[Chunk]] = {
    "content": [chunk("Hel"), chunk(ids=[HALF]), chunk("lo"), stop()],
    "reasoning and content": [chunk("why", ids=[REASONING]), chunk("so", ids=[CONTENT]), stop("!")],
    "both in one step": [chunk("w", ids=[REASONING]), chunk("x" + chr(CONTENT) + "y"), stop()],
    "reasoning again": [chunk("a" + chr(CONTENT) + "b", ids=[REASONING]), chunk("c", ids=[REASONING]), stop()],
    "a call": [chunk("why", ids=[REASONING]), chunk("{", ids=[CALL]), chunk("}"), stop()],
    "two calls": [chunk("{}", ids=[CALL]), chunk("{}", ids=[CALL]), stop()],
    "a call without arguments": [chunk(ids=[CALL]), stop()],
    "nothing": [stop()],
    "cut": [chunk("Hel"), chunk("l", finish=FinishReason.LENGTH)],
    "a call that is cut": [chunk("{", ids=[CALL], finish=FinishReason.LENGTH)],
    "with logprobs": [*(chunk(each, logprobs=True) for each in ("Hé", chr(HALF), "x")), stop()],
    "with logprobs at the end": [chunk("H", logprobs=True), chunk(chr(HALF), logprobs=True), stop()],
}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi"} | fields


async def ask(served: Front, method: str, path: str, **kwargs: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=served.app), base_url="http://frontend") as client:
        return await client.request(method, path, **kwargs)


async def made(served: Front, **fields: Any) -> dict[str, Any]:
    response = await ask(served, "POST", PATH, json=body(**fields))
    assert response.status_code == 200, response.text
    return dict(response.json())


async def events(served: Front, **fields: Any) -> list[dict[str, Any]]:
    response = await ask(served, "POST", PATH, json=body(stream=True, **fields))
    assert response.headers["content-type"].startswith("text/event-stream")
    return parsed(response.text)


def parsed(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each named as its object says, numbered from 0 on."""
    found = []
    for block in text.rstrip("\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def check_error(response: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    return str(error["message"])


def check_unknown(value: Any) -> None:
    """No field that the SDK's types do not have, but `store`, which the API has, and ours."""
    if isinstance(value, pydantic.BaseModel):
        assert set(value.model_extra or ()) <= {"store", "dynamo_trtllm"}
        for name in type(value).model_fields:
            check_unknown(getattr(value, name))
    elif isinstance(value, list):
        for each in value:
            check_unknown(each)


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        volatile = ("id", "call_id", "item_id", "created_at", "completed_at")
        return {name: without_ids(each) for name, each in value.items() if name not in volatile}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


# --- what an answer is ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ANSWERS)
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


@pytest.mark.parametrize("name", ANSWERS)
async def test_stream_then_its_deltas_add_up_to_its_items(name: str) -> None:
    found = await events(front(*ANSWERS[name]))
    items = found[-1]["response"]["output"]
    assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == items
    texts = ["" for _ in items]
    for event in found:
        if event["type"].endswith(".delta"):
            assert event["item_id"] == items[event["output_index"]]["id"]
            texts[event["output_index"]] += event["delta"]
    assert texts == [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in items]


@pytest.mark.parametrize("name", ANSWERS)
async def test_stream_when_the_sdk_adds_it_up_then_it_has_the_final_response(name: str) -> None:
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=openai.omit)  # type: ignore[arg-type]
    for event in await events(front(*ANSWERS[name])):
        state.handle_event(EVENT.validate_python(event))
    if "cut" not in name:
        assert state._completed_response is not None


async def test_reasoning_content_and_call_then_an_item_each_in_order() -> None:
    served = front(chunk("why", ids=[REASONING]), chunk("Hel", ids=[CONTENT]), chunk("lo{}", ids=[CALL]), stop())
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
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert response.status == "completed"


async def test_stream_then_the_events_in_the_order_of_the_api() -> None:
    served = front(chunk("w", ids=[REASONING]), chunk("Hi", ids=[CONTENT]), chunk("{", ids=[CALL]), stop("}"))
    kinds = [event["type"].removeprefix("response.") for event in await events(served, tools=[TOOL])]
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


async def test_stats_when_asked_for_then_on_the_response() -> None:
    response = await ask(front(chunk("a"), stop()), "POST", PATH, json=body(), headers={"x-dynamo-stats": "1"})
    assert response.json()["dynamo_trtllm"]["prefill_instance"] == "ab"
    assert response.headers["x-decode-instance"] == "cd"


async def test_logprobs_when_included_then_on_deltas_and_on_the_text() -> None:
    served = front(chunk("Hé", logprobs=True), chunk(chr(HALF), logprobs=True), chunk("x", logprobs=True), stop())
    found = await events(served, include=["message.output_text.logprobs"])
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert [[each["token"] for each in event["logprobs"]] for event in deltas] == [["H", "é"], ["\ufffd", "x"]]
    part = found[-1]["response"]["output"][0]["content"][0]
    assert [each["token"] for each in part["logprobs"]] == ["H", "é", "\ufffd", "x"]
    assert part["logprobs"][1]["bytes"] == list("é".encode())
    assert part["logprobs"][2]["bytes"] == []  # half a character has none that are known


# --- what the model is shown ---------------------------------------------------------------------------


async def test_input_items_then_the_conversation_they_are() -> None:
    served = front(stop("x"))
    given = [
        {"role": "user", "content": "Is it up?"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}]}
        | {"content": [{"type": "reasoning_text", "text": "check"}]},
        {"type": "function_call", "call_id": "call-1", "name": "get_system_health", "arguments": "{}"},
        {"type": "function_call", "call_id": "call-2", "name": "get_system_health", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call-1", "output": "ok"},
        {"type": "function_call_output", "call_id": "call-2", "output": [{"type": "input_text", "text": "fine"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "only this"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "It is."}]},
        {"role": "user", "content": "Thanks"},
    ]
    await made(served, input=given, instructions="Be short.", tools=[TOOL], reasoning={"effort": "high"})
    conversation = served.catalog.renderer.conversations[0]
    calls = tuple(ToolCall(id=f"call-{number}", name="get_system_health", arguments="{}") for number in (1, 2))
    assert conversation.messages == (
        Message(role="system", content="Be short."),
        Message(role="user", content="Is it up?"),
        Message(role="assistant", reasoning="check", tool_calls=calls),
        Message(role="tool", content="ok", tool_call_id="call-1"),
        Message(role="tool", content="fine", tool_call_id="call-2"),
        Message(role="assistant", content="It is.", reasoning="only this"),
        Message(role="user", content="Thanks"),
    )
    assert [tool.name for tool in conversation.tools] == ["get_system_health"]
    assert conversation.reasoning_effort == "high"


async def test_previous_response_when_a_tool_was_called_then_reasoning_call_and_result_are_shown() -> None:
    served = front(chunk("why", ids=[REASONING]), chunk("{}", ids=[CALL]), stop())
    first = await made(served, input="Is it up?", instructions="Only this time.", tools=[TOOL])
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
    second = await made(served, input=[result], tools=[TOOL], previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert served.catalog.renderer.conversations[1].messages == (
        Message(role="user", content="Is it up?"),
        Message(
            role="assistant",
            reasoning="why",
            tool_calls=(ToolCall(id=call["call_id"], name="get_system_health", arguments="{}"),),
        ),
        Message(role="tool", content="ok", tool_call_id=call["call_id"]),
    )


async def test_previous_response_when_the_ones_before_it_are_deleted_then_it_stands_alone() -> None:
    served = front(stop("a"))
    first = await made(served, input="one")
    second = await made(served, input="two", previous_response_id=first["id"])
    assert (await ask(served, "DELETE", f"{PATH}/{first['id']}")).status_code == 200
    await made(served, input="three", previous_response_id=second["id"])
    shown = [message.content for message in served.catalog.renderer.conversations[2].messages]
    assert shown == ["one", "a", "two", "a", "three"]


async def test_call_when_it_was_cut_then_it_is_not_shown_again() -> None:
    served = front(chunk("{", ids=[CALL], finish=FinishReason.LENGTH))
    first = await made(served, tools=[TOOL])
    await made(served, input="go on", previous_response_id=first["id"])
    assert [message.role for message in served.catalog.renderer.conversations[1].messages] == ["user", "user"]


async def test_item_reference_then_the_item_of_a_kept_response() -> None:
    served = front(stop("kept words"))
    first = await made(served)
    listed = (await ask(served, "GET", f"{PATH}/{first['id']}/input_items")).json()["data"]
    references = [{"type": "item_reference", "id": each["id"]} for each in (*listed, *first["output"])]
    await made(served, input=[*references, {"role": "user", "content": "more"}])
    shown = [message.content for message in served.catalog.renderer.conversations[1].messages]
    assert shown == ["hi", "kept words", "more"]


async def test_item_reference_when_there_is_no_such_item_then_404_or_400() -> None:
    served = front(stop("x"))
    first = await made(served)
    gone = first["output"][0]["id"].replace("o0000", "o0009")
    response = await ask(served, "POST", PATH, json=body(input=[{"id": gone}]))
    check_error(response, 404, "response_not_found", "input[0].id")
    response = await ask(served, "POST", PATH, json=body(input=[{"id": "msg_abc"}]))
    check_error(response, 400, "invalid_request", "input[0].id")


async def test_result_of_no_call_then_400_says_what_to_send() -> None:
    result = {"type": "function_call_output", "call_id": "call-9", "output": "ok"}
    response = await ask(front(stop()), "POST", PATH, json=body(input=[result]))
    assert "previous_response_id" in check_error(response, 400, "invalid_request", "input")


async def test_too_many_tokens_then_the_field_is_called_as_here() -> None:
    response = await ask(front(stop()), "POST", PATH, json=body(max_output_tokens=5000))
    assert "max_output_tokens" in check_error(response, 400, "context_length_exceeded", "max_output_tokens")
    response = await ask(front(stop()), "POST", PATH, json=body(input="x" * 200))
    check_error(response, 400, "context_length_exceeded", "input")


async def test_long_conversation_then_answered_as_well() -> None:
    served = front(stop("x"), max_body_bytes=1 << 20)
    many = [{"role": "user", "content": ""} for _ in range(200)]
    await made(served, input=[*many, {"role": "user", "content": "hi"}])
    assert len(served.catalog.renderer.conversations[0].messages) == 201


# --- what is kept --------------------------------------------------------------------------------------


async def test_kept_response_then_got_listed_and_deleted() -> None:
    served = front(stop("Hello"))
    response = await made(served, input=[{"role": "user", "content": "one"}, {"role": "user", "content": "two"}])
    path = f"{PATH}/{response['id']}"
    assert (await ask(served, "GET", path)).json() == response
    listed = (await ask(served, "GET", f"{path}/input_items")).json()
    assert [item["content"][0]["text"] for item in listed["data"]] == ["two", "one"]
    assert (listed["first_id"], listed["has_more"]) == (listed["data"][0]["id"], False)
    for item in listed["data"]:
        check_unknown(ITEM.validate_json(json.dumps(item), strict=True))
    assert (await ask(served, "DELETE", path)).json() == {"id": response["id"], "object": "response", "deleted": True}
    check_error(await ask(served, "GET", path), 404, "response_not_found")
    check_error(await ask(served, "DELETE", path), 404, "response_not_found")
    check_error(await ask(served, "GET", f"{path}/input_items"), 404, "response_not_found")


async def test_input_items_then_paged_as_asked() -> None:
    served = front(stop("Hello"))
    response = await made(served, input=[{"role": "user", "content": str(number)} for number in range(5)])
    path = f"{PATH}/{response['id']}/input_items"
    first = (await ask(served, "GET", f"{path}?order=asc&limit=2")).json()
    assert [item["content"][0]["text"] for item in first["data"]] == ["0", "1"]
    assert first["has_more"]
    rest = (await ask(served, "GET", f"{path}?order=asc&after={first['last_id']}")).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "3", "4"]
    assert not rest["has_more"]
    for query, field in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order")):
        check_error(await ask(served, "GET", f"{path}?{query}"), 400, "invalid_request", field)
    check_error(await ask(served, "GET", f"{path}?after=nobody"), 404, "response_not_found", "after")
    check_error(await ask(served, "GET", f"{path}?before=x"), 400, "unsupported_parameter", "before")


async def test_every_kind_of_item_then_listed_as_the_sdk_has_it() -> None:
    served = front(chunk("why", ids=[REASONING]), chunk("so", ids=[CONTENT]), chunk("{}", ids=[CALL]), stop())
    first = await made(served, tools=[TOOL])
    result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "ok"}
    second = await made(served, input=[result], previous_response_id=first["id"])
    listed = (await ask(served, "GET", f"{PATH}/{second['id']}/input_items?order=asc")).json()["data"]
    kinds = ["message", "reasoning", "message", "function_call", "function_call_output"]
    assert [item["type"] for item in listed] == kinds
    for item in listed:
        check_unknown(ITEM.validate_json(json.dumps(item), strict=True))
    assert len({item["id"] for item in listed}) == len(listed)


async def test_store_false_then_nothing_is_kept() -> None:
    served = front(stop("x"))
    response = await made(served, store=False)
    message = check_error(await ask(served, "GET", f"{PATH}/{response['id']}"), 404, "response_not_found")
    assert "store=false" in message


@pytest.mark.parametrize(
    ("response_id", "words"),
    [("resp_" + "0" * 40, "--response-store jetstream"), ("resp_1", "no id of a response"), ("x", "no id")],
)
async def test_id_of_another_frontend_then_says_what_to_do(response_id: str, words: str) -> None:
    served = front(stop("x"))
    assert words in check_error(await ask(served, "GET", f"{PATH}/{response_id}"), 404, "response_not_found")
    response = await ask(served, "POST", PATH, json=body(previous_response_id=response_id))
    assert words in check_error(response, 404, "response_not_found", "previous_response_id")


async def test_store_when_it_is_full_then_the_oldest_goes() -> None:
    served = front(stop("x"), response_store_entries=2)
    ids = [(await made(served))["id"] for _ in range(3)]
    statuses = [(await ask(served, "GET", f"{PATH}/{each}")).status_code for each in ids]
    assert statuses == [404, 200, 200]


async def test_store_when_a_response_is_larger_than_it_then_answered_all_the_same() -> None:
    served = front(stop("x"), response_store_bytes=64)
    response = await made(served)
    assert response["status"] == "completed"
    assert (await ask(served, "GET", f"{PATH}/{response['id']}")).status_code == 404


@pytest.mark.parametrize("query", ["stream=true", "starting_after=3", "include=reasoning.encrypted_content"])
async def test_retrieve_with_what_we_do_not_honour_then_refused_by_name(query: str) -> None:
    served = front(stop("x"))
    response = await made(served)
    refused = await ask(served, "GET", f"{PATH}/{response['id']}?{query}")
    check_error(refused, 400, "unsupported_parameter", query.partition("=")[0])


# --- failures and cancels ------------------------------------------------------------------------------


async def test_stream_when_a_worker_fails_then_error_and_failed_response() -> None:
    found = await events(front(chunk("Hel"), errors.TransferFailed("KV was lost")))
    for event in found:
        check_unknown(EVENT.validate_json(json.dumps(event), strict=True))
    *_, done, error, failed = found
    assert done["item"]["status"] == "incomplete"
    assert (error["type"], error["code"], error["message"]) == ("error", "transfer", "KV was lost")
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "KV was lost"}
    assert failed["response"]["output"][0]["content"][0]["text"] == "Hel"


async def test_failure_before_a_token_then_a_status_of_its_own() -> None:
    for stream in (False, True):
        response = await ask(front(errors.Overloaded("full")), "POST", PATH, json=body(stream=stream))
        check_error(response, 429, "overloaded")


class Reader:
    """A client of a stream that says when text arrives."""

    def __init__(self, served: Front, request: dict[str, Any]) -> None:
        self.text = ""
        self.arrived = asyncio.Event()
        self._served = served
        self._request = json.dumps(request).encode()
        self._sent = False

    async def run(self) -> None:
        scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b"", "raw_path": b""}
        await self._served.app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self._sent:
            await asyncio.Event().wait()
        self._sent = True
        return {"type": "http.request", "body": self._request, "more_body": False}

    async def _send(self, message: Any) -> None:
        self.text += message.get("body", b"").decode()
        if "delta" in self.text:
            self.arrived.set()


async def test_running_stream_then_seen_and_cancelled() -> None:
    served = front(chunk("Hel"), asyncio.Event(), stop("lo"))
    reader = Reader(served, body(stream=True))
    task = asyncio.create_task(reader.run())
    await reader.arrived.wait()
    response_id = parsed(reader.text)[0]["response"]["id"]
    path = f"{PATH}/{response_id}"
    running = (await ask(served, "GET", path)).json()
    assert (running["status"], running["output"][0]["content"][0]["text"]) == ("in_progress", "Hel")
    listed = (await ask(served, "GET", f"{path}/input_items")).json()
    assert listed["data"][0]["content"][0]["text"] == "hi"
    check_error(await ask(served, "DELETE", path), 400, "invalid_request")
    cancelled = (await ask(served, "POST", f"{path}/cancel")).json()
    await task
    Response.model_validate_json(json.dumps(cancelled), strict=True)
    assert cancelled["status"] == "cancelled"
    assert served.pipeline.running == 0
    *_, done, last = parsed(reader.text)
    assert done["item"]["status"] == "incomplete"
    assert (last["type"], last["response"]) == ("response.incomplete", cancelled)
    EVENT.validate_json(json.dumps(last), strict=True)
    assert (await ask(served, "GET", path)).json() == cancelled
    assert (await ask(served, "POST", f"{path}/cancel")).json() == cancelled


async def test_cancel_when_it_is_not_to_be_kept_then_ended_and_forgotten() -> None:
    served = front(chunk("Hel"), asyncio.Event(), stop("lo"))
    reader = Reader(served, body(stream=True, store=False))
    task = asyncio.create_task(reader.run())
    await reader.arrived.wait()
    path = f"{PATH}/{parsed(reader.text)[0]['response']['id']}"
    assert (await ask(served, "GET", path)).status_code == 404
    assert (await ask(served, "POST", f"{path}/cancel")).json()["status"] == "cancelled"
    await task
    assert served.pipeline.running == 0
    assert (await ask(served, "GET", path)).status_code == 404


async def test_cancel_when_it_has_ended_then_the_response_as_it_is() -> None:
    served = front(stop("x"))
    response = await made(served)
    assert (await ask(served, "POST", f"{PATH}/{response['id']}/cancel")).json() == response
    check_error(await ask(served, "POST", f"{PATH}/resp_1/cancel"), 404, "response_not_found")


async def test_stream_when_its_client_leaves_then_the_response_is_forgotten() -> None:
    served = front(chunk("Hel"), asyncio.Event(), stop("lo"))
    reader = Reader(served, body(stream=True))
    task = asyncio.create_task(reader.run())
    await reader.arrived.wait()
    path = f"{PATH}/{parsed(reader.text)[0]['response']['id']}"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert served.pipeline.running == 0
    check_error(await ask(served, "GET", path), 404, "response_not_found")
