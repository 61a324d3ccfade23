"""What one turn of the loop costs in messages, and what is left after callers go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from dynamo_trtllm.codec import decode
from dynamo_trtllm.messages import Chunk, Control, FinishReason, GenerateRequest, Sampling, token_ids
from dynamo_trtllm.request_plane.client import PlaneLimits, TransportPlane
from dynamo_trtllm.request_plane.frames import Batch
from dynamo_trtllm.request_plane.inproc import InprocTransport


class CountingLink(InprocTransport):
    """Keeps what is posted to callers' inboxes."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []

    def publish(self, subject: str, data: bytes) -> None:
        if subject.startswith("_INBOX.0"):  # the plane's own: replies have later numbers
            self.batches.append(decode(data, Batch))
        super().publish(subject, data)


class SteppingService:
    """An engine whose step wakes all its streams at once."""

    def __init__(self) -> None:
        self.queues: list[asyncio.Queue[Chunk]] = []

    def step(self, chunk: Chunk) -> None:
        for queue in self.queues:
            queue.put_nowait(chunk)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        queue: asyncio.Queue[Chunk] = asyncio.Queue()
        self.queues.append(queue)
        while True:
            chunk = await queue.get()
            yield chunk
            if chunk.finish_reason is not None:
                return

    async def control(self, verb: Control) -> bytes:
        return b""


class PushingService(SteppingService):
    """As that, but for the first chunk and the last no task wakes."""

    def __init__(self) -> None:
        super().__init__()
        self.pushes: list[Callable[[Chunk], None]] = []

    def push(self, chunk: Chunk) -> None:
        for push in self.pushes:
            push(chunk)

    async def generate_into(
        self, request: GenerateRequest, push: Callable[[Chunk], None]
    ) -> AsyncGenerator[Chunk, None]:
        self.pushes.append(push)
        async for chunk in self.generate(request):
            yield chunk


def asked(n: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{n}",
        model="m",
        token_ids=token_ids([1]),
        sampling=Sampling(max_tokens=9),
        deadline=time.time() + 10,
    )


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_step_when_64_streams_of_one_caller_run_then_one_message_per_step() -> None:
    transport = CountingLink()
    plane = TransportPlane(transport, PlaneLimits())
    service = SteppingService()
    await plane.serve("s", service)
    got: list[int] = []

    async def read(n: int) -> None:
        got.append(len([chunk async for chunk in plane.generate("s", asked(n))]))

    async with asyncio.TaskGroup() as group:
        for n in range(64):
            group.create_task(read(n))
        await settle()
        assert len(service.queues) == 64
        for _ in range(5):
            service.step(Chunk(token_ids=token_ids([1])))
            await settle()
        service.step(Chunk(finish_reason=FinishReason.STOP))
    assert [len(batch.frames) for batch in transport.batches] == [64] * 6
    assert got == [6] * 64
    await plane.aclose()


async def test_push_when_chunks_are_yielded_before_and_after_then_all_arrive_in_order() -> None:
    transport = CountingLink()
    plane = TransportPlane(transport, PlaneLimits())
    service = PushingService()
    await plane.serve("s", service)
    made = [Chunk(token_ids=token_ids([n])) for n in range(5)]
    end = Chunk(token_ids=token_ids([5]), finish_reason=FinishReason.STOP)

    async def read(n: int) -> list[Chunk]:
        return [chunk async for chunk in plane.generate("s", asked(n))]

    reading = [asyncio.create_task(read(n)) for n in range(3)]
    await settle()
    service.step(made[0])
    await settle()
    for chunk in made[1:]:
        service.push(chunk)
        await settle()
    service.step(end)
    assert await asyncio.gather(*reading) == [[*made, end]] * 3
    assert [len(batch.frames) for batch in transport.batches] == [3] * 6
    service.push(made[0])  # too late: nobody is told
    await settle()
    assert len(transport.batches) == 6
    await plane.aclose()
