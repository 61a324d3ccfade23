"""The HTTP client, with a server that answers with bytes of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dynamo_trtllm.support import http_client
from tests.kit.waiting import SOON_S


class RawServer:
    """Sends the same bytes to each client after its request, then closes if `closes`."""

    def __init__(self, answer: bytes, *, closes: bool) -> None:
        self.answer = answer
        self.closes = closes
        self.url = ""
        self.requests: list[bytes] = []
        self.lost = asyncio.Event()  # the client has closed its connection

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self.answer)
        if not self.closes:
            await reader.read()
            self.lost.set()
        writer.close()


@asynccontextmanager
async def answering(answer: bytes, *, closes: bool = False) -> AsyncIterator[RawServer]:
    served = RawServer(answer, closes=closes)
    async with asyncio.timeout(SOON_S):
        server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        served.url = f"http://{host}:{port}/path?q=1"
        async with server:
            yield served


@pytest.mark.parametrize(
    ("answer", "closes", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", False, 200, b"ok"),
        (
            b"HTTP/1.1 404 X\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n0\r\n\r\n",
            False,
            404,
            b"ab",
        ),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False, 204, b""),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", True, 200, b"until the end"),
        (b"HTTP/1.1 302 X\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", False, 302, b""),
    ],
    ids=["length", "chunked", "no-content", "until-the-end", "redirect"],
)
async def test_request_when_complete_then_status_and_body(
    answer: bytes, closes: bool, status: int, body: bytes
) -> None:
    async with answering(answer, closes=closes) as server:
        assert await http_client.request(server.url, "GET") == (status, body)
    (request,) = server.requests
    assert request.startswith(b"GET /path?q=1 HTTP/1.1\r\nHost: 127.0.0.1:")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", "is incomplete: the server closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", "is incomplete"),
        (b"SSH-2.0-OpenSSH\r\n", "can't be parsed"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 17), "has a head of more than 65536 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100, "is longer than 99 bytes"),
    ],
    ids=["nothing", "body-cut", "not-http", "long-head", "long-body"],
)
async def test_request_when_the_response_is_bad_then_oserror_says_why(
    answer: bytes, error: str
) -> None:
    async with answering(answer, closes=True) as server:
        with pytest.raises(OSError, match=rf"^the response to GET /path\?q=1 {error}"):
            await http_client.request(server.url, "GET", max_bytes=99)


@pytest.mark.parametrize("url", ["localhost:8080/x", "http:///x", "ftp://host/x"])
async def test_connect_when_the_url_is_not_valid_then_valueerror(url: str) -> None:
    with pytest.raises(ValueError, match="no host, or a scheme other than"):
        await http_client.connect(url)


async def test_informational_response_is_skipped() -> None:
    reader = asyncio.StreamReader()
    response = http_client.Response(reader, "the response")
    reading = asyncio.create_task(response.read_head())
    reader.feed_data(b"HTTP/1.1 100 Continue\r\n\r\n")
    for _ in range(5):
        await asyncio.sleep(0)
    reader.feed_data(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    await reading
    assert (response.status, await response.read()) == (200, b"ok")


async def test_lines_when_the_body_goes_on_then_they_come_at_once() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with answering(head + b"4\r\none\n\r\n5\r\ntwo\nt\r\n") as server:
        async with await http_client.connect(server.url) as connection:
            response = await connection.request("GET")
            lines = response.lines()
            assert [await anext(lines), await anext(lines)] == [b"one", b"two"]
        await server.lost.wait()  # the end of the context has closed the connection


async def test_request_to_silent_server_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_SILENCE_TIMEOUT_S", 0.01)
    async with answering(b"") as server:
        with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s"):
            await http_client.request(server.url, "GET")


async def test_headers_are_those_of_the_response_itself() -> None:
    answer = (
        b"HTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nX-Decode-Instance: a1\r\nContent-Length: 0\r\n\r\n"
    )
    async with answering(answer) as server, await http_client.connect(server.url) as connection:
        response = await connection.request("GET")
        assert response.headers == {"x-decode-instance": "a1", "content-length": "0"}
