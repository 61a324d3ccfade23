"""`/v1/responses`: what the model is shown of items, earlier responses and references."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response

from dynamo_trtllm.frontend.responses_api import response_builder, response_store
from dynamo_trtllm.frontend.responses_api.key_value_store import MemoryStore
from dynamo_trtllm.frontend.tokenization.conversation import Message, ToolCall
from dynamo_trtllm.protocol.messages import FinishReason
from tests.kit.frontend_app import (
    CALL,
    REASONING,
    Catalog,
    FakeFrontend,
    ScriptedRouter,
    chunk,
    front,
    stop,
)
from tests.unit.frontend.responses_client import PATH, TOOL, ask, body, check_error, made


async def test_input_items_then_the_conversation_they_are() -> None:
    served = front(stop("x"))
    given = [
        {"role": "user", "content": "Is it up?"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}]}
        | {"content": [{"type": "reasoning_text", "text": "check"}]},
        {
            "type": "function_call",
            "call_id": "call-1",
            "name": "get_system_health",
            "arguments": "{}",
        },
        {
            "type": "function_call",
            "call_id": "call-2",
            "name": "get_system_health",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "call-1", "output": "ok"},
        {
            "type": "function_call_output",
            "call_id": "call-2",
            "output": [{"type": "input_text", "text": "fine"}],
        },
        {
            "type": "reasoning",
            "id": "rs_2",
            "summary": [{"type": "summary_text", "text": "only this"}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "It is."}]},
        {"role": "user", "content": "Thanks"},
    ]
    await made(
        served, input=given, instructions="Be short.", tools=[TOOL], reasoning={"effort": "high"}
    )
    conversation = served.catalog.renderer.conversations[0]
    calls = tuple(
        ToolCall(id=f"call-{number}", name="get_system_health", arguments="{}") for number in (1, 2)
    )
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


async def test_previous_response_shows_reasoning_call_and_result() -> None:
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


async def test_previous_response_survives_deleted_ancestors() -> None:
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
    assert [message.role for message in served.catalog.renderer.conversations[1].messages] == [
        "user",
        "user",
    ]


async def test_item_reference_then_the_item_of_a_kept_response() -> None:
    served = front(stop("kept words"))
    first = await made(served)
    listed = (await ask(served, "GET", f"{PATH}/{first['id']}/input_items")).json()["data"]
    references = [
        {"type": "item_reference", "id": item["id"]} for item in (*listed, *first["output"])
    ]
    await made(served, input=[*references, {"role": "user", "content": "more"}])
    shown = [message.content for message in served.catalog.renderer.conversations[1].messages]
    assert shown == ["hi", "kept words", "more"]


async def test_item_reference_to_a_custom_call_then_the_call() -> None:
    served = front(stop("x"))
    called = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "a"}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "patched"}
    first = await made(served, input=[called, result])
    listed = (await ask(served, "GET", f"{PATH}/{first['id']}/input_items?order=asc")).json()
    references = [{"type": "item_reference", "id": item["id"]} for item in listed["data"]]
    await made(served, input=[*references, {"role": "user", "content": "more"}])
    shown = served.catalog.renderer.conversations[1].messages
    assert [message.role for message in shown] == ["assistant", "tool", "user"]


async def test_item_reference_unknown_is_404_or_400() -> None:
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
    assert "max_output_tokens" in check_error(
        response, 400, "context_length_exceeded", "max_output_tokens"
    )
    response = await ask(front(stop()), "POST", PATH, json=body(input="x" * 200))
    check_error(response, 400, "context_length_exceeded", "input")


OTHER = TOOL | {"name": "restart"}


@pytest.mark.parametrize(
    ("choice", "visible"),
    [
        ("auto", ["get_system_health", "restart"]),
        ("none", []),
        ({"type": "function", "name": "restart"}, ["get_system_health", "restart"]),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "restart"}],
            },
            ["restart"],
        ),
    ],
)
async def test_tool_choice_then_the_tools_that_the_prompt_has(
    choice: Any, visible: list[str]
) -> None:
    served = front(stop("x"))
    response = await made(served, tools=[TOOL, OTHER], tool_choice=choice)
    assert [tool.name for tool in served.catalog.renderer.conversations[0].tools] == visible
    assert response["tool_choice"] == choice
    Response.model_validate_json(json.dumps(response), strict=True)


async def test_tool_choice_of_named_tool_forces_its_call() -> None:
    served = front(chunk("{}"), stop())
    choice = {"type": "function", "name": "get_system_health"}
    response = await made(served, tools=[TOOL], tool_choice=choice)
    (call,) = response["output"]
    assert (call["name"], call["arguments"]) == ("get_system_health", "{}")
    assert served.router.requests[0].token_ids[-1] == CALL


async def test_tool_choice_when_it_names_no_tool_then_400() -> None:
    response = await ask(
        front(stop()), "POST", PATH, json=body(tool_choice={"type": "function", "name": "f"})
    )
    check_error(response, 400, "invalid_request", "tool_choice")


async def test_text_format_guides_the_engine_and_is_echoed() -> None:
    served = front(stop("{}"))
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
    wanted = {"type": "json_schema", "name": "health", "schema": schema}
    response = await made(served, text={"format": wanted})
    guided = served.router.requests[0].sampling.guided
    assert guided is not None
    assert json.loads(guided.alternatives[0].json_schema) == schema
    assert response["text"]["format"] == wanted | {"strict": True}
    Response.model_validate_json(json.dumps(response), strict=True)


async def test_long_conversation_then_rendered_off_the_loop() -> None:
    served = FakeFrontend(ScriptedRouter([stop("x")]), catalog=Catalog(context_length=10_000))
    first = await made(served, input="a" * 700)
    await made(served, input="b" * 700, previous_response_id=first["id"])
    assert served.catalog.renderer.rendered_on_loop == [True, False]


async def test_many_references_read_each_response_once(monkeypatch: pytest.MonkeyPatch) -> None:
    served = front(stop("Hello"))
    response = await made(served)
    get = MemoryStore.get
    reads = []

    async def counted(store: MemoryStore, key: str) -> bytes | None:
        reads.append(key)
        return await get(store, key)

    monkeypatch.setattr(MemoryStore, "get", counted)
    references = [{"id": response["output"][0]["id"]}] * 10
    await made(served, input=references)
    assert reads == [response["id"]]
    monkeypatch.setattr(response_store, "MAX_REFERRED_BYTES", 100)
    refused = await ask(served, "POST", PATH, json=body(input=references))
    assert "more than 100 bytes" in check_error(refused, 400, "invalid_request", "input[0].id")
    monkeypatch.undo()
    monkeypatch.setattr(response_builder, "MAX_TEXT", 20)
    refused = await ask(served, "POST", PATH, json=body(input=references))
    assert "50 characters" in check_error(refused, 400, "invalid_request", "input")
