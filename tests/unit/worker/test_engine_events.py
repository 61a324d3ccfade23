"""What a worker does with wrong events of an engine of another package."""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.engines.engine_interface import EngineStats
from dynamo_trtllm.observability.metrics import WorkerMetrics
from dynamo_trtllm.protocol.errors import InternalError
from dynamo_trtllm.protocol.messages import Chunk, FinishReason, PhaseTimings, Role, token_ids
from dynamo_trtllm.protocol.streams import OnEvent, Stream, StreamHandle, TaskStream, as_stream
from dynamo_trtllm.worker.service import WorkerService
from dynamo_trtllm.worker.worker_admission import WorkerAdmission
from tests.kit.instances import make_instance
from tests.kit.request_planes import make_request

LAST = Chunk(token_ids=token_ids([2]), finish_reason=FinishReason.STOP, stats=PhaseTimings())


def wrong_chunk(**fields: Any) -> Chunk:
    """Return a chunk with values that a type checker would reject."""
    return Chunk(**fields)


class ForeignEngine:
    """An engine that starts its streams with a function."""

    def __init__(self, generate: Callable[[OnEvent], Any]) -> None:
        self._generate = generate

    def generate(self, _request: object, on_event: OnEvent) -> StreamHandle:
        handle: StreamHandle = self._generate(on_event)
        return handle

    def stats(self) -> EngineStats:
        return EngineStats()


def sends(*events: Any) -> Callable[[OnEvent], Stream]:
    """Return the start of a stream that sends these events."""

    def generate(on_event: OnEvent) -> Stream:
        stream = Stream(on_event)
        for event in events:
            asyncio.get_running_loop().call_soon(stream.emit, event)
        return stream

    return generate


def runs(returned: Any) -> Callable[[OnEvent], TaskStream]:
    """Return the start of a stream whose task returns this value."""

    async def answer() -> Any:
        return returned

    def generate(on_event: OnEvent) -> TaskStream:
        stream = TaskStream(on_event, set())
        stream.run(answer(), "answer")
        return stream

    return generate


def sends_at_once(on_event: OnEvent) -> Stream:
    stream = Stream(on_event)
    stream.emit(LAST)
    return stream


def sends_from_a_thread(on_event: OnEvent) -> Stream:
    stream = Stream(on_event)
    thread = threading.Thread(target=stream.emit, args=(LAST,))
    asyncio.get_running_loop().call_soon(thread.start)
    return stream


async def answer_of(
    generate: Callable[[OnEvent], Any], admission: WorkerAdmission | None = None
) -> list[Chunk]:
    """Return the chunks of one call. Raise its error."""
    service = WorkerService(
        ForeignEngine(generate),  # type: ignore[arg-type] # it has what a call needs
        make_instance(1, role=Role.AGGREGATED),
        admission or WorkerAdmission(),
        files={},
        metrics=WorkerMetrics(),
    )
    request = msgspec.structs.replace(make_request(), model="tiny")
    async with asyncio.timeout(5), aclosing(as_stream(service, request)) as chunks:
        return [chunk async for chunk in chunks]


async def test_valid_events_are_passed_on() -> None:
    first = Chunk(token_ids=token_ids([1]))
    assert await answer_of(sends(first, LAST)) == [first, LAST]


@pytest.mark.parametrize(
    ("generate", "text"),
    [
        (
            sends(wrong_chunk(token_ids=[1])),
            "token_ids have the type list; pack them with token_ids()",
        ),
        (sends(wrong_chunk(token_ids=array("q", [1]))), "token_ids have the type array('q')"),
        (sends(wrong_chunk(finish_reason="ended")), "Invalid enum value 'ended'"),
        (sends(wrong_chunk(logprobs=(-0.5,))), "got `float` - at `$.logprobs[0]`"),
        (sends(None), "sent a value of type NoneType; send a Chunk or a DynamoError"),
        (sends(ValueError("x")), "sent a value of type ValueError"),
        (sends_at_once, "sent an event before `generate` returned"),
        (sends_from_a_thread, "sent an event from another thread"),
        (runs(None), "the task of the stream returned None, and the stream has no end"),
        (runs("text"), "the task of the stream returned a str"),
        (runs(Chunk()), "the task of the stream returned a Chunk without finish_reason"),
        (lambda _: None, "ForeignEngine.generate returned a value of type NoneType"),
    ],
)
async def test_wrong_event_ends_the_call_and_is_logged(
    generate: Callable[[OnEvent], Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    admission = WorkerAdmission()
    with caplog.at_level(logging.ERROR), pytest.raises(InternalError):
        await answer_of(generate, admission)
    assert text in caplog.text
    assert not admission.active()


async def test_task_may_end_the_stream_itself() -> None:
    def generate(on_event: OnEvent) -> TaskStream:
        stream = TaskStream(on_event, set())

        async def answer() -> None:
            stream.emit(LAST)

        stream.run(answer(), "answer")
        return stream

    assert await answer_of(generate) == [LAST]
