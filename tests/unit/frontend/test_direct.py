"""Pieces of an answer that are sent within the step that made them: the same bytes by another way."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.errors import Disconnected, DynamoError, Overloaded, StreamIncomplete
from dynamo_trtllm.frontend import request_handler
from dynamo_trtllm.frontend.generation.pipeline import RouteTrace
from dynamo_trtllm.http_server.body_writer import WRITER, CycleWriter, FlushBatch, HeldHead
from dynamo_trtllm.messages import Chunk, FinishReason, GenerateRequest, Role
from dynamo_trtllm.streams import OnChunk
from tests.unit.frontend.app_helpers import CALL, CONTENT, MODEL, REASONING, FakeFrontend, ScriptedPipeline, chunk, stop
from tests.unit.frontend.pipeline_helpers import FINISHED, Cluster, request

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


class Wire:
    """What a client reads, and a writer to it that is ready every `every`-th time; 0: never."""

    def __init__(self, every: int) -> None:
        self.parts: list[bytes] = []
        self.written = 0
        self._waiting: list[bytes] = []
        self._every = every
        self._asked = 0

    def is_ready(self) -> bool:
        self._asked += 1
        return self._every > 0 and self._asked % self._every == 0

    def write(self, data: bytes) -> None:
        assert data
        self.written += 1
        self._waiting.append(data)

    def flush(self) -> None:
        self.parts += self._waiting
        self._waiting.clear()

    async def send(self, message: Any) -> None:
        self.parts.append(message.get("body", b""))


async def streamed(wire: Wire, script: list[Any], **fields: Any) -> list[Any]:
    """The choices of all events."""
    served = FakeFrontend(ScriptedPipeline(script), FrontendConfig())
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True} | fields
    told = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Any:
        return told.pop() if told else await asyncio.Event().wait()

    path = "/v1/chat/completions"
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "state": {WRITER: wire}}
    await served.app(scope, receive, wire.send)
    events = b"".join(wire.parts).decode().split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    choices = [json.loads(event.removeprefix("data: "))["choices"] for event in events]
    for [choice] in choices:
        for call in choice.get("delta", {}).get("tool_calls", ()):
            call.pop("id", None)  # random
    return choices


@pytest.mark.parametrize("every", [1, 2, 3])
async def test_stream_when_the_client_can_be_written_to_then_the_same_events_come_in_order(every: int) -> None:
    wire = Wire(every)
    assert await streamed(wire, SCRIPT) == await streamed(Wire(0), SCRIPT)
    assert wire.written > 0


async def test_stream_when_usage_is_asked_for_then_it_counts_what_was_written_directly() -> None:
    served = FakeFrontend(
        ScriptedPipeline([chunk("a"), chunk("bc"), chunk("d", finish=FinishReason.LENGTH)]), FrontendConfig()
    )
    body = {"model": MODEL, "prompt": "hi", "stream": True, "stream_options": {"include_usage": True}}
    told, wire = [{"type": "http.request", "body": json.dumps(body).encode()}], Wire(1)

    async def receive() -> Any:
        return told.pop() if told else await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "state": {WRITER: wire}}
    await served.app(scope, receive, wire.send)
    assert wire.written == 1
    assert b'"completion_tokens":4' in b"".join(wire.parts)


@pytest.mark.parametrize("fields", [{"stop": ["lo"]}, {"parallel_tool_calls": False}, {"n": 2}])
async def test_stream_when_its_text_ends_it_or_it_has_choices_then_the_same_events_come(fields: dict[str, Any]) -> None:
    wire = Wire(1)
    direct, queued = await streamed(wire, SCRIPT, **fields), await streamed(Wire(0), SCRIPT, **fields)
    for index in range(fields.get("n", 1)):
        assert [c for [c] in direct if c["index"] == index] == [c for [c] in queued if c["index"] == index]
    assert wire.written > 0


class AtOnce(ScriptedPipeline):
    """Passes on the chunks between two events of its script in one step."""

    async def generate(self, request: GenerateRequest, trace: RouteTrace, on_chunk: OnChunk) -> None:
        for step in self.script:
            if isinstance(step, asyncio.Event):
                await step.wait()
            else:
                assert isinstance(step, Chunk)
                on_chunk(step)


class Impatient(Wire):
    """Sends what is written at once. `send` waits for `gate`."""

    def __init__(self) -> None:
        super().__init__(1)
        self.gate = asyncio.Event()
        self.ready: list[bool] = []  # the next answers of `is_ready`; then True

    def is_ready(self) -> bool:
        return self.ready.pop(0) if self.ready else True

    def write(self, data: bytes) -> None:
        self.parts.append(data)

    async def send(self, message: Any) -> None:
        if message.get("body"):
            await self.gate.wait()
        await super().send(message)

    def texts(self) -> str:
        events = [part.removeprefix("data: ") for part in b"".join(self.parts).decode().split("\n\n")]
        return "".join(json.loads(event)["choices"][0]["text"] for event in events if event.startswith("{"))


@pytest.mark.parametrize("case", ["a delta is being sent", "a delta waits"])
async def test_stream_when_a_delta_was_not_written_at_once_then_later_ones_stay_behind_it(case: str) -> None:
    wire, go = Impatient(), asyncio.Event()
    script = [chunk("a"), go, chunk("b"), chunk("c"), chunk("d", finish=FinishReason.LENGTH)]
    served = FakeFrontend(AtOnce([*script]), FrontendConfig())
    body = {"model": MODEL, "prompt": "hi", "stream": True}
    told = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Any:
        return told.pop() if told else await asyncio.Event().wait()

    if case == "a delta waits":
        wire.gate.set()
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "state": {WRITER: wire}}
    answering = asyncio.create_task(served.app(scope, receive, wire.send))
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


async def test_stream_when_its_client_reads_too_slowly_then_it_ends_in_overloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(Wire):
        def __init__(self) -> None:
            super().__init__(1)
            self.gate = asyncio.Event()

        def is_ready(self) -> bool:
            return False

        async def send(self, message: Any) -> None:
            if message.get("body"):
                await self.gate.wait()
            await super().send(message)

    monkeypatch.setattr(request_handler, "MAX_PENDING_TOKENS", 50)
    served = FakeFrontend(ScriptedPipeline([chunk("a") for _ in range(200)]), FrontendConfig())
    told, wire = (
        [{"type": "http.request", "body": json.dumps({"model": MODEL, "prompt": "hi", "stream": True}).encode()}],
        Slow(),
    )

    async def receive() -> Any:
        return told.pop() if told else await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "state": {WRITER: wire}}
    answering = asyncio.create_task(served.app(scope, receive, wire.send))
    await served.pipeline.closed.wait()
    assert served.pipeline.yielded < 60
    wire.gate.set()
    await answering
    *texts, error, done = b"".join(wire.parts).decode().strip().split("\n\n")
    assert done == "data: [DONE]"
    assert 20 < len(texts) <= served.pipeline.yielded
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "overloaded"


async def test_pipeline_when_a_call_breaks_then_it_goes_on_behind_what_was_passed_on(cluster: Cluster) -> None:
    begun = asyncio.Event()
    await cluster.add(1, Role.AGGREGATED, [FINISHED[0], begun, FINISHED[1], Disconnected("gone")])
    second = await cluster.add(2, Role.AGGREGATED, [FINISHED[2]])
    got: list[int] = []

    def take(each: Chunk) -> bool:
        got.extend(each.token_ids)
        begun.set()
        return True

    await cluster.pipeline.generate(request(), RouteTrace(), take)
    assert got == [10, 11, 12, 13]
    assert second.requests[0].num_resumed_output_tokens == 3


@pytest.mark.parametrize("error", [StreamIncomplete("as if a worker had failed"), Overloaded("the reader is behind")])
async def test_pipeline_when_what_takes_the_chunks_fails_then_it_is_no_fault_of_a_worker(
    cluster: Cluster, error: DynamoError
) -> None:
    first = await cluster.add(1, Role.AGGREGATED, FINISHED)
    second = await cluster.add(2, Role.AGGREGATED, FINISHED)

    def fail(each: Chunk) -> bool:
        raise error

    with pytest.raises(type(error)):
        await cluster.pipeline.generate(request(), RouteTrace(), fail)
    assert len(first.requests) + len(second.requests) == 1


class Sent:
    """What a `CycleWriter` needs of uvicorn's cycle and its transport."""

    def __init__(self) -> None:
        self.transport = self.flow = self
        self.disconnected = self.write_paused = self.closing = False
        self.calls: list[bytes] = []

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.calls.append(data)

    def close(self) -> None:
        self.closing = True


class Held(Sent):
    """With a head that waits."""

    def __init__(self) -> None:
        super().__init__()
        self.out = Sent()
        self.transport: Any = HeldHead(self, self.out)  # type: ignore[arg-type]


async def test_head_when_a_body_follows_then_both_leave_at_once_and_the_rest_by_itself() -> None:
    cycle = Held()
    cycle.transport.write(b"head ")
    assert cycle.out.calls == []
    cycle.transport.write(b"body")
    cycle.transport.write(b"more")
    await asyncio.sleep(0)
    assert cycle.out.calls == [b"head body", b"more"]
    assert cycle.transport is cycle.out


async def test_head_when_a_piece_follows_past_asgi_then_it_comes_behind_the_head() -> None:
    cycle = Held()
    cycle.transport.write(b"head ")
    CycleWriter(cycle, FlushBatch()).write(b"y")  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert b"".join(cycle.out.calls) == b"head 1\r\ny\r\n"


async def test_head_when_nothing_follows_in_this_turn_then_it_leaves_alone() -> None:
    cycle = Held()
    cycle.transport.write(b"head ")
    await asyncio.sleep(0)
    assert cycle.out.calls == [b"head "]
    cycle.transport.write(b"body")
    assert cycle.out.calls == [b"head ", b"body"]


async def test_head_when_the_answer_is_closed_then_it_leaves_before() -> None:
    cycle = Held()
    cycle.transport.write(b"head ")
    cycle.transport.close()
    await asyncio.sleep(0)
    assert (cycle.out.calls, cycle.out.closing) == ([b"head "], True)


async def test_head_when_the_connection_is_gone_then_nothing_is_written() -> None:
    cycle = Held()
    cycle.transport.write(b"head ")
    cycle.out.closing = True
    assert cycle.transport.is_closing()
    await asyncio.sleep(0)
    assert cycle.out.calls == []


async def test_write_when_several_pieces_come_in_a_turn_then_each_answer_is_sent_once() -> None:
    turn, first, second = FlushBatch(), Sent(), Sent()
    one, two = CycleWriter(first, turn), CycleWriter(second, turn)  # type: ignore[arg-type]
    for writer in (one, two, one):
        writer.write(b"data: x\n\n")
    assert first.calls == []
    await asyncio.sleep(0)
    assert first.calls == [b"12\r\ndata: x\n\ndata: x\n\n\r\n"]
    assert second.calls == [b"9\r\ndata: x\n\n\r\n"]
    one.write(b"y")
    await asyncio.sleep(0)
    assert first.calls[1:] == [b"1\r\ny\r\n"]


async def test_flush_when_the_answer_goes_on_another_way_then_what_was_written_is_sent_before_and_once() -> None:
    turn, sent = FlushBatch(), Sent()
    writer = CycleWriter(sent, turn)  # type: ignore[arg-type]
    writer.write(b"y")
    writer.flush()
    assert sent.calls == [b"1\r\ny\r\n"]
    await asyncio.sleep(0)
    assert len(sent.calls) == 1


async def test_flush_when_the_connection_closes_then_the_other_answers_are_still_sent() -> None:
    turn, gone, there = FlushBatch(), Sent(), Sent()
    for sent in (gone, there):
        CycleWriter(sent, turn).write(b"y")  # type: ignore[arg-type]
    gone.closing = True
    await asyncio.sleep(0)
    assert (gone.calls, there.calls) == ([], [b"1\r\ny\r\n"])


@pytest.mark.parametrize("state", ["write_paused", "disconnected"])
def test_is_ready_when_the_client_does_not_read_then_not(state: str) -> None:
    sent = Sent()
    writer = CycleWriter(sent, FlushBatch())  # type: ignore[arg-type]
    assert writer.is_ready()
    setattr(sent, state, True)
    assert not writer.is_ready()
