"""Several choices of one answer: parallel, distinguished, counted once, ended together."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from dynamo_trtllm.cluster.request_plane.inproc import InprocPlane
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.requests.admission import CHOICES_PER_ITERATION
from dynamo_trtllm.frontend.requests.choice import ChoiceDelta, pick_best_of
from dynamo_trtllm.frontend.requests.preprocess import GenerationPlan
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.tokenization.output import Channel, Delta
from dynamo_trtllm.protocol import errors
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    TokenLogprob,
    token_ids,
)
from dynamo_trtllm.protocol.streams import OnEvent, Stream, StreamEvent, StreamHandle
from tests.kit.frontend_app import CALL, MODEL, FakeFrontend, ScriptedRouter, chunk, stop
from tests.kit.memory_http import asgi

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


class RouterOfChoices:
    """A router that plays another script for each choice."""

    placement = None  # it selects no workers

    def __init__(self, *scripts: list[Any]) -> None:
        self.view = ClusterView()
        self.plane = InprocPlane()
        self.routers = [ScriptedRouter(script) for script in scripts]
        self.requests: list[GenerateRequest] = []

    def generate(
        self, request: GenerateRequest, trace: ChoiceTimeline, on_event: OnEvent
    ) -> StreamHandle:
        self.requests.append(request)
        return self.routers[len(self.requests) - 1].generate(request, trace, on_event)

    @property
    def running(self) -> int:
        return sum(router.running for router in self.routers)


def with_scripts(*scripts: list[Any], **config: object) -> FakeFrontend:
    return FakeFrontend(RouterOfChoices(*scripts), FrontendConfig.model_validate(config))  # type: ignore[arg-type]


async def post(
    served: FakeFrontend, path: str, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    transport = httpx.ASGITransport(app=asgi(served.app))
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        return await client.post(path, json={"model": MODEL} | prompt | fields, headers=headers)


def events(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    assert lines.count("[DONE]") == 1
    return [json.loads(line) for line in lines[:-1]]


def scored(text: str, logprob: float) -> Chunk:
    ids = [*map(ord, text)]
    return Chunk(
        token_ids=token_ids(ids), logprobs=tuple(TokenLogprob(token, logprob) for token in ids)
    )


# --- whole answers --------------------------------------------------------------------------------


async def test_n_choices_count_the_prompt_once() -> None:
    served = with_scripts(
        [chunk("a"), stop()], [chunk("bb"), chunk("b", finish=FinishReason.LENGTH)]
    )
    response = await post(served, CHAT, n=2, seed=7)
    body = response.json()
    assert [
        (choice["index"], choice["message"]["content"], choice["finish_reason"])
        for choice in body["choices"]
    ] == [
        (0, "a", "stop"),
        (1, "bbb", "length"),
    ]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert [request.sampling.seed for request in served.router.requests] == [7, 8]
    assert len({request.request_id for request in served.router.requests}) == 2
    assert response.headers["x-decode-instance"] == "cd"


async def test_several_prompts_give_choices_in_order() -> None:
    served = with_scripts([stop("a")], [stop("b")], [stop("c")], [stop("d")])
    body = (await post(served, TEXT, prompt=["x", "yy"], n=2)).json()
    assert [choice["text"] for choice in body["choices"]] == ["a", "b", "c", "d"]
    assert [list(request.token_ids) for request in served.router.requests] == [[120]] * 2 + [
        [121, 121]
    ] * 2
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 8


async def test_choices_then_they_run_side_by_side() -> None:
    second_ran = asyncio.Event()
    served = with_scripts([second_ran, stop("a")], [stop("b")])
    asking = asyncio.create_task(post(served, TEXT, n=2))
    await served.router.routers[1].closed.wait()
    second_ran.set()
    assert [choice["text"] for choice in (await asking).json()["choices"]] == ["a", "b"]


async def test_best_of_returns_the_likeliest_first() -> None:
    served = with_scripts(
        [scored("unlikely", -2.0), stop()],
        [scored("a long but likely text", -0.2), stop()],
        [scored("meh", -1.0), stop()],
    )
    body = (await post(served, TEXT, n=2, best_of=3)).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "a long but likely text"),
        (1, "meh"),
    ]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert {request.sampling.logprobs for request in served.router.requests} == {0}
    assert body["usage"]["prompt_tokens"] == 2
    assert (
        body["usage"]["completion_tokens"] == len("unlikely" + "a long but likely text" + "meh") + 3
    )


async def test_best_of_logprobs_are_of_the_returned_choice() -> None:
    served = with_scripts([scored("no", -2.0), stop()], [scored("yes", -0.5), stop()])
    (choice,) = (await post(served, TEXT, best_of=2, logprobs=1)).json()["choices"]
    assert choice["text"] == "yes"
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 3
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


async def test_echo_then_each_choice_begins_with_its_own_prompt() -> None:
    served = with_scripts([stop("1")], [stop("2")], [stop("3")], [stop("4")])
    body = (await post(served, TEXT, prompt=["ab", [99, 100]], n=2, echo=True)).json()
    assert [choice["text"] for choice in body["choices"]] == ["ab1", "ab2", "cd3", "cd4"]


# --- streams --------------------------------------------------------------------------------------


async def test_n_streamed_choices_are_interleaved_by_index() -> None:
    first = asyncio.Event()
    second = asyncio.Event()
    served = with_scripts(
        [chunk("a"), first, chunk("A"), stop()], [chunk("{", ids=[CALL]), second, stop("}")]
    )
    asking = asyncio.create_task(
        post(served, CHAT, n=2, stream=True, stream_options={"include_usage": True})
    )
    await served.router.routers[1].begun.wait()
    second.set()
    await served.router.routers[1].closed.wait()
    first.set()
    *parts, totals = events(await asking)
    assert {part["id"] for part in parts} == {totals["id"]}
    assert [len(part["choices"]) for part in parts] == [1] * len(parts)
    choices = [part["choices"][0] for part in parts]
    assert [choice["index"] for choice in choices[:2]] == [0, 1]
    assert all(choice["delta"]["role"] == "assistant" for choice in choices[:2])
    of = {index: [choice for choice in choices if choice["index"] == index] for index in (0, 1)}
    assert "".join(choice["delta"].get("content", "") for choice in of[0]) == "aA"
    calls = [call for choice in of[1] for call in choice["delta"].get("tool_calls", [])]
    assert "".join(call["function"]["arguments"] for call in calls) == "{}"
    assert [of[index][-1]["finish_reason"] for index in (0, 1)] == ["stop", "tool_calls"]
    assert sum(choice["finish_reason"] is not None for choice in choices) == 2
    assert choices.index(of[1][-1]) < choices.index(of[0][-1])  # the second choice ended first
    assert all(part["usage"] is None for part in parts)
    assert (totals["choices"], totals["usage"]["prompt_tokens"]) == ([], 2)
    assert totals["usage"]["completion_tokens"] == 7


async def test_text_stream_with_echo_then_each_prompt_comes_first() -> None:
    got = events(
        await post(
            with_scripts([stop("1")], [stop("2")]),
            TEXT,
            prompt=["ab", "cd"],
            echo=True,
            stream=True,
        )
    )
    texts = {
        index: [
            event["choices"][0]["text"] for event in got if event["choices"][0]["index"] == index
        ]
        for index in (0, 1)
    }
    assert texts == {0: ["ab", "1", ""], 1: ["cd", "2", ""]}


async def test_text_stream_logprob_offsets_count_per_choice() -> None:
    served = with_scripts(
        [scored("ab", -1.0), scored("c", -1.0), stop()], [scored("xyz", -1.0), stop()]
    )
    got = events(await post(served, TEXT, n=2, logprobs=0, stream=True))
    offsets: dict[int, list[int]] = {0: [], 1: []}
    for event in got:
        (choice,) = event["choices"]
        offsets[choice["index"]] += choice["logprobs"]["text_offset"] if choice["logprobs"] else []
    assert offsets == {0: [0, 1, 2], 1: [0, 1, 2]}


async def test_best_of_when_streamed_then_refused_by_name() -> None:
    response = await post(with_scripts(), TEXT, best_of=2, stream=True)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "best_of"


async def test_stats_when_several_choices_then_the_whole_and_each() -> None:
    served = with_scripts([chunk("a"), stop("b")], [chunk("c"), stop("d")])
    stats = (await post(served, CHAT, {"x-dynamo-stats": "1"}, n=2)).json()["dynamo_trtllm"]
    assert (stats["prefill_instance"], stats["decode_instance"]) == ("ab", "cd")
    assert stats["kv_bytes"] == 2 * 4096
    for some in (stats, *stats["choices"]):
        assert sum(some["phase_s"].values()) == pytest.approx(some["total_s"])
    assert [choice["kv_bytes"] for choice in stats["choices"]] == [4096, 4096]
    assert stats["ttft_s"] == min(choice["ttft_s"] for choice in stats["choices"])


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_choice_error_before_headers_closes_all(stream: bool) -> None:
    served = with_scripts([asyncio.Event()], [errors.EngineFailed("died")], [asyncio.Event()])
    response = await post(served, CHAT, n=3, stream=stream)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_failed"
    assert served.router.running == 0


async def test_choice_error_after_headers_is_one_event() -> None:
    shown = asyncio.Event()
    served = with_scripts([chunk("a"), asyncio.Event()], [shown, errors.Disconnected("lost")])
    asking = asyncio.create_task(post(served, CHAT, n=2, stream=True))
    await served.router.routers[0].begun.wait()
    shown.set()
    got = events(await asking)
    assert got[-1]["error"]["code"] == "disconnected"
    assert served.router.running == 0


async def test_client_gone_closes_choices_and_returns_permits() -> None:
    served = with_scripts(
        [chunk("a"), asyncio.Event()], [chunk("b"), asyncio.Event()], max_inflight=2
    )
    begun = [router.begun for router in served.router.routers]
    body = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "n": 2, "stream": True}
    )
    parts: list[Any] = [{"type": "http.request", "body": body.encode()}]

    async def receive() -> Any:
        if parts:
            return parts.pop()
        await asyncio.gather(*(event.wait() for event in begun))
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
        "root_path": "",
    }
    await asgi(served.app)(scope, receive, send)
    assert served.router.running == 0
    served.router.routers += [ScriptedRouter([stop("a")]), ScriptedRouter([stop("b")])]
    assert (await post(served, CHAT, n=2)).status_code == 200


class CountingRouter:
    """A router whose streams never begin.

    It counts those that are started and cancelled, by iteration.
    """

    placement = None  # it selects no workers

    def __init__(self) -> None:
        self.view = ClusterView()
        self.plane = InprocPlane()
        self.started = [0]
        self.cancelled = [0]

    def generate(
        self, request: GenerateRequest, trace: ChoiceTimeline, on_event: OnEvent
    ) -> StreamHandle:
        self.started[-1] += 1
        return CountedStream(on_event, self.cancelled)

    async def count(self, until: Callable[[], bool]) -> None:
        """Count by iteration until the condition is true."""
        while not until():
            await asyncio.sleep(0)
            self.started.append(0)
            self.cancelled.append(0)


class CountedStream(Stream):
    def __init__(self, on_event: OnEvent, cancelled: list[int]) -> None:
        super().__init__(on_event)
        self._cancelled = cancelled

    def _close(self, last: StreamEvent | None) -> None:
        self._cancelled[-1] += 1


@pytest.mark.parametrize("leaves_early", [False, True], ids=["when all run", "at once"])
async def test_clients_leaving_with_128_choices_spread_the_work(leaves_early: bool) -> None:
    router = CountingRouter()
    served = FakeFrontend(router, FrontendConfig(max_inflight=1024))  # type: ignore[arg-type]
    requests = [asyncio.create_task(post(served, CHAT, n=128, stream=True)) for _ in range(10)]
    most_running = 8 * 128  # two requests wait for permits
    await router.count(lambda: sum(router.started) >= (1 if leaves_early else most_running))
    for request in requests:
        request.cancel()
    await router.count(lambda: all(request.done() for request in requests))
    assert max(router.started) <= CHOICES_PER_ITERATION
    assert max(router.cancelled) <= CHOICES_PER_ITERATION
    assert sum(router.cancelled) == sum(router.started)
    assert sum(router.started) <= (most_running // 2 if leaves_early else most_running)
    assert b"dynamo_trtllm_choices 0.0" in await served.metrics.render_all()


async def test_choices_when_permits_are_few_then_429_and_nothing_runs() -> None:
    held = asyncio.Event()
    served = with_scripts([held, stop()], max_inflight=2, max_queued=0)
    first = asyncio.create_task(post(served, CHAT))
    await served.router.routers[0].begun.wait()
    response = await post(served, CHAT, n=2)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
    assert response.headers["retry-after"]
    assert len(served.router.requests) == 1
    held.set()
    assert (await first).status_code == 200


async def test_choices_over_server_capacity_are_400() -> None:
    response = await post(with_scripts(max_inflight=2), CHAT, n=3)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request")
    assert "retry-after" not in response.headers


async def test_metrics_of_several_choices_count_one_request() -> None:
    served = with_scripts([chunk("ab"), stop("c")], [chunk("de"), stop("f")])
    await post(served, CHAT, n=2)
    text = served.metrics.render().decode()
    assert f'dynamo_trtllm_ttft_seconds_count{{model="{MODEL}"}} 1.0' in text
    assert f'dynamo_trtllm_itl_seconds_count{{model="{MODEL}"}} 4.0' in text
    assert f'dynamo_trtllm_prompt_tokens_total{{model="{MODEL}"}} 2.0' in text
    assert f'dynamo_trtllm_output_tokens_total{{model="{MODEL}"}} 8.0' in text


# --- the parts ------------------------------------------------------------------------------------


def test_best_of_two_prompts_is_numbered_in_order() -> None:
    text = functools.partial(Delta, channel=Channel.CONTENT)
    plan = GenerationPlan(choices=(None,) * 4, candidates=2, keep=1)  # type: ignore[arg-type]
    regions = [
        ChoiceDelta(index=index, deltas=(text(text=f"{index}{part}"),))
        for part in "ab"
        for index in range(4)
    ]
    kept = pick_best_of(regions, plan, [-3.0, -1.0, -0.5, -2.0].__getitem__)
    assert [(region.index, region.deltas[0].text) for region in kept] == [
        (0, "1a"),
        (0, "1b"),
        (1, "2a"),
        (1, "2b"),
    ]


async def test_single_tool_call_limit_ends_before_the_second() -> None:
    never = asyncio.Event()
    served = with_scripts([chunk("{}", ids=[CALL]), chunk("{}", ids=[CALL]), never])
    tools = [
        {
            "type": "function",
            "function": {"name": "get_system_health", "parameters": {"type": "object"}},
        }
    ]
    (choice,) = (await post(served, CHAT, tools=tools, parallel_tool_calls=False)).json()["choices"]
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ["{}"]
    assert choice["finish_reason"] == "tool_calls"
    assert served.router.running == 0
