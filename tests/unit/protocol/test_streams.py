"""The streaming protocol: one end comes last, nothing follows a cancel, and freeing waits for the
stream's task.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import weakref
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from dynamo_trtllm.observability.logging import request_id
from dynamo_trtllm.protocol.errors import (
    DynamoError,
    EngineFailed,
    InternalError,
    Overloaded,
    StreamIncomplete,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    ReleaseOutcome,
    token_ids,
)
from dynamo_trtllm.protocol.streams import (
    Stream,
    StreamEvent,
    TaskStream,
    TokenChunks,
    as_stream,
)
from tests.kit.generator_streams import ChunkSource
from tests.kit.instances import make_transfer_params
from tests.kit.request_planes import make_request

TOKEN = Chunk(token_ids=token_ids([1]))
LAST = Chunk(token_ids=token_ids([2]), finish_reason=FinishReason.STOP)


class Counted(TaskStream):
    """A stream that counts how often it was freed, and notes whether its task still ran."""

    continues_after_task = True

    def __init__(self, events: list[StreamEvent]) -> None:
        self.running: set[asyncio.Task[None]] = set()
        super().__init__(events.append, self.running)
        self.freed: list[int] = []

    def _free(self) -> None:
        self.freed.append(len([task for task in self.running if not task.done()]))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("end", [LAST, Overloaded("full")])
async def test_emit_when_the_end_has_come_then_nothing_follows(end: StreamEvent) -> None:
    events: list[StreamEvent] = []
    stream = Stream(events.append)
    for event in (TOKEN, end, TOKEN, end):
        stream.emit(event)
    stream.cancel()
    assert events == [TOKEN, end]
    assert stream.has_ended


async def test_cancel_when_tokens_flow_then_no_event_follows() -> None:
    events: list[StreamEvent] = []
    stream = Stream(events.append)
    stream.emit(TOKEN)
    stream.cancel()
    stream.emit(LAST)
    assert events == [TOKEN]


async def test_task_that_returns_an_event_frees_all_once() -> None:
    events: list[StreamEvent] = []
    stream = Counted(events)

    async def work() -> StreamEvent:
        await asyncio.sleep(0)
        return LAST

    stream.run(work(), "work")
    await settle()
    stream.cancel()
    assert events == [LAST]
    assert len(stream.freed) == 1
    assert not stream.running


async def test_task_when_it_returns_nothing_then_the_stream_goes_on() -> None:
    events: list[StreamEvent] = []
    stream = Counted(events)

    async def work() -> None:
        stream.emit(TOKEN)

    stream.run(work(), "work")
    await settle()
    assert (events, stream.freed) == ([TOKEN], [])
    stream.emit(LAST)
    assert (events, stream.freed) == ([TOKEN, LAST], [0])


@pytest.mark.parametrize(
    ("error", "expected"),
    [(Overloaded("full"), Overloaded), (ValueError("secret detail"), InternalError)],
)
async def test_task_that_fails_ends_the_stream_without_detail(
    error: Exception, expected: type[DynamoError], caplog: pytest.LogCaptureFixture
) -> None:
    events: list[StreamEvent] = []
    stream = Counted(events)

    async def work() -> None:
        raise error

    stream.run(work(), "work")
    await settle()
    (event,) = events
    assert type(event) is expected
    assert "secret detail" not in str(event)
    assert len(stream.freed) == 1
    assert [record.exc_info is not None for record in caplog.records] == [True] * (
        expected is InternalError
    )


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_cancel_frees_once_after_the_task_ended(turns: int) -> None:
    events: list[StreamEvent] = []
    stream = Counted(events)
    cleaned = []

    async def work() -> StreamEvent:
        try:
            await asyncio.Event().wait()
        finally:
            # as a fetch that waits until its memory is not written to any more
            await asyncio.sleep(0)
            cleaned.append(len(stream.freed))
        return LAST

    stream.run(work(), "work")
    for _ in range(turns):
        await asyncio.sleep(0)
    stream.cancel()
    stream.cancel()
    await settle()
    assert events == []
    assert stream.freed == [0]
    assert cleaned == ([0] if turns else [])
    assert not stream.running


async def test_cancel_from_an_event_of_the_task_frees_all() -> None:
    events: list[StreamEvent] = []
    stream = Counted(events)

    async def work() -> StreamEvent:
        stream.emit(TOKEN)
        stream.cancel()
        return LAST  # without another await, so the cancel does not reach it

    stream.run(work(), "work")
    await settle()
    assert (events, len(stream.freed)) == ([TOKEN], 1)


async def test_cancel_of_task_with_another_error_reports_nothing() -> None:
    events: list[StreamEvent] = []
    stream = Counted(events)

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise Overloaded("full") from None

    stream.run(work(), "work")
    await settle()
    stream.cancel()
    await settle()
    assert (events, len(stream.freed)) == ([], 1)


class Holder:
    """The owner of one KV transfer, t1."""

    def __init__(self) -> None:
        self.released: list[tuple[str, ReleaseOutcome]] = []

    def release(self, transfer_id: str, outcome: ReleaseOutcome) -> None:
        self.released.append((transfer_id, outcome))

    def is_pending(self, transfer_id: str) -> bool:
        return transfer_id == "t1" and not self.released


EXPORTED = Chunk(finish_reason=FinishReason.KV_TRANSFER, kv_params=make_transfer_params("t1"))


async def test_kv_of_ended_stream_is_held_until_cancel() -> None:
    holder = Holder()
    events = list[StreamEvent]()
    stream = Stream(events.append, holder)
    assert not stream.holds_kv
    stream.emit(EXPORTED)
    assert stream.holds_kv
    stream.cancel()
    assert (stream.holds_kv, holder.released) == (False, [("t1", ReleaseOutcome.ABORTED)])


async def test_kv_when_it_is_offered_after_a_cancel_then_it_is_freed() -> None:
    holder = Holder()
    events = list[StreamEvent]()
    stream = Stream(events.append, holder)
    stream.cancel()
    stream.emit(EXPORTED)
    assert (events, holder.released) == ([], [("t1", ReleaseOutcome.ABORTED)])


async def test_log_of_a_task_has_the_request_id(caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    async def work() -> None:
        seen.append(request_id.get())

    context = contextvars.copy_context()
    context.run(request_id.set, "r-42")
    stream = context.run(Counted, [])
    stream.run(work(), "work")  # in the context of the engine's step
    await settle()
    assert seen == ["r-42"]


async def test_ended_stream_is_in_no_reference_cycle() -> None:
    async def work() -> None:
        raise Overloaded("full")

    gc.collect()
    gc.disable()
    try:
        stream = Counted([])
        stream.run(work(), "work")
        await settle()
        there = weakref.ref(stream)
        del stream
        assert there() is None
    finally:
        gc.enable()


async def test_task_cancelled_by_its_owner_is_engine_failed() -> None:
    events: list[StreamEvent] = []
    stream = Counted(events)
    stream.run(asyncio.Event().wait(), "work")  # type: ignore[arg-type]  # it never returns
    await settle()
    for task in stream.running:
        task.cancel()
    await settle()
    assert [type(event) for event in events] == [EngineFailed]
    assert stream.freed == [0]


class Scripted(ChunkSource):
    def __init__(self, *steps: Chunk | Exception) -> None:
        self.steps = steps
        self.closed = 0

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        try:
            for step in self.steps:
                if isinstance(step, Exception):
                    raise step
                yield step
            await asyncio.sleep(0)
        finally:
            self.closed += 1


async def test_chunks_of_a_generator_come_in_order() -> None:
    source = Scripted(TOKEN, TOKEN, LAST, TOKEN)
    async with aclosing(as_stream(source, make_request())) as stream:
        assert [chunk async for chunk in stream] == [TOKEN, TOKEN, LAST]
    await settle()
    assert source.closed == 1


@pytest.mark.parametrize(
    ("steps", "error"), [((TOKEN,), StreamIncomplete), ((TOKEN, Overloaded("full")), Overloaded)]
)
async def test_chunks_without_end_raise_an_error(
    steps: tuple[Chunk | Exception, ...], error: type[DynamoError]
) -> None:
    async with aclosing(as_stream(Scripted(*steps), make_request())) as stream:
        assert await anext(stream) == TOKEN
        with pytest.raises(error):
            await anext(stream)


def test_chunk_of_a_token_is_reused() -> None:
    chunks = TokenChunks(max_chunks=2)
    assert chunks[7] is chunks[7]
    assert [list(chunks[number].token_ids) for number in range(100)] == [
        [number] for number in range(100)
    ]
    assert len(chunks) <= 2
