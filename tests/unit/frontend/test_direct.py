"""Pieces of an answer that are sent within the step that made them: the same bytes by another
way.
"""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from typing import Any

import pytest

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.api.error_bodies import openai_error
from dynamo_trtllm.frontend.requests import output_budget, send_answer
from dynamo_trtllm.frontend.requests.admission import WORK_S
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.tokenization.conversation import Conversation
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.errors import Disconnected, DynamoError, Overloaded, StreamIncomplete
from dynamo_trtllm.protocol.messages import Chunk, FinishReason, GenerateRequest, Role, TokenIds
from dynamo_trtllm.protocol.streams import OnChunk, run_stream
from dynamo_trtllm.support.http_server.exchange import FlushBatch, HttpRequest, HttpResponse
from dynamo_trtllm.support.http_server.request_head import Headers
from tests.kit.frontend_app import (
    CALL,
    CARD,
    CONTENT,
    MODEL,
    REASONING,
    Catalog,
    CharacterRenderer,
    FakeFrontend,
    ScriptedRouter,
    chunk,
    stop,
)
from tests.kit.memory_http import MemoryTransport
from tests.kit.routing import FINISHED, Cluster, request

SCRIPT = [
    chunk("why", ids=[REASONING]),
    chunk("not"),
    chunk("Hel", ids=[CONTENT]),
    chunk(),
    chunk("lo"),
    chunk(' "you"\n'),
    chunk("f", ids=[CALL]),
    chunk("{}"),
    stop(),
]


class Wire(HttpResponse):
    """A response whose client keeps up at each `every`-th event; 0: never."""

    def __init__(self, every: int) -> None:
        self.transport = MemoryTransport()
        super().__init__(
            self.transport,
            FlushBatch(),
            self._count_end,
            error_form=openai_error,
            stall_s=60.0,
            is_chunked=False,
        )
        self.num_ends = 0
        self.written = 0
        self._every = every
        self._asked = 0

    @property
    def is_writable(self) -> bool:  # type: ignore[override]
        self._asked += 1
        return self.started and self._every > 0 and self._asked % self._every == 0

    @is_writable.setter
    def is_writable(self, _: bool) -> None:
        pass

    def write(self, events: bytes) -> None:
        assert events
        self.written += 1
        super().write(events)

    async def send_events(self, events: bytes, *, last: bool = False) -> None:
        self.written -= bool(events)  # counts those of the handler's own calls
        await super().send_events(events, last=last)

    def _count_end(self) -> None:
        self.num_ends += 1

    def body(self) -> str:
        return b"".join(self.transport.sent).decode().partition("\r\n\r\n")[2]


def post(path: str, padding: int = 0, **fields: Any) -> HttpRequest:
    headers = Headers()
    headers.add(b"content-type", b"application/json")
    request = HttpRequest("POST", path, "", headers, "", lambda: None)
    request.feed(json.dumps({"model": MODEL, "stream": True} | fields).encode() + b" " * padding)
    request.complete()
    return request


async def streamed(wire: Wire, script: list[Any], **fields: Any) -> list[Any]:
    """The choices of all events."""
    served = FakeFrontend(ScriptedRouter(script), FrontendConfig())
    messages = [{"role": "user", "content": "hi"}]
    await served.app(post("/v1/chat/completions", messages=messages, **fields), wire)
    events = wire.body().split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    choices = [json.loads(event.removeprefix("data: "))["choices"] for event in events]
    for [choice] in choices:
        for call in choice.get("delta", {}).get("tool_calls", ()):
            call.pop("id", None)  # random
    return choices


@pytest.mark.parametrize("every", [1, 2, 3])
async def test_direct_stream_has_the_same_events(every: int) -> None:
    wire = Wire(every)
    assert await streamed(wire, SCRIPT) == await streamed(Wire(0), SCRIPT)
    assert wire.written > 0


async def test_direct_stream_counts_usage() -> None:
    served = FakeFrontend(
        ScriptedRouter([chunk("a"), chunk("bc"), chunk("d", finish=FinishReason.LENGTH)]),
        FrontendConfig(),
    )
    wire = Wire(1)
    await served.app(
        post("/v1/completions", prompt="hi", stream_options={"include_usage": True}), wire
    )
    assert wire.written == 2
    assert '"completion_tokens":4' in wire.body()


async def test_direct_stream_writes_early_tokens_within_the_call() -> None:
    script = [chunk("a"), chunk("b"), chunk("c"), chunk("d", finish=FinishReason.LENGTH)]
    served = FakeFrontend(AtOnce([*script]), FrontendConfig())
    wire = Gated()
    wire.gate.set()
    await served.app(post("/v1/completions", prompt="hi"), wire)
    assert (wire.written, wire.texts()) == (3, "abcd")
    assert len(wire.transport.sent) <= 2


async def test_direct_stream_failing_early_is_an_http_error() -> None:
    served = FakeFrontend(OneFails([]))
    wire = Wire(1)
    await served.app(post("/v1/completions", prompt="hi", n=2), wire)
    assert wire.status == 429


@pytest.mark.parametrize("fields", [{"stop": ["lo"]}, {"parallel_tool_calls": False}, {"n": 2}])
async def test_direct_stream_with_stop_or_choices_has_same_events(fields: dict[str, Any]) -> None:
    wire = Wire(1)
    direct = await streamed(wire, SCRIPT, **fields)
    queued = await streamed(Wire(0), SCRIPT, **fields)
    for index in range(fields.get("n", 1)):
        assert [c for [c] in direct if c["index"] == index] == [
            c for [c] in queued if c["index"] == index
        ]
    assert wire.written > 0


class AtOnce(ScriptedRouter):
    """A router that sends the chunks between two events of its script in one step."""

    async def play(
        self, request: GenerateRequest, trace: ChoiceTimeline, on_chunk: OnChunk
    ) -> None:
        for step in self.script:
            if isinstance(step, asyncio.Event):
                await step.wait()
            else:
                assert isinstance(step, Chunk)
                on_chunk(step)


class OneFails(ScriptedRouter):
    """A router whose first choice fails in the step in which the second one has its first token."""

    async def play(
        self, request: GenerateRequest, trace: ChoiceTimeline, on_chunk: OnChunk
    ) -> None:
        if request.request_id.endswith("-0"):
            raise Overloaded("full")
        on_chunk(chunk("a"))
        on_chunk(stop())


class Gated(Wire):
    """A response whose coroutines wait for `gate`."""

    def __init__(self, every: int = 1) -> None:
        super().__init__(every)
        self.gate = asyncio.Event()
        self.ready: list[bool] = []  # the next values of `is_writable`

    @property
    def is_writable(self) -> bool:  # type: ignore[override]
        return self.ready.pop(0) if self.ready else super().is_writable

    @is_writable.setter
    def is_writable(self, _: bool) -> None:
        pass

    async def send_events(self, events: bytes, *, last: bool = False) -> None:
        await self.gate.wait()
        await super().send_events(events, last=last)

    def texts(self) -> str:
        events = [part.removeprefix("data: ") for part in self.body().split("\n\n")]
        return "".join(
            json.loads(event)["choices"][0]["text"] for event in events if event.startswith("{")
        )


@pytest.mark.parametrize("case", ["a delta is being sent", "a delta waits"])
async def test_direct_stream_keeps_deltas_in_order(case: str) -> None:
    wire = Gated()
    go = asyncio.Event()
    script = [chunk("a"), go, chunk("b"), chunk("c"), chunk("d", finish=FinishReason.LENGTH)]
    served = FakeFrontend(AtOnce([*script]), FrontendConfig())
    if case == "a delta waits":
        wire.gate.set()
    answering = asyncio.create_task(served.app(post("/v1/completions", prompt="hi"), wire))
    for _ in range(50):
        await asyncio.sleep(0)
    if case == "a delta waits":
        assert wire.texts() == "a"
        wire.ready = [False]  # for b
    go.set()
    for _ in range(50):
        await asyncio.sleep(0)
    wire.gate.set()
    await answering
    assert wire.texts() == "abcd"


async def test_direct_stream_of_slow_client_ends_overloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output_budget, "MAX_OUTPUT_BYTES", 50 * 64)
    monkeypatch.setattr(send_answer, "MIN_COUNTED_CHANGE", 0)
    served = FakeFrontend(ScriptedRouter([chunk("a") for _ in range(200)]), FrontendConfig())
    wire = Gated(every=0)
    answering = asyncio.create_task(served.app(post("/v1/completions", prompt="hi"), wire))
    await served.router.closed.wait()
    assert served.router.yielded < 60
    wire.gate.set()
    await answering
    *texts, error, done = wire.body().strip().split("\n\n")
    assert done == "data: [DONE]"
    assert 20 < len(texts) <= served.router.yielded
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "overloaded"


async def test_router_continues_after_tokens_passed_on(cluster: Cluster) -> None:
    begun = asyncio.Event()
    await cluster.add(1, Role.AGGREGATED, [FINISHED[0], begun, FINISHED[1], Disconnected("gone")])
    second = await cluster.add(2, Role.AGGREGATED, [FINISHED[2]])
    got: list[int] = []

    def take(received: Chunk) -> bool:
        got.extend(received.token_ids)
        begun.set()
        return True

    await run_stream(partial(cluster.router.generate, request(), ChoiceTimeline()), take)
    assert got == [10, 11, 12, 13]
    assert second.requests[0].num_resumed_output_tokens == 3


@pytest.mark.parametrize(
    "error", [StreamIncomplete("as if a worker had failed"), Overloaded("the reader is behind")]
)
async def test_router_blames_no_worker_for_a_failing_receiver(
    cluster: Cluster, error: DynamoError
) -> None:
    first = await cluster.add(1, Role.AGGREGATED, FINISHED)
    second = await cluster.add(2, Role.AGGREGATED, FINISHED)

    def fail(received: Chunk) -> bool:
        raise error

    with pytest.raises(type(error)):
        await run_stream(partial(cluster.router.generate, request(), ChoiceTimeline()), fail)
    assert len(first.requests) + len(second.requests) == 1


class Clocked(CharacterRenderer):
    """A renderer that uses up the time for planning in an iteration, and records the iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.inline_bytes = 1 << 20
        self.iteration = 0
        self.rendered_in: list[int] = []

    async def count(self) -> None:
        while True:
            self.iteration += 1
            await asyncio.sleep(0)

    def render(self, conversation: Conversation) -> TokenIds:
        self.rendered_in.append(self.iteration)
        until_s = time.thread_time() + WORK_S
        while time.thread_time() < until_s:
            pass
        return super().render(conversation)


async def test_long_bodies_let_the_event_loop_do_other_work() -> None:
    catalog = Catalog()
    renderer = Clocked()
    catalog.served[MODEL] = ServedModel(CARD, renderer)
    messages = [{"role": "user", "content": "hi"}]
    served = FakeFrontend(ScriptedRouter([chunk("a"), stop()]), FrontendConfig(), catalog)
    counting = asyncio.create_task(renderer.count())
    requests = [post("/v1/chat/completions", padding=20_000, messages=messages) for _ in range(8)]
    await asyncio.gather(*(served.app(request, Wire(1)) for request in requests))
    counting.cancel()
    assert len(renderer.rendered_in) == 8
    assert len(set(renderer.rendered_in)) == 8


async def test_bodies_before_tokenizer_load_render_in_threads() -> None:
    catalog = Catalog()
    renderer = catalog.renderer
    renderer.is_loaded = False
    served = FakeFrontend(ScriptedRouter([chunk("a"), stop()]), FrontendConfig(), catalog)
    messages = [{"role": "user", "content": "hi"}]
    for padding in (100, 2000):
        await served.app(post("/v1/chat/completions", padding=padding, messages=messages), Wire(1))
    assert catalog.preloaded == [MODEL]
    renderer.is_loaded = True
    renderer.inline_bytes = 1 << 20
    await served.app(post("/v1/chat/completions", padding=2000, messages=messages), Wire(1))
    assert catalog.preloaded == [MODEL]
    assert renderer.rendered_on_loop == [True, False, True]
