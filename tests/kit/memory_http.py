"""A client of an app without sockets: bytes in, bytes out, through the server's own connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import httptools

from dynamo_trtllm.frontend.api.error_bodies import openai_error
from dynamo_trtllm.support.http_server.connection import HttpConnection
from dynamo_trtllm.support.http_server.exchange import Handler
from dynamo_trtllm.support.http_server.limits import ConnectionLimits
from dynamo_trtllm.support.http_server.parsing_turns import ParsingTurns
from dynamo_trtllm.support.http_server.server import HttpServer

PEER = ("127.0.0.1", 123)
LIMITS = ConnectionLimits(
    max_connections=1,
    reserved_connections=1,
    max_header_bytes=1 << 20,
    receive_timeout_s=600.0,
    keep_alive_timeout_s=600.0,
    max_body_bytes=1 << 30,
)


class MemoryTransport(asyncio.Transport):
    """One end of a connection. `sent` has each write of the server."""

    def __init__(self, peer: tuple[str, int] = PEER) -> None:
        super().__init__({"peername": peer})
        self.sent: list[bytes] = []
        self.on_write: Callable[[bytes], None] = lambda data: None
        self.on_close: Callable[[], None] = lambda: None
        self.unread_bytes = 0
        self.is_reading = True
        self._closed = False
        self._protocol: asyncio.BaseProtocol | None = None

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)

    def write(self, data: bytes) -> None:  # type: ignore[override]
        assert not self._closed
        self.sent.append(data)
        self.on_write(data)

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes

    def is_closing(self) -> bool:
        return self._closed

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def write_eof(self) -> None:
        self.close()  # the client has read everything

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            assert self._protocol is not None
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)
            self.on_close()

    abort = close


class MemoryClient:
    """A client that is connected to an app."""

    def __init__(
        self, app: Handler, peer: tuple[str, int] = PEER, server: HttpServer | None = None
    ) -> None:
        """`server`: of `app`, if it has other clients, too."""
        if server is None:
            server = HttpServer(app, LIMITS, error_form=openai_error, shutdown_s=0.0)
            server.parsing_turns = ParsingTurns(lambda: 0.0)  # a busy machine changes nothing
        self.server = server
        self.connection = HttpConnection(self.server)
        self.transport = MemoryTransport(peer)
        self.transport.set_protocol(self.connection)

    def send(self, data: bytes) -> None:
        self.connection.receive(data)

    def leave(self) -> None:
        self.transport.abort()

    async def until_answered(self) -> None:
        """Wait until no handler runs. Raise what is cancelled with it."""
        await asyncio.gather(*self.server.tasks, return_exceptions=True)

    @property
    def received(self) -> bytes:
        return b"".join(self.transport.sent)


class _Messages:
    """The response to one request as ASGI messages; None after the last."""

    def __init__(self, client: MemoryClient, method: str) -> None:
        self.queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._headers: list[tuple[bytes, bytes]] = []
        self._is_head = method == "HEAD"
        self._parser = httptools.HttpResponseParser(self)
        client.transport.on_write = self._parser.feed_data
        client.transport.on_close = self.on_message_complete

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        headers = [pair for pair in self._headers if pair[0] != b"transfer-encoding"]
        status = self._parser.get_status_code()
        self.queue.put_nowait({"type": "http.response.start", "status": status, "headers": headers})
        if self._is_head:
            self.on_message_complete()

    def on_body(self, body: bytes) -> None:
        self.queue.put_nowait({"type": "http.response.body", "body": body, "more_body": True})

    def on_message_complete(self) -> None:
        if self._headers:
            self.queue.put_nowait({"type": "http.response.body", "body": b"", "more_body": False})
        self.queue.put_nowait(None)


def asgi(app: Handler) -> Callable[[Any, Any, Any], Awaitable[None]]:
    """Return an ASGI app for test clients that call one."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        client = MemoryClient(app, tuple(scope.get("client") or PEER))
        messages = _Messages(client, scope["method"])
        feeding = asyncio.create_task(_feed(client, scope, receive))
        try:
            while (message := await messages.queue.get()) is not None:
                await send(message)
            await client.until_answered()
        finally:
            feeding.cancel()
            client.leave()
            await asyncio.gather(feeding, client.until_answered(), return_exceptions=True)

    return call


async def _feed(client: MemoryClient, scope: Any, receive: Any) -> None:
    headers = [(name.lower(), value) for name, value in scope["headers"]]
    names = {name for name, _ in headers}
    if b"host" not in names:
        headers.append((b"host", b"frontend"))
    if scope["method"] == "POST" and not names & {b"content-length", b"transfer-encoding"}:
        headers.append((b"transfer-encoding", b"chunked"))
    is_chunked = any(name == b"transfer-encoding" for name, _ in headers)
    target = scope.get("raw_path") or quote(scope["path"]).encode()
    if scope.get("query_string"):
        target += b"?" + scope["query_string"]
    lines = [
        scope["method"].encode() + b" " + target + b" HTTP/1.1",
        *(b"%b: %b" % pair for pair in headers),
    ]
    client.send(b"\r\n".join([*lines, b"", b""]))
    while (message := await receive())[
        "type"
    ] == "http.request" and not client.transport.is_closing():
        if body := message.get("body", b""):
            client.send(b"%x\r\n%b\r\n" % (len(body), body) if is_chunked else body)
        if is_chunked and not message.get("more_body", False):
            client.send(b"0\r\n\r\n")
    client.leave()
