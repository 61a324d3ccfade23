"""Run the HTTP server of a frontend or a worker: accept connections within limits, route requests, end gracefully."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import socket
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from dynamo_trtllm.background import first_of
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.http_server.connection import HttpConnection
from dynamo_trtllm.http_server.errors import ErrorForm
from dynamo_trtllm.http_server.exchange import FlushBatch, Handler, HttpRequest, HttpResponse
from dynamo_trtllm.network.listening import Acceptor, allow_files
from dynamo_trtllm.observability import logging as observe_logging

ECHOED_ID = re.compile(r"[\x21-\x7e]{1,128}")
ENGINE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # safe in logs, keys and subjects


_NO_FORMS: Final[Mapping[str, ErrorForm]] = {}


class Route(NamedTuple):
    """A handler of one method of one path. In the path, {x} is a part without slashes, and {x:path} any text."""

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
        self._exact = {path: methods for path, methods in by_path.items() if "{" not in path}
        self._patterns = [(_compile(path), methods) for path, methods in by_path.items() if "{" in path]

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
        """Add the headers for an allowed origin to the response. Return True for a preflight, which is answered."""
        origin = request.header(b"origin")
        response.headers["Vary"] = "Origin"  # also without these headers: a cache must not return them to others
        if origin is None or not self._origins & {"*", origin}:
            return False
        allowed = "*" if "*" in self._origins else origin
        response.headers |= {"Access-Control-Allow-Origin": allowed, "Access-Control-Expose-Headers": "*"}
        if request.method != "OPTIONS" or request.header(b"access-control-request-method") is None:
            return False
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": request.header(b"access-control-request-headers") or "*",
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

_OTHER_FILES = 128  # log, etcd, NATS, model files, and rejected connections that linger
_SHUTDOWN_S = 30  # longest wait for running requests after the first signal


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


def set_request_id(request: HttpRequest, response: HttpResponse) -> None:
    """Take the id of a request from `X-Request-Id`, or generate one. Add it to the response and the log lines."""
    given = request.header(b"x-request-id") or ""
    request_id = given if ECHOED_ID.fullmatch(given) else secrets.token_hex(16)
    # It is never reset: the server logs exceptions in this task, which serves no other request.
    observe_logging.request_id.set(request_id)
    request.id = request_id if ENGINE_ID.fullmatch(request_id) else ""
    response.request_id = request_id
    response.headers["X-Request-Id"] = request_id


def http_server(handler: Handler, config: FrontendConfig) -> HttpServer:
    """Create the server, which does not serve yet, and raise the limit of open files to fit its connections."""
    allow_files(config.max_connections + _OTHER_FILES, ", or lower --max-connections")
    configured = config.model_dump(include=set(ConnectionLimits.__dataclass_fields__))  # they have the same names
    return HttpServer(handler, ConnectionLimits(**configured), shutdown_s=_SHUTDOWN_S)


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
        self.tasks: set[asyncio.Task[None]] = set()  # of running handlers
        self.is_draining = False
        self.changed = asyncio.Event()  # set when a connection or a task has ended
        self._stopped = asyncio.Event()
        self._interrupted = asyncio.Event()

    def close_least_recent(self) -> bool:
        """Close the connection whose last request or opening is oldest. Return False if there is no connection."""
        if not self.open:
            return False
        oldest = min(self.open, key=lambda each: each.last_activity)
        self.open.discard(oldest)
        oldest.abort()  # `close` would wait until the client has read all data
        return True

    def drain(self) -> None:
        """Close connections after their responses, and idle ones when a request on its way has had time to arrive."""
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
        """Do what `stop` does; a second call, or one after `stop`, ends `serve` without waiting for requests."""
        if self._stopped.is_set():
            self._interrupted.set()
        self._stopped.set()

    async def serve(self, sock: socket.socket) -> None:
        """Serve on a listening socket until `stop`. Closes the socket. If cancelled, it ends all requests at once."""
        acceptor = Acceptor(sock, self._connect, self._relieve)
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
        if running := list(self.tasks):
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

    async def _connect(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: HttpConnection(self), connection)
        except OSError as exc:
            connection.close()
            log.debug("client disconnected while it was accepted: %s", exc)

    def _relieve(self) -> bool:
        return self.limits.closes_least_recent and self.close_least_recent()
