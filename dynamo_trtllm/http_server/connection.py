"""The HTTP server, and the limits of a connection: how many, how large a request's head, how long it may take to come.

uvicorn has none of these for its fast parser. Bodies are limited where they are read (`http.read_body`).
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, ClassVar

import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.errors import DynamoError, HeadTooLarge, Overloaded, RequestTimeout
from dynamo_trtllm.http_server.errors import answer
from dynamo_trtllm.http_server.writer import WRITER, CycleWriter, HeldHead, Turn
from dynamo_trtllm.network.listening import Acceptor

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

_log = logging.getLogger(__name__)

_OTHER_FILES = 128  # log, etcd, NATS, model files, and refused connections that linger
_SHUTDOWN_S = 30  # longest wait for running requests after the first signal
_GRACE_S = 5.0  # for the answer to a body that came too slowly, before the connection is cut
_LINGER_S = 1.0  # for a refused client to read why: closed at once, what it still sends would wipe the answer out


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    max_connections: int
    max_header_bytes: int  # request line and headers
    receive_timeout_s: float  # for the head from its first byte (or the connection) on, then for the body


def http_server(app: ASGIApp, config: FrontendConfig, *, backlog: int) -> uvicorn.Server:
    """Listens nowhere yet. Lets this process have as many open files as it may have connections."""
    _allow_files(config.max_connections + _OTHER_FILES)
    limits = ConnectionLimits(
        max_connections=config.max_connections,
        max_header_bytes=config.max_header_bytes,
        receive_timeout_s=config.receive_timeout_s,
    )
    return HttpServer(
        uvicorn.Config(
            app,
            http=_protocol_with(limits),
            timeout_keep_alive=config.keep_alive_timeout_s,  # type: ignore[arg-type]  # goes to call_later
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # nothing asks for a client's address
            server_header=False,
            timeout_graceful_shutdown=_SHUTDOWN_S,
            backlog=backlog,
        )
    )


class HttpServer(uvicorn.Server):
    """Accepts through `Acceptor` at the sockets that it is given."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self.servers = [Acceptor(sock, self._make_protocol) for sock in sockets or ()]  # type: ignore[misc]

    def _make_protocol(self) -> asyncio.Protocol:
        protocol = self.config.http_protocol_class
        return protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore[call-arg]


def _allow_files(wanted: int) -> None:
    """One connection more than the system lets would wait unanswered, and nobody would know why."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        _log.warning(
            "the system lets this process have %d open files, too few for --max-connections: raise it (ulimit -n) to "
            "%d or lower --max-connections",
            most,
            wanted,
        )


def _protocol_with(limits: ConnectionLimits) -> type[LimitedProtocol]:
    """For uvicorn, which makes one per connection."""
    return type("Protocol", (LimitedProtocol,), {"limits": limits, "turn": Turn()})


class LimitedProtocol(HttpToolsProtocol):
    limits: ClassVar[ConnectionLimits]
    turn: ClassVar[Turn]

    _in_head = True  # or before it
    _received_bytes = 0  # of a head that is not complete
    _parsed_bytes = 0
    _refused = False
    _timer: asyncio.TimerHandle | None = None
    _answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self.connections.discard(self)
            self._refuse(
                Overloaded(f"{self.limits.max_connections} connections are open, the most this server has; try later")
            )
            return
        self._arm(self.limits.receive_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)
        # uvicorn tells only the newest request, which may wait behind this one
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_head:
            self._received_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._received_bytes > self.limits.max_header_bytes and not self._refused:
            self._refuse(self._too_large())

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
        self._in_head, self._received_bytes, self._parsed_bytes = False, 0, 0
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

    def send_400_response(self, msg: str) -> None:
        if self._parsed_bytes > self.limits.max_header_bytes:
            self._refuse(self._too_large())
        else:
            super().send_400_response(msg)

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
            self._refuse(RequestTimeout(f"the request's head did not come in {self.limits.receive_timeout_s:g} s"))
        else:
            self.transport.close()

    def _refuse(self, error: DynamoError) -> None:
        """Answers, and takes no more from this connection."""
        self._refused = True
        self._disarm()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # an earlier answer is on its way, and this one can't come into it
            return
        told = answer(error)
        body = orjson.dumps(told.body)
        headers = {**told.headers, "Content-Type": "application/json", "Content-Length": len(body)}
        lines = [f"HTTP/1.1 {told.status} {HTTPStatus(told.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in (headers | {"Connection": "close"}).items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._timer = self.loop.call_later(_LINGER_S, self.transport.abort)
        else:
            self.transport.close()
