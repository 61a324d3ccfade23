"""The HTTP server over real sockets, on both event loops and with TLS: its end, slow readers, and the
oldest clients.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import pytest

from dynamo_trtllm.protocol.errors import PayloadTooLarge
from dynamo_trtllm.support.http_server.exchange import HttpRequest, HttpResponse
from dynamo_trtllm.support.http_server.limits import ConnectionTiming
from tests.integration.http_serving import (
    GET,
    LARGE,
    Held,
    on_all_transports,
    on_both_loops,
    serving,
)
from tests.kit.waiting import SOON_S

UPLOAD = bytes(8 << 20)


@on_all_transports
async def test_stop_answers_running_requests_and_closes_idle_ones() -> None:
    held = Held()
    async with serving(held) as served:
        idle, idle_writer = await served.connect()
        reader, writer = await served.connect(GET)
        await held.begun.wait()
        served.server.stop()
        assert await idle.read() == b""
        with pytest.raises(OSError, match=r"refused|failed"):
            await served.connect()
        assert not served.task.done()
        held.go.set()
        answer = await reader.read()  # to the end of the connection
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nConnection: close\r\n" in answer
        await served.task
        idle_writer.close()
        writer.close()


async def stream_until(go: asyncio.Event, request: HttpRequest, response: HttpResponse) -> None:
    response.start_events({})
    await response.send_events(b"data: 1\n\n")
    await go.wait()
    await response.send_events(b"data: 2\n\n", last=True)


@pytest.mark.parametrize("is_idle", [False, True])
@on_all_transports
async def test_stop_answers_next_request_with_503(is_idle: bool) -> None:
    go = asyncio.Event()
    async with serving(partial(stream_until, go), shutdown_s=30) as served:
        reader, writer = await served.connect(GET)
        await reader.readuntil(b"data: 1")  # the headers do not say that the connection will end
        for step in (go.set, served.server.stop) if is_idle else (served.server.stop, go.set):
            step()
            await asyncio.sleep(0.05)
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(GET)
        answer = await reader.read()  # to the end of the connection
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nConnection: close\r\n" in answer
        assert b"\r\nRetry-After: " in answer
        assert b'"code":"draining"' in answer
        writer.close()


@on_all_transports
async def test_connection_opened_during_drain_ends_soon() -> None:
    async with serving(Held(), timing=ConnectionTiming(drain_s=0.05)) as served:
        served.server.drain()
        reader, writer = await served.connect()
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("way", ["too long", "interrupt"])
@on_all_transports
async def test_stop_answers_endless_request_with_503(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    held = Held()
    async with serving(held, 0.1 if way == "too long" else SOON_S) as served:
        reader, writer = await served.connect(GET)
        await held.begun.wait()
        served.server.stop()
        if way == "interrupt":
            served.server.interrupt()
        await served.task
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"draining"' in answer
        assert "1 request " in caplog.text
        assert ("within 0.1 s" in caplog.text) == (way == "too long")
        assert ("second signal" in caplog.text) == (way == "interrupt")
        writer.close()


@on_all_transports
async def test_serve_cancelled_ends_requests_and_connections() -> None:
    held = Held()
    async with serving(held) as served:
        reader, writer = await served.connect(GET)
        await held.begun.wait()
        served.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await served.task
        assert not served.server.tasks
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        writer.close()
        served.task = asyncio.create_task(asyncio.sleep(0))


async def answer_large(request: HttpRequest, response: HttpResponse) -> None:
    response.send(200, LARGE)


@pytest.mark.parametrize("close", [False, True])
@on_all_transports
async def test_unread_response_ends_the_connection(close: bool) -> None:
    timing = ConnectionTiming(stall_s=0.05)
    async with serving(answer_large, keep_alive_timeout_s=0.05, timing=timing) as served:
        _, writer = await served.connect(
            GET.replace(b"Host", b"Connection: close\r\nHost") if close else GET
        )
        async with asyncio.timeout(SOON_S):
            while not served.server.open:  # noqa: ASYNC110 - the server has no event for it
                await asyncio.sleep(0.001)
        await served.server.until_ended()
        writer.transport.abort()


@pytest.mark.parametrize("way", ["close", "HTTP/1.0", "drain"])
@on_all_transports
async def test_answer_before_end_of_upload_is_readable(way: str) -> None:
    async def refuse(request: HttpRequest, response: HttpResponse) -> None:
        if way == "drain":
            served.server.drain()
        response.send_error(PayloadTooLarge("too large"))

    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(UPLOAD)
    if way == "HTTP/1.0":
        head = head.replace(b"HTTP/1.1", b"HTTP/1.0")
    elif way == "close":
        head = head.replace(b"Host", b"Connection: close\r\nHost")
    async with serving(refuse) as served:
        reader, writer = await served.connect(head)
        await asyncio.sleep(0.05)  # the answer was sent
        for _ in range(8):
            writer.write(UPLOAD[: len(UPLOAD) // 8])
            await writer.drain()
            await asyncio.sleep(0.01)
        assert (await reader.read()).startswith(b"HTTP/1.1 413 ")
        writer.close()


@on_all_transports
async def test_unread_failed_stream_ends_the_connection() -> None:
    async def fail(request: HttpRequest, response: HttpResponse) -> None:
        response.start_events({})
        response.write(LARGE)
        raise RuntimeError("a bug")

    async with serving(fail, timing=ConnectionTiming(stall_s=0.05)) as served:
        _, writer = await served.connect(GET)
        async with asyncio.timeout(SOON_S):
            while not served.server.open:  # noqa: ASYNC110 - the server has no event for it
                await asyncio.sleep(0.001)
        await served.server.until_ended()
        writer.transport.abort()


@on_all_transports
async def test_slowly_read_response_before_wrong_request_is_complete() -> None:
    timing = ConnectionTiming(linger_s=0.2)
    async with serving(answer_large, timing=timing) as served:
        reader, writer = await served.connect(GET)
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"nonsense\r\n\r\n")
        await asyncio.sleep(0.6)
        received = await reader.read()
        assert head.startswith(b"HTTP/1.1 200 ")
        assert received.startswith(LARGE)
        assert received[len(LARGE) :].startswith(b"HTTP/1.1 400 ")
        writer.close()


@on_all_transports
async def test_unread_stream_buffers_little_and_cancels_handler() -> None:
    event = b"x" * 10_000
    kept = [0]
    ended = []

    async def flood(request: HttpRequest, response: HttpResponse) -> None:
        response.cancel_on_disconnect()
        response.start_events({})
        [opened] = served.server.open
        try:
            while True:
                await response.send_events(event)
                kept[0] = max(kept[0], opened._transport.get_write_buffer_size())
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async with serving(flood, timing=ConnectionTiming(stall_s=0.2)) as served:
        _, writer = await served.connect(GET)
        async with asyncio.timeout(SOON_S):
            while not served.server.open:  # noqa: ASYNC110 - the server has no event for it
                await asyncio.sleep(0.001)
        await served.server.until_ended()
        writer.transport.abort()
    assert ended == ["cancelled"]
    assert 0 < kept[0] < 200_000


# With TLS, a client of an event loop drops what it has not read when the server closes; see
# test_tls.py for another client.
@on_both_loops
async def test_response_when_it_is_read_slowly_then_it_is_whole() -> None:
    timing = ConnectionTiming(stall_s=0.5)
    async with serving(answer_large, keep_alive_timeout_s=0.05, timing=timing) as served:
        reader, writer = await served.connect(GET)
        size = 0
        while data := await reader.read(1 << 20):
            size += len(data)
            await asyncio.sleep(0.02)
        assert size > len(LARGE)
        writer.close()


@pytest.mark.parametrize("sent", [b"\r\n", b"\r\n\r\n"])
@on_all_transports
async def test_connection_with_only_line_breaks_ends(sent: bytes) -> None:
    held = Held()
    held.go.set()
    async with serving(held, keep_alive_timeout_s=0.1) as served:
        reader, writer = await served.connect(GET)
        await reader.readuntil(b"{}")
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()


@on_all_transports
async def test_stream_to_http_1_0_then_it_ends_with_the_connection() -> None:
    async def stream(request: HttpRequest, response: HttpResponse) -> None:
        response.start_events({})
        for _ in range(2):
            await response.send_events(b"data: x\n\n")
        await response.send_events(b"data: end\n\n", last=True)

    async with serving(stream) as served:
        reader, writer = await served.connect(b"GET / HTTP/1.0\r\n\r\n")
        head, _, events = (await reader.read()).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert events == b"data: x\n\ndata: x\n\ndata: end\n\n"
        writer.close()
