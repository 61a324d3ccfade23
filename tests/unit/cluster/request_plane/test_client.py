"""The caller's side of the request plane over a transport of dictionaries: unexpected messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from nats.aio.client import Client

from dynamo_trtllm.cluster.request_plane.client import DEFAULT_LIMITS, PlaneLimits
from dynamo_trtllm.cluster.request_plane.frames import ClientMessage, OpenStream
from dynamo_trtllm.cluster.request_plane.inproc import InprocTransport
from dynamo_trtllm.cluster.request_plane.nats import NatsTransport
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.protocol.errors import Disconnected, DynamoError, Unreachable, WorkerDied
from dynamo_trtllm.protocol.messages import (
    Chunk,
    Control,
    FinishReason,
    GenerateRequest,
    Sampling,
    decode,
    token_ids,
)
from tests.kit.generator_streams import ChunkSource, call_stream
from tests.kit.waiting import SOON_S

SUBJECT = "ns_prefill.generate-1"


class Overheard(InprocTransport):
    """A transport that records the inbox of each caller that opens a stream."""

    inbox = ""

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        if data:
            opening = decode(data, ClientMessage).body
            assert isinstance(opening, OpenStream)
            self.inbox = opening.inbox
        return await super().request(subject, data, timeout_s=timeout_s)


class Endless(ChunkSource):
    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk(token_ids=token_ids([1]))
        await asyncio.Event().wait()

    async def control(self, verb: Control) -> bytes:
        return b""


class OneMore(Endless):
    """A service that sends a second token when `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk(token_ids=token_ids([1]))
        await self.go.wait()
        yield Chunk(token_ids=token_ids([2]), finish_reason=FinishReason.STOP)


async def test_inbox_with_unreadable_messages_keeps_streams_running(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = Overheard()
    service = OneMore()
    plane = RequestPlane(transport, PlaneLimits())
    await plane.serve(SUBJECT, service)
    request = GenerateRequest(
        request_id="r",
        model="m",
        token_ids=token_ids([1]),
        sampling=Sampling(max_tokens=9),
        deadline=time.time() + 9,
    )
    async with aclosing(call_stream(plane, SUBJECT, request)) as chunks:
        await anext(chunks)
        for _ in range(100):
            transport.publish(transport.inbox, b"\xc1 no message")
        service.go.set()
        assert (await asyncio.wait_for(anext(chunks), SOON_S)).token_ids == token_ids([2])
    assert len(caplog.records) == 7  # not one line each
    await plane.aclose()


class Vanishing(InprocTransport):
    """A transport whose worker receives the first call, and hangs or dies before it answers."""

    def __init__(self, *, dies: bool) -> None:
        super().__init__()
        self._dies = dies

    async def serve(self) -> None:
        def take(data: bytes, reply: str) -> None:
            if self._dies:
                del self._bus._subscriptions[SUBJECT]

        await self.subscribe(SUBJECT, take)


@pytest.mark.parametrize(("dies", "error"), [(True, WorkerDied), (False, Unreachable)])
async def test_call_without_acknowledgment_blames_only_dead_worker(
    dies: bool, error: type[DynamoError]
) -> None:
    transport = Vanishing(dies=dies)
    plane = RequestPlane(transport, PlaneLimits(ack_timeout_s=0.05, listener_timeout_s=0.05))
    await transport.serve()
    request = GenerateRequest(
        request_id="r",
        model="m",
        token_ids=token_ids([1]),
        sampling=Sampling(max_tokens=9),
        deadline=time.time() + 9,
    )
    async with aclosing(call_stream(plane, SUBJECT, request)) as chunks:
        with pytest.raises(DynamoError) as caught:
            await asyncio.wait_for(anext(chunks), SOON_S)
    assert type(caught.value) is error
    await plane.aclose()


class Cut(InprocTransport):
    """A transport that can lose the caller's connection while the worker's stays."""

    cut = False

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        is_from_the_worker = subject.startswith("_INBOX.")  # a ping of the caller's inbox
        if self.cut and not is_from_the_worker:
            raise Disconnected("no connection here")
        return await super().request(subject, data, timeout_s=timeout_s)


async def test_stream_when_own_connection_is_gone_then_no_blame() -> None:
    transport = Cut()
    # also the time-out of a ping, which load may exceed
    plane = RequestPlane(transport, PlaneLimits(ping_interval_s=0.2))
    await plane.serve(SUBJECT, Endless())
    request = GenerateRequest(
        request_id="r",
        model="m",
        token_ids=token_ids([1]),
        sampling=Sampling(max_tokens=9),
        deadline=time.time() + 9,
    )
    async with aclosing(call_stream(plane, SUBJECT, request)) as chunks:
        await anext(chunks)
        transport.cut = True
        with pytest.raises(Disconnected, match=r"^no connection here$"):
            await asyncio.wait_for(anext(chunks), SOON_S)
    await plane.aclose()


async def test_publish_with_too_much_unsent_is_reported_once() -> None:
    transport = NatsTransport.__new__(NatsTransport)
    transport._client = Client()
    transport._limits = DEFAULT_LIMITS
    transport._client._pending_data_size = DEFAULT_LIMITS.unsent_bytes
    transport._outgoing = []
    transport._num_from_callbacks = 0
    transport._is_open = True
    transport._address = "n"
    reports: list[DynamoError] = []

    def end_streams(error: DynamoError) -> None:
        reports.append(error)
        for _ in range(1000):
            transport.publish("s", b"a cancel")

    transport._on_disconnect = [end_streams]
    for _ in range(3):
        transport.publish("s", b"x")
    assert reports == []
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [type(error) for error in reports] == [Disconnected]
    for _ in range(2):  # a stream that began after the report loses a message, too
        transport.publish("s", b"x")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [type(error) for error in reports] == [Disconnected] * 2
