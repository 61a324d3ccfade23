"""A client that leaves, at every phase, over a real socket: the router's stream is closed and no
permit is left.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from dynamo_trtllm.frontend.http.frontend_server import frontend_server
from dynamo_trtllm.protocol.messages import Chunk
from tests.kit.frontend_app import MODEL, FakeFrontend, chunk, front, stop
from tests.kit.memory_http import asgi
from tests.kit.waiting import SOON_S

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def serving(served: FakeFrontend) -> AsyncGenerator[int, None]:
    server = frontend_server(served.app, served.config)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        task = asyncio.create_task(server.serve(sock))
        try:
            yield port
        finally:
            server.stop()
            await task


async def request(port: int, *, stream: bool) -> Connection:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock)
    body = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


def flood() -> list[Chunk]:
    """More than the socket buffers of both sides hold: 10 MB."""
    return [chunk("x" * 10_000)] * 1000


def check_nothing_left(served: FakeFrontend) -> None:
    assert served.router.running == 0
    metrics = served.metrics.render().decode()
    assert "dynamo_trtllm_inflight 0.0" in metrics
    assert 'code="cancelled"' in metrics


async def finished(served: FakeFrontend) -> None:
    """The log line and the metrics follow the close, a few turns of the loop later."""
    async with asyncio.timeout(SOON_S):
        await served.router.closed.wait()
        while 'code="cancelled"' not in served.metrics.render().decode():  # noqa: ASYNC110  # a counter has no event
            await asyncio.sleep(0.01)


async def until_stuck(served: FakeFrontend) -> None:
    """The socket buffers are full, and the client does not read: nothing more is taken from the
    router.
    """
    await asyncio.wait_for(served.router.begun.wait(), SOON_S)
    seen = 0
    async with asyncio.timeout(SOON_S):
        while not seen or seen != served.router.yielded:
            seen = served.router.yielded
            await asyncio.sleep(0.3)


@pytest.mark.parametrize("stream", [False, True])
async def test_client_leaving_before_first_chunk_closes_the_router(stream: bool) -> None:
    served = front(asyncio.Event())
    async with serving(served) as port:
        _, writer = await request(port, stream=stream)
        await asyncio.wait_for(served.router.begun.wait(), SOON_S)
        writer.close()
        await finished(served)
        check_nothing_left(served)


@pytest.mark.parametrize("stream", [False, True])
async def test_client_leaves_between_chunks_then_the_router_is_closed(stream: bool) -> None:
    reached = asyncio.Event()

    class Reached(asyncio.Event):
        async def wait(self) -> bool:  # type: ignore[override]
            reached.set()
            return await super().wait()

    served = front(chunk("first"), Reached())
    async with serving(served) as port:
        reader, writer = await request(port, stream=stream)
        if stream:
            await asyncio.wait_for(reader.readuntil(b"first"), SOON_S)
        await asyncio.wait_for(reached.wait(), SOON_S)
        writer.close()
        await finished(served)
        check_nothing_left(served)


async def test_client_leaving_with_full_reader_closes_the_router() -> None:
    many = flood()
    served = front(*many, asyncio.Event())
    async with serving(served) as port:
        _, writer = await request(port, stream=True)
        await asyncio.wait_for(served.router.begun.wait(), SOON_S)
        await until_stuck(served)
        assert 0 < served.router.yielded < len(many)
        writer.transport.abort()
        await finished(served)
        check_nothing_left(served)


async def test_slow_reader_then_only_its_own_stream_waits() -> None:
    many = flood()
    served = front(*many, asyncio.Event())
    async with serving(served) as port:
        _, slow = await request(port, stream=True)
        await until_stuck(served)
        assert served.router.yielded < len(many)
        served.router.script = [chunk("quick"), stop()]
        reader, quick = await request(port, stream=True)
        await asyncio.wait_for(reader.readuntil(b"[DONE]"), SOON_S)
        quick.close()
        slow.transport.abort()
        await finished(served)


async def test_server_cancels_the_exchange_then_the_router_is_closed() -> None:
    served = front(asyncio.Event())
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()
    inbox: asyncio.Queue[dict[str, object]] = asyncio.Queue()
    inbox.put_nowait({"type": "http.request", "body": body})
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
    }

    async def send(_: object) -> None:
        raise AssertionError("nothing to send")

    exchange = asyncio.create_task(asgi(served.app)(scope, inbox.get, send))  # type: ignore[arg-type]
    await served.router.begun.wait()
    exchange.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange
    check_nothing_left(served)
