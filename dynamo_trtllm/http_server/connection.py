"""Run the HTTP server with limits on connections: their number, the size of a request's head, and its arrival time.

uvicorn has none of these limits for its fast parser. Bodies are also limited where they are read (`http.read_body`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from dataclasses import dataclass
from http import HTTPStatus
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.errors import DynamoError, HeadTooLarge, InvalidRequest, Overloaded, PayloadTooLarge, RequestTimeout
from dynamo_trtllm.http_server.body_writer import WRITER, CycleWriter, FlushBatch, HeldHead
from dynamo_trtllm.http_server.errors import to_response
from dynamo_trtllm.network.listening import Acceptor, allow_files

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

_log = logging.getLogger(__name__)

_OTHER_FILES = 128  # log, etcd, NATS, model files, and rejected connections that linger
_SHUTDOWN_S = 30  # longest wait for running requests after the first signal
_GRACE_S = 5.0  # time to send the error for a body that arrived too slowly, before the connection is closed
_LINGER_S = 1.0  # time for a rejected client to read the error: closing while it still sends would discard the error
_order = count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The limits of one server. A connection beyond the limit gets 429, unless it replaces another one."""

    max_connections: int
    max_header_bytes: int  # request line and headers
    receive_timeout_s: float  # for the head from its first byte (or the connection) on, then for the body
    keep_alive_timeout_s: float  # of an idle connection
    answer_timeout_s: float | None = None  # until the client has read a response; None: no limit here
    closes_least_recent: bool = False  # a connection beyond the limit replaces the least recently used one
    max_body_bytes: int = 0  # includes chunk sizes, extensions and trailers beyond `max_header_bytes`


def http_server(app: ASGIApp, config: FrontendConfig, *, backlog: int) -> uvicorn.Server:
    """Create the server, which does not listen yet, and raise the limit of open files to fit its connections."""
    allow_files(config.max_connections + _OTHER_FILES, ", or lower --max-connections")
    limits = ConnectionLimits(
        max_connections=config.max_connections,
        max_header_bytes=config.max_header_bytes,
        receive_timeout_s=config.receive_timeout_s,
        keep_alive_timeout_s=config.keep_alive_timeout_s,
        max_body_bytes=config.max_body_bytes,
    )
    return HttpServer(app, limits, backlog=backlog, shutdown_s=_SHUTDOWN_S)


class HttpServer(uvicorn.Server):
    """A uvicorn server with connection limits that accepts connections through `Acceptor`.

    `shutdown_s` is the longest wait for running requests at shutdown.
    """

    def __init__(self, app: ASGIApp, limits: ConnectionLimits, *, backlog: int, shutdown_s: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=type("Protocol", (LimitedProtocol,), {"limits": limits, "flush_batch": FlushBatch()}),
                timeout_keep_alive=limits.keep_alive_timeout_s,  # type: ignore[arg-type]  # goes to call_later
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,  # a client's address is that of its connection
                server_header=False,
                timeout_graceful_shutdown=shutdown_s,
                backlog=backlog,
            )
        )
        self._limits = limits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self.servers = [Acceptor(sock, self._connect, self._relieve) for sock in sockets or ()]  # type: ignore[misc]

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make_protocol, connection)
        except OSError as exc:
            connection.close()
            _log.debug("client disconnected while it was accepted: %s", exc)

    def _relieve(self) -> bool:
        return self._limits.closes_least_recent and _close_least_recent(self.server_state.connections)

    def _make_protocol(self) -> asyncio.Protocol:
        protocol = self.config.http_protocol_class
        return protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore[call-arg]


def _close_least_recent(connections: set[Any]) -> bool:
    """Close the connection whose last request or opening is oldest. Return False if there is no connection."""
    if not connections:
        return False
    oldest: LimitedProtocol = min(connections, key=lambda each: each.last_activity)
    connections.discard(oldest)
    oldest.transport.abort()  # `close` would wait until the client has read all data
    return True


class LimitedProtocol(HttpToolsProtocol):
    """One connection. uvicorn creates it."""

    limits: ClassVar[ConnectionLimits]
    flush_batch: ClassVar[FlushBatch]

    last_activity = 0  # rank by the time of its opening, or of its newest complete request head
    _in_head = True  # True before and during a request's head
    _received_bytes = 0  # of an incomplete head
    _parsed_bytes = 0
    _body_bytes = 0  # received
    _rejected = False
    _timer: asyncio.TimerHandle | None = None
    _answering: RequestResponseCycle | None = None
    _answer_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.last_activity = next(_order)
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            if not self.limits.closes_least_recent:
                self.connections.discard(self)
                most = self.limits.max_connections
                self._reject(Overloaded(f"the server has {most} open connections, its limit; try again later"))
                return
            _close_least_recent(self.connections)
        self._arm(self.limits.receive_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._disarm_answer()
        super().connection_lost(exc)
        # uvicorn notifies only the newest request, which may wait behind this one.
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        if self.limits.answer_timeout_s is not None:
            self._disarm_answer()
            self._answer_timer = self.loop.call_later(self.limits.answer_timeout_s, self._cut_answer, cycle)
        super()._start_asgi_task(cycle, app)

    def _cut_answer(self, cycle: RequestResponseCycle) -> None:
        """Close the connection at the timeout, unless the response was sent."""
        if not cycle.response_complete or self.transport.get_write_buffer_size():
            self.transport.abort()

    def _disarm_answer(self) -> None:
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None

    def data_received(self, data: bytes) -> None:
        if self._rejected:
            return
        if self._in_head:
            self._received_bytes += len(data)
        else:
            self._body_bytes += len(data)
        super().data_received(data)
        if self._body_bytes > self.limits.max_body_bytes + self.limits.max_header_bytes and not self._rejected:
            self._reject(
                PayloadTooLarge(
                    f"the request body is larger than the limit of {self.limits.max_body_bytes} bytes, including chunk "
                    "sizes, extensions and trailers"
                )
            )
            return
        if self._in_head and self._received_bytes > self.limits.max_header_bytes and not self._rejected:
            self._reject(self._too_large())

    # --- called by the parser, within `data_received` --------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:
            self._arm(self.limits.receive_timeout_s)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._parsed(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._parsed(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        self._check_version()
        self._in_head, self._received_bytes, self._parsed_bytes, self._body_bytes = False, 0, 0, 0
        self.last_activity = next(_order)
        self._arm(self.limits.receive_timeout_s + _GRACE_S)
        super().on_headers_complete()
        self.scope["state"][WRITER] = CycleWriter(self.cycle, self.flush_batch)
        if self.scope["method"] != "HEAD":
            self.cycle.transport = HeldHead(self.cycle, self.transport)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._disarm()
        super().on_message_complete()

    def _parsed(self, num_bytes: int) -> None:
        self._parsed_bytes += num_bytes
        if self._parsed_bytes > self.limits.max_header_bytes:
            raise self._too_large()  # the parser stops, and uvicorn calls `send_400_response`

    def _check_version(self) -> None:
        """Check the HTTP version and the Host header. Raises InvalidRequest, which stops the parser."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise InvalidRequest(f"HTTP/{version} is not supported; send HTTP/1.1 requests")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (version == "1.1" and not hosts):
            raise InvalidRequest(f"the request has {hosts} Host headers; HTTP/1.1 requests must have one")

    def send_400_response(self, msg: str) -> None:
        """Reject the request. uvicorn calls this while it handles a parser error, which may wrap a DynamoError."""
        exc = sys.exception()
        cause = exc and exc.__context__
        self._reject(cause if isinstance(cause, DynamoError) else InvalidRequest("the request is not valid HTTP/1.1"))

    # --- the end ---------------------------------------------------------------------------------------

    def _too_large(self) -> HeadTooLarge:
        most = self.limits.max_header_bytes
        return HeadTooLarge(f"the request line and headers are larger than the limit of {most} bytes; send fewer")

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._cut)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut(self) -> None:
        self._timer = None
        if self._in_head and self._received_bytes:
            seconds = self.limits.receive_timeout_s
            self._reject(RequestTimeout(f"the request line and headers did not arrive within {seconds:g} s"))
        else:
            self.transport.close()

    def _reject(self, error: DynamoError) -> None:
        """Send an error and read no more from this connection."""
        self._rejected = True
        self._disarm()
        answering = self._answering
        if answering is not None and answering.response_complete and answering is self.cycle and not self._in_head:
            self._linger()  # the response was sent before the whole body arrived
            return
        if answering is not None and not answering.response_complete:
            if answering is not self.cycle or answering.response_started or self._in_head:
                self.transport.close()  # another response is being sent, which this error must not interrupt
                return
            answering.disconnected = True  # prevents a response of the app
            answering.message_event.set()
        response = to_response(error)
        body = orjson.dumps(response.body)
        headers = {**response.headers, "Content-Type": "application/json", "Content-Length": len(body)}
        lines = [f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in (headers | {"Connection": "close"}).items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        self._linger()

    def _linger(self) -> None:
        """Close the connection after the client has had time to read the error."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._timer = self.loop.call_later(_LINGER_S, self.transport.abort)
        else:
            self.transport.close()
