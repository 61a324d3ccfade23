"""What one turn of the loop costs in messages, and what is left after callers go."""

from __future__ import annotations

import asyncio
import time

from dynamo_trtllm.cluster.request_plane.client import PlaneLimits
from dynamo_trtllm.cluster.request_plane.frames import Batch
from dynamo_trtllm.cluster.request_plane.inproc import InprocTransport
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.protocol.messages import (
    Chunk,
    Control,
    FinishReason,
    GenerateRequest,
    Sampling,
    decode,
    token_ids,
)
from dynamo_trtllm.protocol.streams import OnEvent, Stream, StreamHandle
from tests.kit.generator_streams import call_stream


class CountingLink(InprocTransport):
    """A link that stores the messages to callers' inboxes."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []

    def publish(self, subject: str, data: bytes) -> None:
        if subject.startswith("_INBOX.0"):  # the plane's own: replies have later numbers
            self.batches.append(decode(data, Batch))
        super().publish(subject, data)


class SteppingService:
    """An engine whose step has chunks for all its streams at once."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    def step(self, chunk: Chunk) -> None:
        for stream in self.streams:
            stream.emit(chunk)

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        self.streams.append(Stream(on_event))
        return self.streams[-1]

    async def control(self, verb: Control) -> bytes:
        return b""


def asked(n: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{n}",
        model="m",
        token_ids=token_ids([1]),
        sampling=Sampling(max_tokens=9),
        deadline=time.time() + 10,
    )


async def settle() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


async def test_step_of_64_streams_sends_one_message() -> None:
    transport = CountingLink()
    plane = RequestPlane(transport, PlaneLimits())
    service = SteppingService()
    await plane.serve("s", service)
    got: list[int] = []

    async def read(n: int) -> None:
        got.append(len([chunk async for chunk in call_stream(plane, "s", asked(n))]))

    async with asyncio.TaskGroup() as group:
        for n in range(64):
            group.create_task(read(n))
        await settle()
        assert len(service.streams) == 64
        for _ in range(5):
            service.step(Chunk(token_ids=token_ids([1])))
            await settle()
        service.step(Chunk(finish_reason=FinishReason.STOP))
    assert [len(batch.frames) for batch in transport.batches] == [64] * 6
    assert got == [6] * 64
    await plane.aclose()


async def test_steps_join_while_a_message_is_unwritten() -> None:
    transport = CountingLink()
    plane = RequestPlane(transport, PlaneLimits())
    service = SteppingService()
    await plane.serve("s", service)
    reading = asyncio.create_task(anext(stream := call_stream(plane, "s", asked(0))))
    await settle()
    transport.is_writing = True
    service.step(Chunk(token_ids=token_ids([1])))
    await asyncio.sleep(0)
    service.step(Chunk(token_ids=token_ids([2])))
    assert not transport.batches
    await settle()
    assert [len(batch.frames) for batch in transport.batches] == [2]
    await reading
    await stream.aclose()
    await plane.aclose()
