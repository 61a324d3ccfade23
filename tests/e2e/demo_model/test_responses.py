"""`/v1/responses` of the demo model through real processes, by the openai SDK, sync and async."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall

from tests.e2e.demo_model.sdk_answers import at_once
from tests.e2e.demo_model.torch_cluster import TorchCluster
from tests.kit.cluster import PLAIN, TINY, Process, gauges, until
from tests.kit.waiting import SOON_S

pytestmark = pytest.mark.timeout(240)  # the first test also starts the cluster

QUESTION = "Hey, quick check: is everything up and running?"
HEALTH_TOOL: Any = {
    "type": "function",
    "name": "get_system_health",
    "description": (
        "Returns the current health status of the LLM runtime—use before critical operations to"
        " verify the service is live."
    ),
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}
HEALTH = '{"status":"ok","uptime_seconds":372045}'
GREEDY: dict[str, Any] = {"model": TINY, "temperature": 0, "reasoning": {"effort": "low"}}


def said(response: Response) -> list[tuple[str, str]]:
    """Kind and text of all items, in order."""
    found = []
    for item in response.output:
        if isinstance(item, ResponseFunctionToolCall):
            found.append((item.type, f"{item.name} {item.arguments}"))
        else:
            assert item.type in ("message", "reasoning")
            parts: Any = item.content
            found.append((item.type, parts[0].text))
    return found


def test_sdk_when_it_streams_then_the_same_response_as_whole(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = GREEDY | {"input": QUESTION, "max_output_tokens": 150}
    whole, events = at_once(
        lambda: sdk.responses.create(**asked),
        lambda: list(sdk.responses.create(**asked, stream=True)),
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert said(last.response) == said(whole)
    assert last.response.usage is not None
    assert whole.usage is not None
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    thought = "".join(
        event.delta for event in events if event.type == "response.reasoning_text.delta"
    )
    answered = "".join(
        event.delta for event in events if event.type == "response.output_text.delta"
    )
    assert thought == "".join(text for kind, text in said(whole) if kind == "reasoning")
    assert answered == whole.output_text


def test_sdk_stream_helper_builds_the_final_response(sdk: openai.OpenAI) -> None:
    with sdk.responses.stream(**GREEDY, input=QUESTION, tools=[HEALTH_TOOL]) as stream:
        arguments = [
            event.snapshot
            for event in stream
            if event.type == "response.function_call_arguments.delta"
        ]
    final = stream.get_final_response()
    *_, call = final.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, json.loads(call.arguments)) == ("get_system_health", {})
    assert arguments[-1] == call.arguments


async def test_async_sdk_then_whole_and_streamed(async_sdk: openai.AsyncOpenAI) -> None:
    whole = await async_sdk.responses.create(**GREEDY, input="Hello", max_output_tokens=20)
    stream = await async_sdk.responses.create(
        **GREEDY, input="Hello", max_output_tokens=20, stream=True
    )
    *_, last = [event async for event in stream]
    assert last.type in ("response.completed", "response.incomplete")
    assert said(last.response) == said(whole)
    assert (await async_sdk.responses.retrieve(whole.id)).to_dict() == whole.to_dict()


def test_two_turns_then_the_second_is_shown_the_first(sdk: openai.OpenAI) -> None:
    first = sdk.responses.create(**GREEDY, input="My name is Ada.", max_output_tokens=60)
    asked: dict[str, Any] = GREEDY | {"input": "What is my name?", "max_output_tokens": 20}
    alone, second = at_once(
        lambda: sdk.responses.create(**asked),
        lambda: sdk.responses.create(**asked, previous_response_id=first.id),
    )
    assert second.previous_response_id == first.id
    assert second.usage is not None
    assert alone.usage is not None
    assert second.usage.input_tokens > alone.usage.input_tokens
    listed = [item.type for item in sdk.responses.input_items.list(second.id, order="asc")]
    assert listed == ["message", *(item.type for item in first.output), "message"]


CHOICES: list[Any] = ["auto", "required", {"type": "function", "name": "get_system_health"}]


def test_tool_round_then_reasoning_call_and_result_go_on(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = GREEDY | {"tools": [HEALTH_TOOL]}
    rounds = at_once(
        *(
            partial(sdk.responses.create, **asked, input=QUESTION, tool_choice=tool_choice)
            for tool_choice in CHOICES
        )
    )
    seconds: list[Callable[[], Response]] = []
    for choice, first in zip(CHOICES, rounds, strict=True):
        *before, call = first.output
        assert isinstance(call, ResponseFunctionToolCall)
        assert (call.name, json.loads(call.arguments)) == ("get_system_health", {})
        assert [item.type for item in before] == (["reasoning"] if choice == "auto" else [])
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": HEALTH}
        seconds.append(
            partial(sdk.responses.create, **asked, input=[result], previous_response_id=first.id)
        )
        # once is enough, and only there the replayed items include a reasoning
        if choice == "auto":
            items = [item.to_dict() for item in first.output]
            replayed: Any = [{"role": "user", "content": QUESTION}, *items, result]
    *answers, same = at_once(*seconds, partial(sdk.responses.create, **asked, input=replayed))
    for second in answers:
        assert [kind for kind, _ in said(second)] == ["reasoning", "message"]
        assert "system" in second.output_text
    assert same.usage.input_tokens == answers[0].usage.input_tokens
    assert said(same) == said(answers[0])


def test_kept_response_then_retrieved_listed_and_deleted(sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(
        **GREEDY, input="Hello", max_output_tokens=10, metadata={"run": "7"}
    )
    assert sdk.responses.retrieve(response.id).to_dict() == response.to_dict()
    (item,) = sdk.responses.input_items.list(response.id)
    assert item.to_dict()["content"] == [{"type": "input_text", "text": "Hello"}]
    assert response.metadata == {"run": "7"}
    sdk.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.responses.retrieve(response.id)
    assert caught.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.responses.create(**GREEDY, input="x", previous_response_id=response.id)
    assert caught.value.param == "previous_response_id"


def test_running_stream_when_cancelled_then_both_calls_end(
    sdk: openai.OpenAI, torch_cluster: TorchCluster
) -> None:
    stream = sdk.responses.create(
        **GREEDY,
        input="Count.",
        stream=True,
        max_output_tokens=1500,
        extra_body={"ignore_eos": True},
    )
    events = []
    cancelled = None
    for event in stream:
        events.append(event)
        if cancelled is None and event.type.endswith(".delta"):
            assert events[0].type == "response.created"
            assert sdk.responses.retrieve(events[0].response.id).status == "in_progress"
            cancelled = sdk.responses.cancel(events[0].response.id)
    assert cancelled is not None
    assert cancelled.status == "cancelled"
    last = events[-1]
    assert last.type == "response.incomplete"
    assert (last.response.status, last.response.id) == ("cancelled", cancelled.id)
    assert sdk.responses.retrieve(cancelled.id).status == "cancelled"
    for worker in (torch_cluster.prefill, torch_cluster.decode):
        until(lambda worker=worker: gauges(worker).get("running", 0.0) == 0.0, SOON_S)  # type: ignore[misc]


def test_what_we_do_not_have_then_refused_by_name(sdk: openai.OpenAI) -> None:
    for fields in (
        {"background": True},
        {"conversation": "c"},
        {"truncation": "auto"},
        {"prompt": {"id": "p"}},
    ):
        (name,) = fields
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.responses.create(**GREEDY, input="x", **fields)  # type: ignore[call-overload]
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)
    hosted: Any = {"type": "web_search"}
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.responses.create(**GREEDY, input="x", tools=[hosted], tool_choice=hosted)
    assert caught.value.param == "tool_choice"


def test_tool_of_a_server_then_left_out_and_named(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = GREEDY | {"input": "x", "max_output_tokens": 20}
    raw = sdk.responses.with_raw_response.create(**asked, tools=[{"type": "web_search"}])
    assert raw.headers["x-dynamo-ignored-fields"] == "tools.web_search"
    assert raw.parse().status in ("completed", "incomplete")


def test_json_schema_then_the_answer_keeps_to_it(sdk: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    wanted: Any = {
        "type": "json_schema",
        "name": "health",
        "schema": schema | {"additionalProperties": False},
    }
    response = sdk.responses.create(**GREEDY, input="Is it up?", text={"format": wanted})
    assert response.status == "completed"
    assert isinstance(json.loads(response.output_text)["ok"], bool)


@pytest.fixture
def sharing(torch_cluster: TorchCluster) -> Iterator[tuple[openai.OpenAI, openai.OpenAI]]:
    """Two more frontends of the cluster, which keep responses in JetStream."""
    cluster = torch_cluster.cluster
    argv = ["--http-port", "0", "--response-store", "jetstream"]
    frontends = [Process("dynamo_trtllm.frontend", argv, cluster.env) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        clients = []
        for frontend in frontends:
            stack.callback(frontend.stop)
            http = stack.enter_context(openai.DefaultHttpxClient(**PLAIN))
            base_url = f"{frontend.url()}/v1"
            frontend.wait_for(f"model {TINY} is ready")
            clients.append(
                openai.OpenAI(base_url=base_url, api_key="none", http_client=http, max_retries=0)
            )
        yield clients[0], clients[1]


@pytest.mark.long  # tests/integration/test_responses_jetstream.py covers it without processes
def test_conversation_continues_at_another_frontend(
    sharing: tuple[openai.OpenAI, openai.OpenAI], sdk: openai.OpenAI
) -> None:
    here, there = sharing
    first = here.responses.create(**GREEDY, input=QUESTION, tools=[HEALTH_TOOL])
    *_, call = first.output
    assert isinstance(call, ResponseFunctionToolCall)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": HEALTH}
    second = there.responses.create(
        **GREEDY, input=[result], tools=[HEALTH_TOOL], previous_response_id=first.id
    )
    assert "system" in second.output_text
    assert here.responses.retrieve(second.id).to_dict() == second.to_dict()
    with pytest.raises(openai.NotFoundError, match="--response-store jetstream"):
        sdk.responses.retrieve(first.id)  # the frontend that keeps its own
