"""The limits of connections, over real sockets: the frontend's own HTTP server around a scripted
router.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from dynamo_trtllm.frontend.http.frontend_server import frontend_server
from dynamo_trtllm.frontend.requests import output_budget
from dynamo_trtllm.support.http_server.limits import TIMING, ConnectionTiming
from dynamo_trtllm.support.http_server.server import HttpServer
from tests.kit.frontend_app import MODEL, FakeFrontend, chunk, front, stop
from tests.kit.waiting import SOON_S

BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()
GET = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


class Served:
    def __init__(self, made: FakeFrontend, server: HttpServer, port: int) -> None:
        self.front = made
        self.server = server
        self._port = port
        self._clients: list[Client] = []

    async def connect(self) -> Client:
        self._clients.append(Client(*await asyncio.open_connection("127.0.0.1", self._port)))
        return self._clients[-1]

    async def until_connections(self, count: int) -> None:
        async with asyncio.timeout(SOON_S):
            while len(self.server.open) != count:  # noqa: ASYNC110  # a connection that opens has no event
                await asyncio.sleep(0.01)

    async def until_answered(self) -> None:
        """All exchanges have ended."""
        async with asyncio.timeout(SOON_S):
            while self.server.tasks:  # noqa: ASYNC110  # two waiters would miss each other's event
                await asyncio.sleep(0.01)

    async def aclose(self) -> None:
        for client in self._clients:
            client.writer.transport.abort()
        await asyncio.gather(
            *(client.writer.wait_closed() for client in self._clients), return_exceptions=True
        )


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: Any

    @property
    def code(self) -> str:
        return str(self.body["error"]["code"])


class Client(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self) -> Answer:
        head = (
            (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), SOON_S))
            .decode()
            .split("\r\n")
        )
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await asyncio.wait_for(
            self.reader.readexactly(int(headers["content-length"])), SOON_S
        )
        return Answer(int(head[0].split()[1]), headers, json.loads(body))

    async def ask(self, data: bytes) -> Answer:
        self.writer.write(data)
        return await self.answer()

    async def talk(self) -> None:
        while True:
            self.writer.write(b"x" * 1000)
            await self.writer.drain()
            await asyncio.sleep(0.05)

    async def until_closed(self) -> bytes:
        """What still came."""
        return await asyncio.wait_for(self.reader.read(), SOON_S)


@asynccontextmanager
async def serving(timing: ConnectionTiming = TIMING, **config: Any) -> AsyncIterator[Served]:
    """No connection, task or permit may be left at the end."""
    made = front(stop("ok"), **config)
    server = frontend_server(made.app, made.config, timing)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        served = Served(made, server, sock.getsockname()[1])
        task = asyncio.create_task(server.serve(sock))
        try:
            yield served
        finally:
            await served.aclose()
            server.stop()
            await task
    assert server.open == set()
    assert server.tasks == set()
    assert made.router.running == 0


async def test_connection_of_rejected_request_is_closed() -> None:
    async with serving(max_header_bytes=1024) as served:
        rejected = await served.connect()
        assert (
            await rejected.ask(b"GET /live HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 2000)
        ).status == 431
        begun = time.monotonic()
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(rejected.talk(), SOON_S)
        assert time.monotonic() - begun < SOON_S


@pytest.mark.parametrize(
    "head",
    [
        b"GET /live HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 2000 + b"\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 2000,  # and never ends
        b"GET /live HTTP/1.1\r\nHost: x\r\n" + b"X-Some: aaaaaaa\r\n" * 100 + b"\r\n",
        b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["one header", "no end", "many headers", "path"],
)
async def test_head_when_it_is_too_large_then_431_and_closed(head: bytes) -> None:
    async with serving(max_header_bytes=1024) as served:
        client = await served.connect()
        answer = await client.ask(head)
        assert (answer.status, answer.code) == (431, "head_too_large")
        assert await client.until_closed() == b""


async def test_head_limit_applies_to_small_pieces_together() -> None:
    async with serving(max_header_bytes=1024) as served:
        client = await served.connect()
        client.writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\nX-Long: ")
        for _ in range(20):
            client.writer.write(b"a" * 100)
            await asyncio.sleep(0.001)
        assert (await client.answer()).status == 431


async def test_small_head_allows_large_body_and_many_requests() -> None:
    padded = BODY[:-1] + b', "prompt_cache_options": {"pad": "' + b"x" * 300_000 + b'"}}'
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(padded) + padded
    async with serving(max_header_bytes=1024) as served:
        client = await served.connect()
        for _ in range(3):
            assert (await client.ask(request)).status == 200


async def test_head_when_it_comes_too_slowly_then_408_and_closed() -> None:
    async with serving(receive_timeout_s=0.2) as served:
        client = await served.connect()
        begun = time.monotonic()
        answer = await client.ask(b"GET /live HTTP/1.1\r\nHost:")
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert 0.15 < time.monotonic() - begun < SOON_S
        assert await client.until_closed() == b""


@pytest.mark.parametrize(("more", "status"), [(b"a" * 2000, 431), (b"a", 408)])
async def test_second_head_of_a_connection_has_the_same_limit(more: bytes, status: int) -> None:
    async with serving(
        max_header_bytes=1024, receive_timeout_s=0.3, keep_alive_timeout_s=30.0
    ) as served:
        client = await served.connect()
        assert (await client.ask(GET)).status == 200
        assert (await client.ask(GET[:-2] + b"X-Long: " + more)).status == status
        assert await client.until_closed() == b""


async def test_silent_connection_is_closed() -> None:
    async with serving(receive_timeout_s=0.2) as served:
        assert await (await served.connect()).until_closed() == b""


async def test_body_when_it_drips_then_408_and_closed_after_the_bound() -> None:
    async with serving(receive_timeout_s=0.5) as served:
        client = await served.connect()
        client.writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY))
        begun = time.monotonic()
        answering = asyncio.create_task(client.answer())
        for byte in BODY[:5]:  # each piece in good time, all of them not
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0.03)
        answer = await answering
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert time.monotonic() - begun < SOON_S
        assert await client.until_closed() == b""
        assert served.front.router.requests == []
        assert "request_timeout" in served.front.metrics.render().decode()


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (b"GET /live HTTP/1.1\r\n\r\n", 400, "invalid_request"),
        (b"GET /live HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400, "invalid_request"),
        (b"GET /live\r\n\r\n", 400, "invalid_request"),
        (b"nonsense\r\n\r\n", 400, "invalid_request"),
        (b"GET /live HTTP/2.0\r\nHost: x\r\n\r\n", 400, "invalid_request"),
        (CHUNKED + b"no size\r\n", 400, "invalid_request"),
        (CHUNKED + b"1;ext=" + b"x" * 8000 + b"\r\n", 413, "payload_too_large"),
        (CHUNKED + b"1\r\n{\r\n" * 1500, 413, "payload_too_large"),
        (CHUNKED + b"0\r\nTrailer: " + b"x" * 8000, 413, "payload_too_large"),
    ],
    ids=[
        "no Host",
        "two Hosts",
        "HTTP/0.9",
        "nonsense",
        "HTTP/2.0",
        "bad chunk",
        "chunk extension",
        "tiny chunks",
        "trailer",
    ],
)
async def test_malformed_request_gets_a_named_error(
    request_: bytes, status: int, code: str
) -> None:
    async with serving(max_header_bytes=1024, max_body_bytes=2048) as served:
        for first in (b"", GET):  # also as the second of a connection
            client = await served.connect()
            if first:
                assert (await client.ask(first)).status == 200
            head, separator, rest = request_.partition(b"chunked\r\n\r\n")
            client.writer.write(head + separator)
            await asyncio.sleep(0.01)
            answer = await client.ask(rest)
            assert (answer.status, answer.code) == (status, code)
            assert await client.until_closed() == b""
        assert served.front.router.requests == []


async def test_request_of_http_1_0_when_it_has_no_host_then_served() -> None:
    async with serving() as served:
        assert (
            await (await served.connect()).ask(GET.replace(b"1.1\r\nHost: x", b"1.0"))
        ).status == 200


@pytest.mark.parametrize(("size", "status"), [(len(BODY), 200), (10**18, 413)])
async def test_length_behind_thousands_of_zeros_is_read(size: int, status: int) -> None:
    async with serving() as served:
        client = await served.connect()
        length = b"Content-Length: %b%d\r\n\r\n" % (b"0" * 5000, size)
        assert (await client.ask(HEAD + length + BODY)).status == status


async def test_body_when_much_more_comes_after_413_then_closed() -> None:
    async with serving(max_body_bytes=2048) as served:
        client = await served.connect()
        assert (await client.ask(HEAD + b"Content-Length: 100000000\r\n\r\n")).status == 413
        client.writer.write(b"x" * 200_000)
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(client.talk(), SOON_S)


async def test_body_when_it_is_slow_within_the_bound_then_answered() -> None:
    async with serving(receive_timeout_s=30.0) as served:
        client = await served.connect()
        client.writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY))
        for byte in BODY:
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0.001)
        assert (await client.answer()).status == 200


async def test_keepalive_timeout_closes_idle_connection() -> None:
    async with serving(keep_alive_timeout_s=2.0) as served:
        client = await served.connect()
        for _ in range(3):
            assert (await client.ask(GET)).status == 200
            await asyncio.sleep(0.2)
        begun = time.monotonic()
        assert await client.until_closed() == b""
        assert 1.0 < time.monotonic() - begun < SOON_S


async def test_keepalive_outlasts_a_shorter_receive_timeout() -> None:
    async with serving(keep_alive_timeout_s=30.0, receive_timeout_s=0.2) as served:
        client = await served.connect()
        assert (await client.ask(GET)).status == 200
        await asyncio.sleep(0.5)
        assert (await client.ask(GET)).status == 200


async def test_answer_longer_than_receive_timeout_is_not_cut() -> None:
    async with serving(receive_timeout_s=0.2) as served:
        held = asyncio.Event()
        served.front.router.script = [held, stop("ok")]
        client = await served.connect()
        client.writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        await asyncio.wait_for(served.front.router.begun.wait(), SOON_S)
        await asyncio.sleep(0.5)
        held.set()
        assert (await client.answer()).status == 200


STREAM = json.dumps({**json.loads(BODY), "stream": True}).encode()
FLOOD = [chunk("x" * 10_000)] * 1000  # more than the buffers of both sides hold


async def test_unread_answer_is_cut_after_its_deadline() -> None:
    async with serving(ConnectionTiming(stall_s=0.2), request_timeout_s=1.5) as served:
        served.front.router.script = [*FLOOD, stop()]
        client = await served.connect()
        client.writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM)
        await asyncio.wait_for(served.front.router.closed.wait(), SOON_S)
        await served.until_connections(0)
        await served.until_answered()
        assert 0 < served.front.router.yielded < len(FLOOD)
        metrics = served.front.metrics.render().decode()
        assert "dynamo_trtllm_choices 0.0" in metrics
        assert "dynamo_trtllm_inflight 0.0" in metrics


async def test_slowly_read_answer_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    # the script does not wait for its reader
    monkeypatch.setattr(output_budget, "MAX_OUTPUT_BYTES", 1 << 40)
    async with serving(ConnectionTiming(stall_s=SOON_S), request_timeout_s=1.5) as served:
        served.front.router.script = [*FLOOD, stop()]
        client = await served.connect()
        client.writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM)
        await asyncio.sleep(1.7)
        read = 0
        while b"[DONE]" not in (
            data := await asyncio.wait_for(client.reader.read(1 << 20), SOON_S)
        ):
            assert data
            read += len(data)
            await asyncio.sleep(0.001)
        assert read > 9_000_000


async def test_client_leaving_after_second_request_ends_the_first() -> None:
    async with serving() as served:
        served.front.router.script = [asyncio.Event()]
        client = await served.connect()
        client.writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY + GET)
        await asyncio.wait_for(served.front.router.begun.wait(), SOON_S)
        client.writer.transport.abort()
        await asyncio.wait_for(served.front.router.closed.wait(), SOON_S)
        await served.until_answered()
        assert "dynamo_trtllm_inflight 0.0" in served.front.metrics.render().decode()


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_request_counts_as_answered_after_last_byte(stream: bool, choices: int) -> None:
    async with serving() as served:
        served.front.router.script = [chunk("one"), stop("ok")]
        client = await served.connect()
        body = json.dumps({**json.loads(BODY), "stream": stream, "n": choices}).encode()
        client.writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await asyncio.wait_for(
            client.reader.readuntil(b"[DONE]" if stream else b"total_tokens"), SOON_S
        )
        await served.until_answered()
        assert 'code="ok"' in served.front.metrics.render().decode()
