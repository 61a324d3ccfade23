"""Whether a peer was heard between two heartbeats, if its streams end and begin meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from dynamo_trtllm.cluster.request_plane.client import PlaneLimits
from dynamo_trtllm.cluster.request_plane.frames import ClientMessage, OpenStream
from dynamo_trtllm.cluster.request_plane.inproc import InprocTransport
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.protocol.errors import BadFrame, Unreachable
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
from tests.kit.waiting import SOON_S

SUBJECT = "s"
TOKEN = Chunk(token_ids=token_ids([1]))
LAST = Chunk(finish_reason=FinishReason.STOP)


class Unanswered(InprocTransport):
    """A transport that loses the replies to heartbeats. The first one sets `asked`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.inbox = ""  # of the caller

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        try:
            body = decode(data, ClientMessage).body
        except BadFrame:  # a heartbeat of the worker
            body = None
        if isinstance(body, OpenStream):
            self.inbox = body.inbox
            return await super().request(subject, data, timeout_s=timeout_s)
        self.asked.set()
        await self.goes_on.wait()
        raise Unreachable("no reply in time")


class OneStream:
    """A service that sends a token when a stream begins, and has one stream at a time."""

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        self.stream = Stream(on_event)
        asyncio.get_running_loop().call_soon(self.stream.emit, TOKEN)
        return self.stream

    async def control(self, verb: Control) -> bytes:
        return b""


class Peers:
    """A caller and a worker, of which heartbeats get no reply."""

    def __init__(self) -> None:
        self.transport = Unanswered()
        self.plane = RequestPlane(self.transport, PlaneLimits())
        self.service = OneStream()

    def call(self) -> AsyncGenerator[Chunk, None]:
        request = GenerateRequest(
            request_id="r",
            model="m",
            token_ids=token_ids([1]),
            sampling=Sampling(max_tokens=9),
            deadline=time.time() + 10,
        )
        return call_stream(self.plane, SUBJECT, request)

    async def check_new_stream_survives(
        self, heartbeat_to: Callable[[], asyncio.Task[None]]
    ) -> None:
        """Replace the only stream during a heartbeat. The new one must not end."""
        async with aclosing(self.call()) as first:
            await anext(first)
            heartbeat = heartbeat_to()
            await self.transport.asked.wait()
            self.service.stream.emit(LAST)
            await anext(first)
        async with aclosing(self.call()) as second:
            await anext(second)
            self.transport.goes_on.set()
            await heartbeat
            self.service.stream.emit(LAST)
            assert (await anext(second)).finish_reason is FinishReason.STOP
        await self.plane.aclose()


async def test_caller_that_opens_another_stream_was_heard() -> None:
    peers = Peers()
    server = await peers.plane.serve(SUBJECT, peers.service)

    def ask() -> asyncio.Task[None]:
        return asyncio.create_task(server._heartbeat._ask(peers.transport.inbox))

    await asyncio.wait_for(peers.check_new_stream_survives(ask), SOON_S)


async def test_worker_with_another_stream_was_heard() -> None:
    peers = Peers()
    await peers.plane.serve(SUBJECT, peers.service)

    def ask() -> asyncio.Task[None]:
        return asyncio.create_task(peers.plane.client._heartbeat._ask(SUBJECT))

    await asyncio.wait_for(peers.check_new_stream_survives(ask), SOON_S)
