"""Fuzz HTTP: one connection with packets cut anywhere, and the whole frontend behind it."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from http import HTTPStatus
from typing import NamedTuple

import httptools

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.support.http_server.exchange import HttpRequest, HttpResponse
from tests.fuzz.target import (
    LoggedErrors,
    Target,
    check_hides,
    cut,
    event_loop,
    random_of,
    secret_for,
)
from tests.kit.frontend_app import MODEL, FakeFrontend, ScriptedRouter, stop
from tests.kit.memory_http import MemoryClient

_API_KEY = "sk-0123456789abcdef"
_WRONG_KEY = "sk-of-another-server-abcdef"
_SENT_KEY = b"\r\nAuthorization: Bearer %b\r\n"
_TURNS = 400  # of the event loop; an answer takes a few
_STATUSES = frozenset((200, 400, 401, 403, 404, 405, 408, 413, 415, 422, 429, 431, 503))


class _Received(NamedTuple):
    """A request that a handler has received completely."""

    method: str
    path: str
    query: tuple[tuple[str, tuple[str, ...]], ...]
    host: str | None
    body: bytes


class _Server:
    """The state that all inputs share."""

    def __init__(self) -> None:
        self.loop = event_loop()
        self.errors = LoggedErrors()


@functools.cache
def _server() -> _Server:
    return _Server()


# --- one connection ---------------------------------------------------------------------------------


def check_connection(data: bytes) -> None:
    """Send bytes at once, in parts, and byte by byte: the handler receives the same requests."""
    server = _server()
    draw = random_of(data)
    waits = draw.random() < 0.5
    parts = list(cut(data, draw))
    whole = server.loop.run_until_complete(_receive([data], waits=False))
    pieces = server.loop.run_until_complete(_receive(parts, waits=waits))
    server.errors.check()
    assert pieces == whole, f"{pieces} in {parts}, {whole} at once"


async def _receive(parts: list[bytes], *, waits: bool) -> list[_Received]:
    """Return the requests of a client that sends these parts. `waits`: for each answer."""
    received: list[_Received] = []

    async def handle(request: HttpRequest, response: HttpResponse) -> None:
        if request.path.startswith("/early"):
            response.send(200, b"early")
            return
        body = b""
        async for part in _body(request):
            body += part
        query = tuple((name, tuple(values)) for name, values in request.query().items())
        host = request.header(b"host")
        received.append(_Received(request.method, request.path, query, host, body))
        if request.path.startswith("/events"):
            response.start_events({})
            await response.send_events(b"data: 1\n\n")
            await response.send_events(b"", last=True)
        else:
            response.send(200, hashlib.sha256(body).digest())

    client = MemoryClient(handle)
    try:
        for part in parts:
            if client.transport.is_closing():
                break
            client.send(part)
            if waits:
                await _until_quiet(client)
        await _until_quiet(client)
        _parse_answers(client.received)
    finally:
        client.leave()
        await _until_quiet(client)
        await client.until_answered()
    assert not client.server.open
    return received


async def _body(request: HttpRequest) -> AsyncIterator[bytes]:
    while part := await request.receive():
        yield part


async def _until_quiet(client: MemoryClient) -> None:
    """Run the loop until the connection has nothing more to do without its client."""
    for _ in range(6):
        await asyncio.sleep(0)
    unread = len(client.connection._unparsed) + len(client.connection._waiting)
    turns = 0
    while unread and turns < _TURNS:
        await asyncio.sleep(0)
        turns += 1
        unread = len(client.connection._unparsed) + len(client.connection._waiting)


class _Answers:
    """Parses what a server has sent."""

    def __init__(self) -> None:
        self.bodies: list[tuple[int, bytes]] = []
        self._body = b""
        self.parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self._body = b""

    def on_body(self, part: bytes) -> None:
        self._body += part

    def on_message_complete(self) -> None:
        status = self.parser.get_status_code()
        if status >= HTTPStatus.OK:  # "100 Continue" is not the answer: another one follows
            self.bodies.append((status, self._body))


def _parse_answers(sent: bytes) -> list[tuple[int, bytes]]:
    """Return the status and the body of each answer. Those to HEAD have no body: they are left out."""
    answers = _Answers()
    try:
        answers.parser.feed_data(sent)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        # An answer to HEAD has the length of a body that it does not have.
        assert sent.startswith(b"HTTP/1.1 ")
    return answers.bodies


def _requests() -> Iterator[bytes]:
    yield b"GET /a?b=c&b=%20d&e HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhelloGET /b HTTP/1.1\r\nHost: x\r\n\r\n"
    yield (
        b"POST /events HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5;e=f\r\nhello\r\n0\r\nTrailer: t\r\n\r\nGET /early HTTP/1.1\r\nHost: x\r\n\r\n"
    )
    yield b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\nhello"
    yield b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET /b HTTP/1.0\r\n\r\n"
    yield b"POST /a HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: upgrade\r\nContent-Length: 2\r\n\r\nhi"
    yield b"HEAD /%e9%00 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\nGET / HTTP/1.1\r\n"
    yield b"GET http://h/a HTTP/1.1\r\nHost: x\r\n\r\n" * 3


# --- the frontend -----------------------------------------------------------------------------------


class _Frontend:
    """A frontend with an API key, and a router that answers every generation."""

    def __init__(self) -> None:
        config = FrontendConfig.model_validate(
            {"api_key": _API_KEY, "cors_origins": "http://page.example"}
        )
        self.front = FakeFrontend(ScriptedRouter([stop("hello")]), config)


@functools.cache
def _frontend() -> _Frontend:
    return _Frontend()


def check_frontend(data: bytes) -> None:
    """Send bytes to a frontend: a documented status, no bug in the log, no key in an answer."""
    server = _server()
    secret = secret_for(data)
    # A client that puts a key into a path or a body may see it again: only the header has a secret.
    data = data.replace(_SENT_KEY % _WRONG_KEY.encode(), _SENT_KEY % secret.encode())
    answers = server.loop.run_until_complete(_ask(data))
    server.errors.check()
    for status, body in answers:
        assert status in _STATUSES, f"{status}: {body[:500]!r}"
        check_hides(secret, body.decode("utf-8", "replace"))
        if body.startswith(b"{"):
            json.loads(body)


async def _ask(data: bytes) -> list[tuple[int, bytes]]:
    client = MemoryClient(_frontend().front.app)
    try:
        for part in cut(data, random_of(data)):
            if client.transport.is_closing():
                break
            client.send(part)
        await _until_quiet(client)
        if client.server.tasks:
            await asyncio.wait(list(client.server.tasks), timeout=0.05)
        return _parse_answers(client.received)
    finally:
        client.leave()
        await client.until_answered()


def _post(path: str, body: dict[str, object], *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {_API_KEY}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        *headers,
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def _get(path: str, *headers: str) -> bytes:
    lines = (f"GET {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {_API_KEY}", *headers)
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def _calls() -> Iterator[bytes]:
    turns = [{"role": "user", "content": "hi"}]
    yield _post("/v1/chat/completions", {"model": MODEL, "messages": turns})
    yield _post("/v1/chat/completions", {"model": MODEL, "messages": turns, "stream": True})
    yield _post(
        "/v1/completions", {"model": MODEL, "prompt": "hi"}, "X-Request-Id: r", "X-Session-Id: s"
    )
    yield _post("/v1/responses", {"model": MODEL, "input": "hi", "store": False})
    yield _post(
        "/v1/messages", {"model": MODEL, "max_tokens": 5, "messages": turns}, "x-api-key: k"
    )
    yield _post("/tokenize", {"model": MODEL, "prompt": "hi"}, "traceparent: 00-a-b-01")
    yield _post("/detokenize", {"model": MODEL, "tokens": [104]})
    for path in (
        "/v1/models",
        f"/v1/models/{MODEL}",
        f"/v1/models/{MODEL}/ready",
        "/health",
        "/ready",
    ):
        yield _get(path)
    yield _get("/metrics?name=x") + _get("/version") + _get("/live")
    yield _get("/v1/responses/resp_x/input_items?limit=5&order=asc&after=x")
    yield _get("/v1/responses/resp_x?stream=true&starting_after=5&include=a")
    yield b"OPTIONS /v1/models HTTP/1.1\r\nHost: x\r\nOrigin: http://page.example\r\nAccess-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: a\r\n\r\n"
    yield f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {_WRONG_KEY}\r\n\r\n".encode()


_HTTP_WORDS = (
    *(
        b"GET ",
        b"POST ",
        b"HEAD ",
        b"OPTIONS ",
        b"CONNECT ",
        b"DELETE ",
        b" HTTP/1.1\r\n",
        b"\r\n\r\n",
    ),
    *(b" HTTP/1.0\r\n", b"Host: x\r\n", b"Content-Length: ", b"Transfer-Encoding: chunked\r\n"),
    *(b"0\r\n\r\n", b"Connection: close\r\n", b"Connection: keep-alive\r\n", b"Upgrade: h2c\r\n"),
    *(
        b"Expect: 100-continue\r\n",
        b"Upgrade: websocket\r\n",
        b"Connection: upgrade\r\n",
        b"?a=b&c",
    ),
    *(b"%00", b"%ff", b"/early", b"/events", b"PRI * HTTP/2.0\r\n\r\n"),
)


TARGETS = {
    "connection": Target(
        summary="HTTP requests on one connection, in any cut of packets",
        check=check_connection,
        files=(
            "support/http_server/request_parser.py",
            "support/http_server/request_head.py",
            "support/http_server/connection.py",
            "support/http_server/exchange.py",
        ),
        seeds=_requests,
        words=_HTTP_WORDS,
        max_bytes=600,
    ),
    "frontend": Target(
        summary="HTTP requests to a frontend: routes, keys, queries, all APIs",
        check=check_frontend,
        files=(
            "frontend/http/status_routes.py",
            "frontend/http/responses_api_routes.py",
            "access/access_control.py",
            "support/http_server/server.py",
        ),
        seeds=_calls,
        words=(
            *_HTTP_WORDS,
            *(b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages"),
            *(b"/tokenize", b"/detokenize", b"/v1/models", b"/health", b"/metrics", b"/docs"),
            *(b"/cancel", b"/input_items", b"limit=", b"after=", b"order=asc", b"stream=true"),
            *(b"Authorization: Bearer ", b"x-api-key: ", b"Origin: http://page.example\r\n"),
            *(b"Sec-Fetch-Site: cross-site\r\n", b"Content-Type: application/json\r\n"),
            *(_API_KEY.encode(), _WRONG_KEY.encode(), b"traceparent: ", b"X-Request-Id: "),
        ),
    ),
}
