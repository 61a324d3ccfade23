"""Run the HTTP server of a frontend or worker.

The server accepts connections within limits, routes requests and ends gracefully.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import re
import socket
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final, NamedTuple, TypeAlias

from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.protocol.counted import counted
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.http_status import ErrorForm
from dynamo_trtllm.support.background import wait_for_first
from dynamo_trtllm.support.http_server.answer_headers import (
    is_allowed,
    origin_headers,
    request_id_of,
)
from dynamo_trtllm.support.http_server.connection import HttpConnection
from dynamo_trtllm.support.http_server.connection_group import ConnectionGroup
from dynamo_trtllm.support.http_server.exchange import Handler, HttpRequest, HttpResponse
from dynamo_trtllm.support.http_server.limits import ConnectionLimits
from dynamo_trtllm.support.http_server.tls_transport import TlsTransport
from dynamo_trtllm.support.network.listening import ACCEPTS_PER_TURN, Acceptor
from dynamo_trtllm.support.tls import ServerCertificate

log = logging.getLogger(__name__)

ENGINE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # safe in logs, keys and subjects
# Idle connections that are closed if there is no file descriptor for another one.
_NUM_RELIEVED: Final = 16
# A longer unknown path gets no suggestion: the comparison would cost more than the request.
_MAX_COMPARED_CHARS: Final = 64
_MIN_SIMILARITY: Final = 0.8

_NO_FORMS: Final[Mapping[str, ErrorForm]] = {}
_NO_HANDLERS: Final[Mapping[str, Handler]] = {}

Guard: TypeAlias = Callable[[HttpRequest, HttpResponse], None]


class Route(NamedTuple):
    """A handler of one method of one path.

    In the path, {x} is a part without slashes, and {x:path} any text.
    """

    method: str
    path: str
    handler: Handler


class _RouteTable:
    """Finds handlers by method and path. A path without parameters comes before those with some."""

    def __init__(self, routes: Sequence[Route]) -> None:
        by_path: dict[str, dict[str, Handler]] = {}
        for route in routes:
            by_path.setdefault(route.path, {})[route.method] = route.handler
        self._exact: dict[str, Mapping[str, Handler]] = {}
        self._patterns: list[tuple[re.Pattern[str], Mapping[str, Handler]]] = []
        for path, methods in by_path.items():
            if "{" in path:
                self._patterns.append((path_pattern(path), methods))
            else:
                self._exact[path] = methods

    def find(self, request: HttpRequest) -> tuple[Handler | None, Set[str]]:
        """Return the first handler of a request, and set its path parameters.

        Without a handler of the method, return the methods of all paths that match.
        """
        method = "GET" if request.method == "HEAD" else request.method
        methods = self._exact.get(request.path, _NO_HANDLERS)
        if method in methods:
            return methods[method], methods.keys()
        allowed = dict.fromkeys(methods)
        for pattern, methods in self._patterns:
            match = pattern.fullmatch(request.path)
            if match is None:
                continue
            if method in methods:
                request.path_params = match.groupdict()
                return methods[method], methods.keys()
            allowed |= dict.fromkeys(methods)
        return None, allowed.keys()

    def near(self, path: str) -> str | None:
        """Return the path without parameters that a client probably meant; None if none is near.

        It may lack the version (/chat/completions), or have a typing error.
        """
        if len(path) > _MAX_COMPARED_CHARS:
            return None
        with_version = f"/v1{path}"
        if with_version in self._exact:
            return with_version
        found = difflib.get_close_matches(path, self._exact, n=1, cutoff=_MIN_SIMILARITY)
        return found[0] if found else None


class Router:
    """The handler of all requests. Routes of GET serve HEAD, too."""

    def __init__(
        self,
        routes: Sequence[Route],
        hint: str = "",
        origins: Set[str] = frozenset(),
        error_forms: Mapping[str, ErrorForm] = _NO_FORMS,
        guard: Guard | None = None,
        before: Handler | None = None,
        added: Sequence[Route] = (),
    ) -> None:
        """Create the router. The first route whose path and method match decides.

        Args:
            routes: the routes.
            hint: ends the error for an unknown path that is not like a known one.
            origins: browsers let pages of these origins call this server (CORS); "*": pages of all.
            error_forms: the form of errors, by the beginning of the path. Others have that of the
                server.
            guard: is called first, with requests for unknown paths, too. If it raises a
                DynamoError, that is the answer.
            before: is called with every request after that, also for unknown paths, before its
                handler. The handler is left out if `before` has answered.
            added: routes of a program, for paths that match none of `routes` with any method.
        """
        self.routes = routes
        self._guard = guard
        self._before = before
        self._hint = hint
        self._origins = origins
        self._error_forms = error_forms
        self._allowed_methods = ", ".join(sorted({route.method for route in [*routes, *added]}))
        self._table = _RouteTable(routes)
        self._added = _RouteTable(added)

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
                # Clients of such an API read the id from this header.
                response.headers["Request-Id"] = response.request_id
        if self._origins and self._answer_origin(request, response):
            return
        try:
            request.headers.check_repeated()
            if self._guard is not None:
                self._guard(request, response)
        except DynamoError as error:
            response.send_error(error)
            return
        if self._before is not None:
            try:
                await self._before(request, response)
            except DynamoError as error:
                response.send_error(error)
            if response.started:
                return
        handler, methods = self._table.find(request)
        if not methods:
            handler, methods = self._added.find(request)
        about = f"{request.method} {request.path}"
        if not methods:
            near = self._table.near(request.path)
            hint = self._hint if near is None else f"; did you mean {near}?"
            message = f"not found: {about}{hint}"
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
        response.headers |= origin_headers(origin, self._origins)
        if not is_allowed(origin, self._origins):
            return False
        if request.method != "OPTIONS" or request.header(b"access-control-request-method") is None:
            return False
        wanted = request.header(b"access-control-request-headers")
        headers = {
            "Access-Control-Allow-Methods": self._allowed_methods,
            "Access-Control-Allow-Headers": wanted or "*",
            "Access-Control-Max-Age": "600",
        }
        response.send(200, b"", "text/plain", headers)
        return True


def _body(response: HttpResponse, status: int, message: str, code: str) -> Mapping[str, Any]:
    return response.error_form(status, message, code=code, request_id=response.request_id)


def path_pattern(path: str) -> re.Pattern[str]:
    """Return the pattern of a path with parameters."""
    pattern = re.sub(r"{(\w+):path}", r"(?P<\1>.*)", path.replace(".", r"\."))
    return re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", pattern), re.DOTALL)


def set_request_id(request: HttpRequest, response: HttpResponse) -> None:
    """Take the id of a request from `X-Request-Id`, or generate one.

    Add it to the response and the log lines.
    """
    request_id = request_id_of(request.headers)
    # The id is never reset: the server logs exceptions in this task, which serves no other request.
    observe_logging.request_id.set(request_id)
    request.id = request_id if ENGINE_ID.fullmatch(request_id) else ""
    response.request_id = request_id
    response.headers["X-Request-Id"] = request_id


class HttpServer(ConnectionGroup):
    """A server that runs `handler` for each request.

    Args:
        handler: runs the requests.
        limits: of the connections.
        error_form: the form of errors, unless the handler sets another one.
        shutdown_s: the longest wait for running requests at shutdown.
        certificate: that of the server, which then speaks TLS.
        origins: the origins whose pages may read errors that the handler does not send (CORS).
    """

    def __init__(
        self,
        handler: Handler,
        limits: ConnectionLimits,
        *,
        error_form: ErrorForm,
        shutdown_s: float,
        certificate: ServerCertificate | None = None,
        origins: Set[str] = frozenset(),
    ) -> None:
        super().__init__(handler, limits, error_form, origins)
        self._certificate = certificate
        self._shutdown_s = shutdown_s
        self._num_connecting = 0  # accepted connections that are not open yet
        self._stopped = asyncio.Event()
        self._interrupted = asyncio.Event()

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
        # At most an eighth of the connections is new in a turn of the loop. So a connection is open
        # for a few turns before others replace it, and its request is read.
        accepts_per_turn = max(1, min(ACCEPTS_PER_TURN, self.max_open // 8))
        acceptor = Acceptor(sock, self._connect, self._relieve, accepts_per_turn)
        try:
            try:
                await self._stopped.wait()
            finally:
                acceptor.close()
                sock.close()
            self.drain()
            await wait_for_first(
                self.until_ended(), self._interrupted.wait(), timeout_s=self._shutdown_s
            )
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
            log.error("cancelled %s %s", counted(len(running), "request"), reason)
            for request in running:
                request.cancel()
        await asyncio.gather(acceptor.wait_closed(), *running, return_exceptions=True)
        for connection in list(self.open):
            connection.abort()
        self.hangups.close()

    async def _connect(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._num_connecting += 1
        try:
            await loop.connect_accepted_socket(self._new_protocol, connection)
        except OSError as exc:
            connection.close()
            log.debug("client disconnected while it was accepted: %s", exc)
        finally:
            self._num_connecting -= 1

    def _new_protocol(self) -> asyncio.BufferedProtocol:
        """Return what receives the bytes of a new connection."""
        connection = HttpConnection(self)
        if self._certificate is None:
            return connection
        return TlsTransport(self, connection, self._certificate)

    def _relieve(self) -> bool:
        """Close some idle connections. Return False if there is none."""
        # Many connections of one client may have been accepted in this iteration. Until they are
        # open and count as idle, those of other clients would be closed for them.
        if self._num_connecting:
            return True
        num_closed = 0
        while num_closed < _NUM_RELIEVED and self.evict_idlest():
            num_closed += 1
        return num_closed > 0
