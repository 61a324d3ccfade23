"""Faults that only NATS can have: servers that restart or freeze, peers that die, messages that are
dropped.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from dynamo_trtllm.cluster.request_plane.client import PlaneLimits
from dynamo_trtllm.cluster.request_plane.frames import ClientMessage, OpenStream
from dynamo_trtllm.cluster.request_plane.nats import NatsPlane, NatsTransport
from dynamo_trtllm.protocol.errors import (
    Disconnected,
    PlaneError,
    StreamIncomplete,
    Unreachable,
    WorkerDied,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    Control,
    FinishReason,
    GenerateRequest,
    encode,
    token_ids,
)
from tests.integration.plane_peer import make_request
from tests.kit.generator_streams import ChunkSource, call_stream
from tests.kit.servers import TestServer
from tests.kit.waiting import SOON_S

QUICK = PlaneLimits(ack_timeout_s=3.0, ping_interval_s=0.5)
NO_PINGS = PlaneLimits(ack_timeout_s=3.0, ping_interval_s=60.0)
PEER = "tests.integration.plane_peer"
ROOT = Path(__file__).parents[2]


class GatedService(ChunkSource):
    """A service that sends one chunk at once, and the last one when the gate opens."""

    def __init__(self, tokens: int = 1) -> None:
        self.tokens = tokens
        self.gate = asyncio.Event()
        self.started = asyncio.Event()
        self.closed = asyncio.Event()

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.started.set()
        try:
            yield Chunk(token_ids=token_ids(range(self.tokens)))
            await self.gate.wait()
            yield Chunk(finish_reason=FinishReason.STOP)
        finally:
            self.closed.set()

    async def control(self, verb: Control) -> bytes:
        return b""


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[str, PlaneLimits], object]]:
    planes: list[NatsPlane] = []

    async def make(
        url: str, limits: PlaneLimits, on_unreadable: Callable[[], None] = lambda: None
    ) -> NatsPlane:
        planes.append(await NatsPlane.connect(url, limits, None, on_unreadable))
        return planes[-1]

    yield make
    for plane in planes:
        await plane.aclose()


async def collect(plane: NatsPlane, subject: str = "s.g-1") -> list[Chunk]:
    async with aclosing(call_stream(plane, subject, make_request())) as chunks:
        return [chunk async for chunk in chunks]


async def test_server_restarted_midstream_serves_later_requests(own_nats, connect) -> None:
    server: TestServer = own_nats()
    worker = await connect(server.address, QUICK)
    caller = await connect(server.address, QUICK)
    service = GatedService()
    await worker.serve("s.g-1", service)
    running = asyncio.create_task(collect(caller))
    await asyncio.wait_for(service.started.wait(), SOON_S)
    await asyncio.to_thread(server.restart)
    with pytest.raises(Disconnected):
        await asyncio.wait_for(running, SOON_S)
    await asyncio.wait_for(service.closed.wait(), SOON_S)
    service.gate.set()
    async with asyncio.timeout(SOON_S):
        while True:
            try:
                assert len(await collect(caller)) == 2
                break
            except PlaneError:  # while the two reconnect
                await asyncio.sleep(0.05)


async def test_server_when_away_then_requests_fail_in_time(own_nats, connect) -> None:
    server: TestServer = own_nats()
    caller = await connect(server.address, QUICK)
    assert caller.unavailable_reason() is None
    server.kill()
    started = time.monotonic()
    with pytest.raises(Disconnected):
        await collect(caller)
    assert time.monotonic() - started < SOON_S
    assert (
        caller.unavailable_reason()
        == f"no connection to NATS at {server.address}; check that NATS runs"
    )
    server.start()
    async with asyncio.timeout(SOON_S):
        while caller.unavailable_reason():  # noqa: ASYNC110 - the client reconnects by itself
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("limits", "said"),
    [(QUICK, r"worker at s\.g-1 is gone"), (NO_PINGS, "connection to NATS .* lost")],
    ids=["our_pings", "nats_pings"],
)
async def test_server_when_frozen_midstream_then_both_ends_close(
    own_nats, connect, limits, said
) -> None:
    server: TestServer = own_nats()
    worker = await connect(server.address, limits)
    caller = await connect(server.address, limits)
    service = GatedService()
    await worker.serve("s.g-1", service)
    running = asyncio.create_task(collect(caller))
    await asyncio.wait_for(service.started.wait(), SOON_S)
    await asyncio.sleep(0.1)
    server.pause()
    try:
        with pytest.raises(Disconnected, match=said):
            await asyncio.wait_for(running, SOON_S)
        await asyncio.wait_for(service.closed.wait(), SOON_S)
    finally:
        server.resume()


def spawn(url: str, what: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", PEER, url, what, "s.g-2"], stdout=subprocess.PIPE, cwd=ROOT
    )


async def start_peer(url: str, what: str) -> subprocess.Popen[bytes]:
    peer = spawn(url, what)
    assert peer.stdout is not None
    assert await asyncio.to_thread(peer.stdout.readline) == b"ready\n"
    return peer


def end_peer(peer: subprocess.Popen[bytes]) -> None:
    peer.kill()
    peer.wait()
    assert peer.stdout is not None
    peer.stdout.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_dead_caller_process_closes_the_worker_stream(nats_server, connect, how) -> None:
    worker = await connect(nats_server, QUICK)
    service = GatedService()
    await worker.serve("s.g-2", service)
    peer = await start_peer(nats_server, "call")
    try:
        assert not service.closed.is_set()
        peer.send_signal(how)
        await asyncio.wait_for(service.closed.wait(), SOON_S)
    finally:
        end_peer(peer)


@pytest.mark.parametrize(
    ("how", "error"), [(signal.SIGKILL, WorkerDied), (signal.SIGSTOP, Disconnected)]
)
async def test_dead_worker_process_ends_the_callers_stream(
    nats_server, connect, how, error
) -> None:
    caller = await connect(nats_server, QUICK)
    peer = await start_peer(nats_server, "serve")
    try:
        async with aclosing(call_stream(caller, "s.g-2", make_request())) as chunks:
            await anext(chunks)
            peer.send_signal(how)
            with pytest.raises(Disconnected, match=r"s\.g-2") as caught:
                await asyncio.wait_for(anext(chunks), SOON_S)
        assert type(caught.value) is error
        with pytest.raises(Unreachable):
            await collect(caller, "s.g-2")
    finally:
        end_peer(peer)


async def test_aclose_with_frozen_server_leaves_no_task(own_nats) -> None:
    server: TestServer = own_nats()
    before = asyncio.all_tasks()
    plane = await NatsPlane.connect(server.address, QUICK)
    await plane.serve("s.g-1", GatedService())
    server.pause()
    try:
        for _ in range(20):
            plane._transport.publish("s.g-9", b"x" * 1_000_000)
        await asyncio.wait_for(plane.aclose(), 15)
        await asyncio.sleep(0.01)
        assert {task.get_name() for task in asyncio.all_tasks() - before} == set()
    finally:
        server.resume()


async def test_messages_dropped_by_slow_process_end_streams(nats_server, connect) -> None:
    worker = await connect(nats_server, NO_PINGS)
    service = GatedService(tokens=5000)
    await worker.serve("s.g-3", service)
    caller = await connect(nats_server, replace(NO_PINGS, received_bytes=10_000))
    with pytest.raises(StreamIncomplete, match="dropped"):
        await asyncio.wait_for(collect(caller, "s.g-3"), SOON_S)
    await asyncio.wait_for(service.closed.wait(), SOON_S)


async def test_receiver_bug_is_logged_with_traceback(nats_server, connect, caplog) -> None:
    def receive(data: bytes, reply: str) -> None:
        received.set()
        raise RuntimeError("a bug of the receiver")

    received = asyncio.Event()
    transport = (await connect(nats_server, NO_PINGS))._transport
    await transport.subscribe("s.g-bug", receive)
    transport.publish("s.g-bug", b"")
    await asyncio.wait_for(received.wait(), SOON_S)
    await asyncio.sleep(0)
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "a bug of the receiver" in str(record.exc_info)


async def test_connect_without_server_names_address_without_secrets() -> None:
    tasks = asyncio.all_tasks()
    started = time.monotonic()
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1;.*--nats-server") as caught:
        await NatsPlane.connect("nats://me:secret@127.0.0.1:1", connect_timeout_s=0.5)
    assert "secret" not in caught.value.message
    assert time.monotonic() - started < SOON_S
    assert asyncio.all_tasks() == tasks


async def test_client_when_closed_for_good_then_named_and_calls_fail(
    nats_server, connect, caplog
) -> None:
    caller = await connect(nats_server, QUICK)
    with caplog.at_level(logging.ERROR):
        await caller._transport._client.close()  # as nats-py does by itself after a protocol error
    assert "restart this process" in caplog.text
    with pytest.raises(Disconnected, match="stopped reconnecting"):
        await asyncio.wait_for(caller._tasks.until_failed(), SOON_S)
    with pytest.raises(Disconnected):
        await collect(caller)


async def test_connect_when_cancelled_then_nothing_goes_on_trying() -> None:
    before = asyncio.all_tasks()
    connecting = asyncio.create_task(NatsPlane.connect("nats://127.0.0.1:1", connect_timeout_s=5))
    await asyncio.sleep(0.2)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert asyncio.all_tasks() == before


async def test_ask_cancelled_at_its_reply_is_cancelled(nats_server, connect) -> None:
    transport = (await connect(nats_server, PlaneLimits()))._transport
    asking = asyncio.create_task(transport.request("s", b"", timeout_s=5))
    await asyncio.sleep(0)
    (reply,) = transport._replies.values()
    reply.set_result(Msg(_client=transport._client, data=b"here"))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert not transport._replies


async def test_ask_ends_when_client_drops_cancels(nats_server, connect, monkeypatch) -> None:
    transport = (await connect(nats_server, PlaneLimits()))._transport
    client = transport._client
    frozen = asyncio.Event()
    monkeypatch.setattr(client._transport, "drain", frozen.wait)
    monkeypatch.setattr(client, "_max_pending_size", 1)
    monkeypatch.setattr(client, "_flush_timeout", 0.1)
    await client._flush_pending()
    late, unwanted = [
        asyncio.create_task(transport.request("s", b"", timeout_s=timeout_s))
        for timeout_s in (0.01, 5)
    ]
    await asyncio.sleep(0.01)
    unwanted.cancel()
    with pytest.raises(Unreachable, match="no reply"):
        await asyncio.wait_for(late, SOON_S)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(unwanted, SOON_S)
    assert not transport._replies
    frozen.set()


async def test_aclose_ends_when_reconnecting_drops_a_cancel(nats_server, connect) -> None:
    plane = await connect(nats_server, PlaneLimits())

    async def reconnecting() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    task = plane._transport._client._reconnection_task = asyncio.create_task(reconnecting())
    await asyncio.sleep(0)
    await plane.aclose()
    assert task.cancelled()


@pytest.mark.parametrize("turns", range(4))
async def test_connect_cancelled_after_failed_try_closes_it(turns: int) -> None:
    """nats-py takes itself for closed from the moment on at which it begins to."""

    refused: list[asyncio.Task[None]] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        refused.append(asyncio.current_task())
        writer.write(b"-ERR 'not now'\r\n")
        with suppress(ConnectionError):
            await reader.read()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        transport = NatsTransport(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        connecting = asyncio.create_task(transport.connect(5))
        loop = asyncio.get_running_loop()
        close = transport._client._close

        def cancel_after(left: int) -> None:
            loop.call_soon(cancel_after, left - 1) if left else connecting.cancel()

        async def closing(*args: Any) -> None:
            if not connecting.cancelling():
                cancel_after(turns)
            await close(*args)

        transport._client._close = closing
        with pytest.raises(asyncio.CancelledError):
            await connecting
        # each ends with its connection
        done, open_still = await asyncio.wait(refused, timeout=SOON_S)
        assert done
        assert not open_still


async def test_connect_cancelled_at_its_end_is_cancelled(nats_server, monkeypatch) -> None:
    async def connected(*_: object, **__: object) -> None:
        connecting.cancel()

    monkeypatch.setattr(Client, "connect", connected)
    connecting = asyncio.create_task(NatsPlane.connect(nats_server))
    await asyncio.wait([connecting])
    assert connecting.cancelled()


async def test_try_publish_when_nats_is_away_then_rejected(own_nats, connect, caplog) -> None:
    server: TestServer = own_nats()
    plane = await connect(server.address, replace(NO_PINGS, unsent_bytes=8))
    received = asyncio.Queue()
    await plane._transport.subscribe("s.events", lambda data, _: received.put_nowait(data))
    await plane._transport.until_subscribed(SOON_S)  # so nothing is unsent
    assert plane.try_publish("s.events", b"1")
    # lost, and logged
    assert plane.try_publish("s.events", b"x" * (plane._transport.max_message_bytes + 1))
    assert "more than NATS allows" in caplog.text
    assert await asyncio.wait_for(received.get(), SOON_S) == b"1"
    assert plane.try_publish("s.events", b"2")
    await asyncio.sleep(0)  # now the client has it, and has not written it
    assert not plane.try_publish("s.events", b"lost")
    with pytest.raises(Disconnected, match="are unsent; check its load"):
        await plane._transport.request("s.events", b"lost", timeout_s=5)
    assert await asyncio.wait_for(received.get(), SOON_S) == b"2"
    server.kill()
    async with asyncio.timeout(SOON_S):
        while plane.try_publish("s.events", b"3"):  # noqa: ASYNC110 - until the client notices
            await asyncio.sleep(0.01)


async def test_worker_continues_after_nan_time_limit(nats_server: str, connect) -> None:
    service = GatedService()
    unreadable = asyncio.Event()
    service.gate.set()
    caller = await connect(nats_server, QUICK)
    worker = await connect(nats_server, QUICK, unreadable.set)
    await worker.serve("s.g-nan", service)
    opening = OpenStream(1, "_INBOX.x", make_request(), math.nan)
    assert caller.try_publish("s.g-nan", encode(ClientMessage(opening)))
    async with asyncio.timeout(SOON_S):
        await unreadable.wait()
        await asyncio.sleep(0.01)  # a timer with this time would end the event loop here
        assert len(await collect(caller, "s.g-nan")) == 2
