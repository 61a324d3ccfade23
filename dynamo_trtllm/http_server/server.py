"""Run the HTTP server of a frontend or worker.

It accepts connections within limits, routes requests and ends gracefully.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from dynamo_trtllm.background import first_of
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.errors import DynamoError, Overloaded
from dynamo_trtllm.http_server.connection import HttpConnection
from dynamo_trtllm.http_server.errors import ErrorForm
from dynamo_trtllm.http_server.exchange import FlushBatch, Handler, HttpRequest, HttpResponse
from dynamo_trtllm.http_server.hangup_watch import HangupWatch
from dynamo_trtllm.http_server.parsing_turns import ParsingTurns
from dynamo_trtllm.http_server.request_head import LargeHeads
from dynamo_trtllm.network.by_network import ByNetwork
from dynamo_trtllm.network.listening import ACCEPTS_PER_TURN, Acceptor, allow_files
from dynamo_trtllm.observability import logging as observe_logging

ECHOED_ID = re.compile(r"[\x21-\x7e]{1,128}")
ENGINE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # safe in logs, keys and subjects


_NO_FORMS: Final[Mapping[str, ErrorForm]] = {}


class Route(NamedTuple):
    """A handler of one method of one path.

    In the path, {x} is a part without slashes, and {x:path} any text.
    """

    method: str
    path: str
    handler: Handler


class Router:
    """The handler of all requests. Routes of GET serve HEAD, too."""

    def __init__(
        self,
        routes: Sequence[Route],
        hint: str = "",
        origins: Set[str] = frozenset(),
        error_forms: Mapping[str, ErrorForm] = _NO_FORMS,
    ) -> None:
        """Create the router. The first path that matches decides.

        Args:
            routes: the routes.
            hint: ends the error for an unknown path.
            origins: browsers let pages of these origins call this server (CORS); "*": pages of all.
            error_forms: the form of errors, by the beginning of the path. Others have OpenAI's.
        """
        self.routes = routes
        self._hint = hint
        self._origins = origins
        self._error_forms = error_forms
        by_path: dict[str, dict[str, Handler]] = {}
        for route in routes:
            by_path.setdefault(route.path, {})[route.method] = route.handler
        self._exact: dict[str, Mapping[str, Handler]] = {}
        self._patterns: list[tuple[re.Pattern[str], Mapping[str, Handler]]] = []
        for path, methods in by_path.items():
            if "{" in path:
                self._patterns.append((_compile(path), methods))
            else:
                self._exact[path] = methods

    async def __call__(self, request: HttpRequest, response: HttpResponse) -> None:
        """Give the request an id, and run its handler.

        Answers the handler's errors, unknown paths and unknown methods with an error response.

        Raises:
            DynamoError: the handler failed after it had started the response.
        """
        set_request_id(request, response)
        for beginning, form in self._error_forms.items():
            if request.path.startswith(beginning):
                response.error_form = form
                response.headers["Request-Id"] = response.request_id  # as its clients name it
        if self._origins and self._answer_origin(request, response):
            return
        methods = self._exact.get(request.path) or self._match(request)
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        about = f"{request.method} {request.path}"
        if not methods:
            message = f"not found: {about}{self._hint}"
            response.send_json(404, _body(response, 404, message, "unknown_url"))
        elif handler is None:
            message = f"{request.method} is not allowed on {request.path}"
            body = _body(response, 405, message, "method_not_allowed")
            allowed = [*methods, "HEAD"] if "GET" in methods else methods
            response.send_json(405, body, {"Allow": ", ".join(allowed)})
        else:
            try:
                await handler(request, response)
            except DynamoError as error:
                if response.started:
                    raise
                response.send_error(error)

    def _answer_origin(self, request: HttpRequest, response: HttpResponse) -> bool:
        """Add the headers for an allowed origin to the response.

        Return True for a preflight, which is answered.
        """
        origin = request.header(b"origin")
        # This is sent without the other headers, too: a cache must not return them to others.
        response.headers["Vary"] = "Origin"
        if origin is None or not self._origins & {"*", origin}:
            return False
        allowed = "*" if "*" in self._origins else origin
        response.headers |= {
            "Access-Control-Allow-Origin": allowed,
            "Access-Control-Expose-Headers": "*",
        }
        if request.method != "OPTIONS" or request.header(b"access-control-request-method") is None:
            return False
        wanted = request.header(b"access-control-request-headers")
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": wanted or "*",
            "Access-Control-Max-Age": "600",
        }
        response.send(200, b"", "text/plain", headers)
        return True

    def _match(self, request: HttpRequest) -> Mapping[str, Handler]:
        for pattern, methods in self._patterns:
            if match := pattern.fullmatch(request.path):
                request.path_params = match.groupdict()
                return methods
        return {}


def _body(response: HttpResponse, status: int, message: str, code: str) -> Mapping[str, Any]:
    return response.error_form(status, message, code=code, request_id=response.request_id)


def _compile(path: str) -> re.Pattern[str]:
    """Return the pattern of a path with parameters."""
    pattern = re.sub(r"{(\w+):path}", r"(?P<\1>.*)", path.replace(".", r"\."))
    return re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", pattern), re.DOTALL)


log = logging.getLogger(__name__)

# of a frontend, beyond those that run requests: four times ACCEPTS_PER_TURN
RESERVED_CONNECTIONS = 256
# log, etcd, NATS, model files, and connections accepted or closed in this turn of the event loop
_OTHER_FILES = 256
# the most that is received from a connection before others have their turn
_RECEIVE_BYTES = 16 << 10
# idle connections that are closed if there is no file descriptor for another one
_NUM_RELIEVED = 16
_LOG_EVERY_S = 10.0
_SHUTDOWN_S = 30  # longest wait for running requests after the first signal


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The limits of one server.

    At most `max_connections` run requests; further requests get 429, unless they ask for the health
    of the process. `reserved_connections` more may be open, so there are always idle ones. A
    further connection replaces one of these.
    """

    max_connections: int
    reserved_connections: int
    max_header_bytes: int  # request line and headers
    # for the head from its first byte (or the connection) on, then for the body
    receive_timeout_s: float
    keep_alive_timeout_s: float  # of an idle connection
    # until the client has read a response; None: no limit here
    answer_timeout_s: float | None = None
    # includes chunk sizes, extensions and trailers beyond `max_header_bytes`
    max_body_bytes: int = 0
    max_large_head_bytes: int = 32 << 20  # of all request heads together that are large


def set_request_id(request: HttpRequest, response: HttpResponse) -> None:
    """Take the id of a request from `X-Request-Id`, or generate one.

    Add it to the response and the log lines.
    """
    given = request.header(b"x-request-id") or ""
    request_id = given if ECHOED_ID.fullmatch(given) else secrets.token_hex(16)
    # It is never reset: the server logs exceptions in this task, which serves no other request.
    observe_logging.request_id.set(request_id)
    request.id = request_id if ENGINE_ID.fullmatch(request_id) else ""
    response.request_id = request_id
    response.headers["X-Request-Id"] = request_id


def http_server(handler: Handler, config: FrontendConfig) -> HttpServer:
    """Create the server, which does not serve yet.

    The limit of open files is raised to fit its connections. If that many files are not allowed,
    the server has fewer connections.
    """
    wanted = config.max_connections + RESERVED_CONNECTIONS + _OTHER_FILES
    files = allow_files(wanted, ", or lower --max-connections")
    for_connections = max(files - _OTHER_FILES, files // 2)
    reserved = min(RESERVED_CONNECTIONS, for_connections // 4)
    # The settings have the names of the limits.
    configured = config.model_dump(include=set(ConnectionLimits.__dataclass_fields__))
    limits = ConnectionLimits(reserved_connections=reserved, **configured)
    if limits.max_connections > for_connections - reserved:
        limits = replace(limits, max_connections=for_connections - reserved)
    return HttpServer(handler, limits, shutdown_s=_SHUTDOWN_S)


class HttpServer:
    """A server that runs `handler` for each request, and the state that its connections share.

    Args:
        shutdown_s: the longest wait for running requests at shutdown.
    """

    def __init__(self, handler: Handler, limits: ConnectionLimits, *, shutdown_s: float) -> None:
        self.handler = handler
        self.limits = limits
        self._shutdown_s = shutdown_s
        self.batch = FlushBatch()
        self.open: set[HttpConnection] = set()
        # Those of `open` that may be closed to accept others, because they run no request. Some
        # receive one.
        self.idle = ByNetwork[HttpConnection]()
        self.large_heads = LargeHeads(limits.max_large_head_bytes)
        self.parsing_turns = ParsingTurns()
        self.hangups = HangupWatch()
        self.receive_buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self.tasks: set[asyncio.Task[None]] = set()  # of running handlers
        self.is_draining = False
        self.changed = asyncio.Event()  # set when a connection or a task has ended
        self._max_open = limits.max_connections + limits.reserved_connections
        self._evicted = 0  # idle connections, since the last log line about them
        self._logged_at_s = -math.inf
        self._stopped = asyncio.Event()
        self._interrupted = asyncio.Event()

    def admit(self, connection: HttpConnection) -> None:
        """Add a connection that was opened.

        If there are too many, close the idlest of the client that has most.
        """
        if len(self.open) >= self._max_open:
            self._evict_idlest()
        self.open.add(connection)
        self.idle.add(connection)

    def remove(self, connection: HttpConnection) -> None:
        """Forget a connection that has ended. A second call does nothing."""
        self.open.discard(connection)
        self.idle.discard(connection)
        self.large_heads.release(connection)
        self.changed.set()

    def check_capacity(self) -> None:
        """Check that a request may run on one more connection. Raises Overloaded."""
        if self._num_running >= self.limits.max_connections:
            raise Overloaded(
                f"the server runs requests on {self._num_running} connections, its limit; try again"
                " later"
            )

    def mark_running(self, connection: HttpConnection) -> None:
        """Keep a connection open while it runs a request, unless too many run one already."""
        if self._num_running < self.limits.max_connections:
            self.idle.discard(connection)

    def mark_idle(self, connection: HttpConnection) -> None:
        """Let other connections replace this one, whose request has ended.

        It is the least idle one now.
        """
        self.idle.add(connection)

    @property
    def _num_running(self) -> int:
        return len(self.open) - len(self.idle)

    def _evict_idlest(self) -> bool:
        """Close an idle connection. Return False if there is none."""
        network = self.idle.largest()
        if network is None:
            return False
        self.idle.oldest(network).evict()
        self._evicted += 1
        now_s = time.monotonic()
        if now_s >= self._logged_at_s + _LOG_EVERY_S:
            text = (
                "closed %d idle connections to accept others, the last one of client %s; %d are"
                " open, of at most %d"
            )
            log.warning(text, self._evicted, network, len(self.open), self._max_open)
            self._evicted = 0
            self._logged_at_s = now_s
        return True

    def drain(self) -> None:
        """Close connections after their responses.

        Idle ones are closed when a request on its way has had time to arrive.
        """
        self.is_draining = True
        for connection in list(self.open):
            connection.drain()

    async def until_ended(self) -> None:
        """Wait until there is no connection and no task."""
        while self.open or self.tasks:
            self.changed.clear()
            await self.changed.wait()

    def stop(self) -> None:
        """Accept no more connections, and end `serve` after the running requests."""
        self._stopped.set()

    def interrupt(self) -> None:
        """Do what `stop` does.

        A second call, or one after `stop`, ends `serve` without waiting for requests.
        """
        if self._stopped.is_set():
            self._interrupted.set()
        self._stopped.set()

    async def serve(self, sock: socket.socket) -> None:
        """Serve on a listening socket until `stop`.

        Closes the socket. If cancelled, it ends all requests at once.
        """
        # With fewer, a connection is open for a few turns of the loop before others replace it, so
        # its request is read.
        accepts_per_turn = max(1, min(ACCEPTS_PER_TURN, self._max_open // 8))
        acceptor = Acceptor(sock, self._connect, self._relieve, accepts_per_turn)
        try:
            try:
                await self._stopped.wait()
            finally:
                acceptor.close()
                sock.close()
            self.drain()
            await first_of(self.until_ended(), self._interrupted.wait(), timeout_s=self._shutdown_s)
        finally:
            await self._end(acceptor)

    async def _end(self, acceptor: Acceptor) -> None:
        """Cancel the requests that still run, and close all connections."""
        running = list(self.tasks)
        if running:
            if self._interrupted.is_set():
                reason = "at the second signal"
            elif self._stopped.is_set():
                reason = f"that had not ended within {self._shutdown_s:g} s"
            else:
                reason = "because the server was cancelled"
            log.error("cancelled %d requests %s", len(running), reason)
            for request in running:
                request.cancel()
        await asyncio.gather(acceptor.wait_closed(), *running, return_exceptions=True)
        for connection in list(self.open):
            connection.abort()
        self.hangups.close()

    async def _connect(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: HttpConnection(self), connection)
        except OSError as exc:
            connection.close()
            log.debug("client disconnected while it was accepted: %s", exc)

    def _relieve(self) -> bool:
        """Close some idle connections. Return False if there is none."""
        num_closed = 0
        while num_closed < _NUM_RELIEVED and self._evict_idlest():
            num_closed += 1
        return num_closed > 0
