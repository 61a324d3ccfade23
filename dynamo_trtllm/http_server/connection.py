"""The HTTP server, and the limits of a connection: how many, how large a request's head, how long it may take to come.

uvicorn has none of these for its fast parser. Bodies are limited where they are read (`http.read_body`).
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
from dynamo_trtllm.network.addresses import Acceptor, allow_files

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

_log = logging.getLogger(__name__)

_OTHER_FILES = 128  # log, etcd, NATS, model files, and refused connections that linger
_SHUTDOWN_S = 30  # longest wait for running requests after the first signal
_GRACE_S = 5.0  # for the answer to a body that came too slowly, before the connection is cut
_LINGER_S = 1.0  # for a refused client to read why: closed at once, what it still sends would wipe the answer out
_order = count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one server. One connection too many is refused with 429, unless it replaces another one."""

    max_connections: int
    max_header_bytes: int  # request line and headers
    receive_timeout_s: float  # for the head from its first byte (or the connection) on, then for the body
    keep_alive_timeout_s: float  # of an idle connection
    answer_timeout_s: float | None = None  # until the client has taken an answer; None: as long as the app allows
    closes_least_recent: bool = False  # one connection too many closes the one that has been silent for longest
    max_body_bytes: int = 0  # chunk sizes, extensions and trailers count where they exceed `max_header_bytes`


def http_server(app: ASGIApp, config: FrontendConfig, *, backlog: int) -> uvicorn.Server:
    """Listens nowhere yet. Lets this process have as many open files as it may have connections."""
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
    """Accepts through `Acceptor` at the sockets that it is given. Listens nowhere yet.

    `shutdown_s`: longest wait for running requests at shutdown.
    """

    def __init__(self, app: ASGIApp, limits: ConnectionLimits, *, backlog: int, shutdown_s: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=type("Protocol", (LimitedProtocol,), {"limits": limits, "turn": FlushBatch()}),
                timeout_keep_alive=limits.keep_alive_timeout_s,  # type: ignore[arg-type]  # goes to call_later
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,  # nothing asks for a client's address
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
            _log.debug("a client left while it was accepted: %s", exc)

    def _relieve(self) -> bool:
        return self._limits.closes_least_recent and _close_least_recent(self.server_state.connections)

    def _make_protocol(self) -> asyncio.Protocol:
        protocol = self.config.http_protocol_class
        return protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore[call-arg]


def _close_least_recent(connections: set[Any]) -> bool:
    """Close the connection whose last request, or opening, was longest ago. Return whether there was one."""
    if not connections:
        return False
    oldest: LimitedProtocol = min(connections, key=lambda each: each.last_activity)
    connections.discard(oldest)
    oldest.transport.abort()  # not `close`, which waits until the client has taken what was written
    return True


class LimitedProtocol(HttpToolsProtocol):
    """One connection; uvicorn makes it."""

    limits: ClassVar[ConnectionLimits]
    turn: ClassVar[FlushBatch]

    last_activity = 0  # rank among the connections by when it was opened or when its newest request's head was complete
    _in_head = True  # or before it
    _received_bytes = 0  # of a head that is not complete
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
                self._reject(Overloaded(f"{most} connections are open, the most this server has; try later"))
                return
            _close_least_recent(self.connections)
        self._arm(self.limits.receive_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._disarm_answer()
        super().connection_lost(exc)
        # uvicorn tells only the newest request, which may wait behind this one
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
        """The client's time is over: end the connection unless the answer was sent."""
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
                    f"the request body is larger than {self.limits.max_body_bytes} bytes, chunk sizes, extensions and "
                    "trailers included"
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
        self.scope["state"][WRITER] = CycleWriter(self.cycle, self.turn)
        if self.scope["method"] != "HEAD":
            self.cycle.transport = HeldHead(self.cycle, self.transport)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._disarm()
        super().on_message_complete()

    def _parsed(self, num_bytes: int) -> None:
        self._parsed_bytes += num_bytes
        if self._parsed_bytes > self.limits.max_header_bytes:
            raise self._too_large()  # the parser stops, and tells `send_400_response`

    def _check_version(self) -> None:
        """Raises InvalidRequest, which stops the parser."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise InvalidRequest(f"HTTP/{version} is not supported; send HTTP/1.1 requests")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (version == "1.1" and not hosts):
            raise InvalidRequest(f"the request has {hosts} Host headers; HTTP/1.1 requests must have one")

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn while it handles the parser's error, whose cause may be one of ours."""
        exc = sys.exception()
        cause = exc and exc.__context__
        self._reject(cause if isinstance(cause, DynamoError) else InvalidRequest("the request is not valid HTTP/1.1"))

    # --- the end ---------------------------------------------------------------------------------------

    def _too_large(self) -> HeadTooLarge:
        return HeadTooLarge(f"the request's head is larger than {self.limits.max_header_bytes} bytes")

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
            self._reject(RequestTimeout(f"the request's head did not come in {self.limits.receive_timeout_s:g} s"))
        else:
            self.transport.close()

    def _reject(self, error: DynamoError) -> None:
        """Answers, and takes no more from this connection."""
        self._rejected = True
        self._disarm()
        answering = self._answering
        if answering is not None and answering.response_complete and answering is self.cycle and not self._in_head:
            self._linger()  # it was answered before all of its body arrived
            return
        if answering is not None and not answering.response_complete:
            if answering is not self.cycle or answering.response_started or self._in_head:
                self.transport.close()  # another answer is being sent, which this one must not interrupt
                return
            answering.disconnected = True  # the app sends no answer of its own
            answering.message_event.set()
        response = to_response(error)
        body = orjson.dumps(response.body)
        headers = {**response.headers, "Content-Type": "application/json", "Content-Length": len(body)}
        lines = [f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in (headers | {"Connection": "close"}).items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        self._linger()

    def _linger(self) -> None:
        """Close the connection when the client has had time to read."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._timer = self.loop.call_later(_LINGER_S, self.transport.abort)
        else:
            self.transport.close()
