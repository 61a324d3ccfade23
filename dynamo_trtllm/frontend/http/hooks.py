"""Middleware and routes that a program adds to its frontend."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from importlib import import_module
from operator import attrgetter
from typing import Any, Final, TypeAlias

from dynamo_trtllm.protocol.errors import ConfigError, DynamoError, HookFailed, HookTimeout
from dynamo_trtllm.protocol.http_status import retry_headers
from dynamo_trtllm.protocol.sanitize import shown
from dynamo_trtllm.support.http_server.exchange import (
    JSON,
    ClientDisconnected,
    HttpRequest,
    HttpResponse,
)
from dynamo_trtllm.support.http_server.server import Route, path_pattern

log = logging.getLogger(__name__)

HOOK_TIMEOUT_S: Final = 30.0
_MAX_TIMEOUT_S: Final = 86_400  # a day: no client waits longer
# Longest wait for cancelled calls when the frontend ends.
_END_S: Final = 1.0
_ROUTE: Final = re.compile(
    r"(GET|POST|PUT|PATCH|DELETE) ((/[\w.~-]*|/\{[A-Za-z_][A-Za-z0-9_]*(:path)?\})+)"
)
_PARAMETER: Final = re.compile(r"\{(\w+)")
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE: Final = re.compile(r"[\t\x20-\x7e\xa0-\xff]*")
# The server writes these headers itself, so hooks must not set them.
_SERVER_HEADERS: Final = frozenset(
    {"connection", "content-length", "content-type", "date", "transfer-encoding", "x-request-id"}
)
_WITHOUT_BODY: Final = frozenset({204, 205, 304})
# The statuses that a response of a hook may have.
_STATUSES: Final = frozenset(
    status.value for status in HTTPStatus if status >= 200 and status not in _WITHOUT_BODY
)

ReadBody: TypeAlias = Callable[[], Awaitable[bytes]]
# Returns a context in which the body of a request can be read. The body counts in the limits of
# bodies until the context ends.
OpenBody: TypeAlias = Callable[[HttpRequest], AbstractContextManager[ReadBody]]


class FrontendRequest:
    """A request, as middleware and routes see it.

    Attributes:
        id: id of the request, as in `X-Request-Id` of the response and in log lines.
        response_headers: headers that middleware adds to the response, also to one with an error.
    """

    __slots__ = ("_body", "_headers", "_read_body", "_request", "id", "response_headers")

    def __init__(self, request: HttpRequest, request_id: str, read_body: ReadBody | None) -> None:
        """Create the view of a request.

        Args:
            request: the request.
            request_id: the id of the request.
            read_body: reads the body of the request. None for middleware, which can't read it.
        """
        self.id = request_id
        self.response_headers: dict[str, str] = {}
        self._request = request
        self._read_body = read_body
        self._body: bytes | None = None
        self._headers: dict[str, str] | None = None

    @property
    def method(self) -> str:
        """The method, such as `POST`."""
        return self._request.method

    @property
    def path(self) -> str:
        """The path, decoded and without the query."""
        return self._request.path

    @property
    def path_params(self) -> Mapping[str, str]:
        """The parts of the path that `{name}` in a route stands for."""
        return self._request.path_params

    @property
    def client(self) -> str:
        """The IP address of the client, or of the proxy before it."""
        return self._request.client

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers by name in lower case. A repeated header has its first value."""
        if self._headers is None:
            pairs = self._request.headers.pairs()
            self._headers = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in pairs
            }
        return self._headers

    def query(self) -> dict[str, list[str]]:
        """Return the values of each query parameter."""
        return self._request.query()

    async def body(self) -> bytes:
        """Return the body. Only routes can read it: middleware runs before it has arrived.

        Raises:
            DynamoError: the body is too large, or arrives too slowly. If the route does not catch
                this error, the client gets it as the response.
        """
        if self._read_body is None:
            raise RuntimeError("middleware can't read the body of a request; a route can")
        if self._body is None:
            self._body = await self._read_body()
        return self._body


@dataclass(frozen=True, slots=True)
class FrontendResponse:
    """A response of middleware or of a route."""

    body: bytes = b""  # the complete body
    # Status of a response with a body, so not 1xx, 204, 205 or 304.
    status: int = 200
    content_type: str = "application/json"  # content type of the body
    headers: Mapping[str, str] = field(default_factory=dict)  # further headers

    @classmethod
    def json(
        cls, value: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> FrontendResponse:
        """Return a response with a value as JSON."""
        return cls(json.dumps(value).encode(), status, JSON, headers or {})


@dataclass(frozen=True, slots=True)
class Refusal:
    """A response with an error, in the form of the API that the client uses."""

    status: int  # 400 or higher
    message: str  # what is wrong, and what to do
    code: str  # names the kind of error for programs
    headers: Mapping[str, str] = field(default_factory=dict)  # further headers


Middleware: TypeAlias = Callable[[FrontendRequest], Awaitable[FrontendResponse | Refusal | None]]
RouteHandler: TypeAlias = Callable[[FrontendRequest], Awaitable[FrontendResponse | Refusal]]


class Hooks:
    """The middleware and routes of one frontend, which it calls within a time limit."""

    def __init__(
        self,
        middleware: Sequence[Middleware] = (),
        routes: Mapping[str, RouteHandler] | None = None,
        timeout_s: float = HOOK_TIMEOUT_S,
    ) -> None:
        """Check the hooks.

        Args:
            middleware: is called for each request, in this order, until one answers.
            routes: the routes by method and path.
            timeout_s: longest time of a call.

        Raises:
            ConfigError: an argument has a wrong type, a hook is no async function of a request, or
                the path of a route is wrong.
        """
        _check_arguments(middleware, routes, timeout_s)
        self._middleware = tuple(middleware)
        self._routes = dict(routes or {})
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Task[object]] = set()  # the tasks of the calls that run
        self._count_failure: Callable[[str], None] = lambda code: None
        for hook in self._middleware:
            _check_hook(hook, "middleware")
        for method_and_path, handler in self._routes.items():
            _check_hook(handler, "routes")
            _check_route(method_and_path)

    def __bool__(self) -> bool:
        return bool(self._middleware or self._routes)

    def count_failures(self, count: Callable[[str], None]) -> None:
        """Call `count` with the error code of each call that fails from now on."""
        self._count_failure = count

    def route_list(self, own_routes: Sequence[Route], open_body: OpenBody) -> list[Route]:
        """Return the routes of the program for the frontend's router.

        Args:
            own_routes: the frontend's own routes.
            open_body: returns the context in which a route reads the body of its request.

        Raises:
            ConfigError: a route of the program has a path of the frontend.
        """
        routes = []
        for method_and_path, handler in self._routes.items():
            method, path = method_and_path.split(" ")
            if any(path_pattern(route.path).fullmatch(path) for route in own_routes):
                raise ConfigError(
                    f"route {method_and_path!r} has a path of the frontend itself; choose another"
                    " one",
                    field="routes",
                )
            routes.append(Route(method, path, partial(self._answer, handler, open_body)))
        return routes

    async def before(self, request: HttpRequest, response: HttpResponse) -> None:
        """Call the middleware, until one has answered the request.

        Raises:
            HookFailed: a hook failed.
            HookTimeout: a hook took too long.
            DynamoError: a hook raised this error.
            ClientDisconnected: the client has disconnected.
        """
        view = FrontendRequest(request, response.request_id, None)
        for hook in self._middleware:
            result = await self._call(hook, view, response)
            problem = _header_problem(view.response_headers)
            if problem:
                raise self._failed(hook, problem)
            response.headers.update(view.response_headers)
            if result is not None:
                self._send(hook, result, response)
                return

    async def _answer(
        self,
        handler: RouteHandler,
        open_body: OpenBody,
        request: HttpRequest,
        response: HttpResponse,
    ) -> None:
        """Answer a request with a route. Raises what `before` raises."""
        with open_body(request) as read_body:
            view = FrontendRequest(request, response.request_id, read_body)
            result = await self._call(handler, view, response)
        self._send(handler, result, response)

    async def _call(
        self, hook: Callable[..., Any], view: FrontendRequest, response: HttpResponse
    ) -> object:
        """Return the result of a hook.

        A hook that takes too long is cancelled. The hook may ignore its cancellation, so this
        method does not wait for its end.
        """
        task = asyncio.get_running_loop().create_task(_run(hook, view), name=f"hook {_name(hook)}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            response.cancel_on_disconnect()
            await asyncio.wait([task], timeout=self._timeout_s)
            response.continue_on_disconnect()
            if task.done():
                return self._result(hook, task)
        finally:
            task.cancel()
        self._count_failure(HookTimeout.code)
        log.error("hook %s did not return within %g s", _name(hook), self._timeout_s)
        raise HookTimeout(
            f"{_name(hook)} of this server did not return within {self._timeout_s:g} s; try again"
            " later"
        )

    def _result(self, hook: Callable[..., Any], task: asyncio.Task[object]) -> object:
        """Return the result of a call that has ended, or raise its error.

        A ClientDisconnected is raised as it is, and so is a DynamoError whose texts can be sent.
        Any other error becomes HookFailed.
        """
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return task.result()
        if isinstance(error, ClientDisconnected):
            raise error
        if isinstance(error, DynamoError):
            problem = _text_problem(error.message) or _text_problem(error.field or "")
            if not problem:
                raise error
        raise self._failed(hook, f"raised {shown(error)}", error) from error

    def _failed(
        self, hook: Callable[..., Any], problem: str, cause: BaseException | None = None
    ) -> HookFailed:
        """Log and count a failed call. Return its error, which tells clients no details."""
        self._count_failure(HookFailed.code)
        log.error("hook %s %s", _name(hook), problem, exc_info=cause)
        return HookFailed(f"{_name(hook)} of this server failed; the server's log says why")

    def _send(self, hook: Callable[..., Any], result: object, response: HttpResponse) -> None:
        """Send the response of a hook. Raises HookFailed if `result` is not a response."""
        problem = _response_problem(result)
        if problem:
            raise self._failed(hook, problem)
        if isinstance(result, Refusal):
            body = response.error_form(
                result.status, result.message, code=result.code, request_id=response.request_id
            )
            headers = {**retry_headers(result.status), **result.headers}
            response.send_json(result.status, body, headers)
        elif isinstance(result, FrontendResponse):
            response.send(result.status, result.body, result.content_type, result.headers)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: a call that took too long is logged already

    async def aclose(self) -> None:
        """End the calls that still run."""
        running = list(self._tasks)
        if not running:
            return
        for task in running:
            task.cancel()
        _, pending = await asyncio.wait(running, timeout=_END_S)
        for task in pending:
            log.error("%s ignores its cancellation and still runs", task.get_name())

    def names(self) -> dict[str, Any]:
        """Return the names of the hooks, and their time limit.

        In another process, `import_hooks` imports the hooks by these names.

        Raises:
            ConfigError: another process can't import a hook.
        """
        return {
            "middleware": [_importable_name(hook) for hook in self._middleware],
            "routes": {
                method_and_path: _importable_name(handler)
                for method_and_path, handler in self._routes.items()
            },
            "hook_timeout_s": self._timeout_s,
        }


def import_hooks(names: Mapping[str, Any]) -> dict[str, Any]:
    """Import the hooks of another process. Return them as arguments of `Frontend`.

    Args:
        names: what `Hooks.names` has returned in the other process.

    Raises:
        ConfigError: a hook can't be imported.
    """
    return {
        "middleware": [_imported(name) for name in names["middleware"]],
        "routes": {
            method_and_path: _imported(name) for method_and_path, name in names["routes"].items()
        },
        "hook_timeout_s": names["hook_timeout_s"],
    }


def _importable_name(hook: Callable[..., Any]) -> str:
    """Return the module and the name of a function, by which other processes can import it.

    Raises ConfigError if they can't.
    """
    module = str(getattr(hook, "__module__", None))
    name = str(getattr(hook, "__qualname__", None))
    imported = None
    if module != "__main__":
        with suppress(ConfigError):
            imported = _imported(f"{module}:{name}")
    if imported is not hook:
        raise ConfigError(
            f"hook {_name(hook)} is not a function of an importable module, which several frontend"
            " processes need; move it to a module outside of the script, or use workers=1",
            field="workers",
        )
    return f"{module}:{name}"


def _imported(name: str) -> Any:
    """Return an object by its name, `module:name`. Raises ConfigError if there is none."""
    module, _, attribute = name.partition(":")
    try:
        return attrgetter(attribute)(import_module(module))
    except Exception as exc:
        # A module of the program may raise anything.
        raise ConfigError(
            f"hook {name} can't be imported: {exc!r}; repair its module, or put it on PYTHONPATH",
            field="workers",
        ) from exc


async def _run(hook: Callable[..., Any], view: FrontendRequest) -> object:
    try:
        return await hook(view)
    except SystemExit as exc:
        # A SystemExit would end the event loop and with it the frontend.
        raise RuntimeError(f"it called sys.exit({exc.code!r})") from exc


def _name(hook: Callable[..., Any]) -> str:
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return str(name).replace("<locals>.", "")


def _check_arguments(middleware: object, routes: object, timeout_s: object) -> None:
    """Raise ConfigError if an argument has a wrong type."""
    if not isinstance(middleware, Sequence):
        raise ConfigError(
            f"middleware is {shown(middleware)}; pass a list of async functions", field="middleware"
        )
    if not isinstance(routes, Mapping | None):
        raise ConfigError(
            f"routes is {shown(routes)}; pass a mapping of 'GET /path' to async functions",
            field="routes",
        )
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise ConfigError(
            f"hook_timeout_s is {shown(timeout_s)}; pass a number of seconds above 0 and up to"
            f" {_MAX_TIMEOUT_S}",
            field="hook_timeout_s",
        )


def _check_hook(hook: Any, argument: str) -> None:
    """Raise ConfigError unless a hook is an async function, or an object that is called as one.

    It must take a request as its only argument.
    """
    # A call of the hook runs `__call__` of its type. `hook.__call__` may be another method: if the
    # hook is a class, its call creates an object.
    call = getattr(type(hook), "__call__", None)  # noqa: B004 - looks at the method
    if not (inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(call)):
        raise ConfigError(
            f"{argument}: {shown(hook)} is not an async function; define it with `async def`",
            field=argument,
        )
    try:
        # The parameters of a decorator's wrapper count, not those of the function that it wraps.
        inspect.signature(hook, follow_wrapped=False).bind("request")
    except (TypeError, ValueError) as exc:
        raise ConfigError(
            f"{argument}: {shown(hook)} can't be called with a request ({exc}); define it like"
            " `async def hook(request)`",
            field=argument,
        ) from exc


def _check_route(method_and_path: object) -> None:
    """Raise ConfigError unless this is a method and a path with parameters of different names."""
    if isinstance(method_and_path, str) and _ROUTE.fullmatch(method_and_path):
        names = _PARAMETER.findall(method_and_path)
        if len(set(names)) == len(names):
            return
    raise ConfigError(
        f"route {shown(method_and_path)} is not a method and a path; write it like 'GET /hello' or"
        " 'POST /hello/{name}'",
        field="routes",
    )


def _response_problem(result: object) -> str:
    """Return why the result of a hook can't be sent; "" if it can."""
    if not isinstance(result, FrontendResponse | Refusal):
        return f"returned {type(result).__name__}; return a FrontendResponse or a Refusal"
    lowest = 400 if isinstance(result, Refusal) else 200
    status = result.status
    if not isinstance(status, int) or status not in _STATUSES or status < lowest:
        return f"returned a {type(result).__name__} with status {shown(status)}"
    if isinstance(result, Refusal):
        problem = _text_problem(result.message) or _text_problem(result.code)
        if problem:
            return f"returned a Refusal with {problem}"
    else:
        if not isinstance(result.body, bytes):
            return f"returned a body of type {type(result.body).__name__}, not bytes"
        content_type = result.content_type
        if not isinstance(content_type, str) or not _HEADER_VALUE.fullmatch(content_type):
            return f"returned the content type {shown(content_type)}"
    return _header_problem(result.headers)


def _text_problem(text: object) -> str:
    """Return why a text of an error can't be sent; "" if it can."""
    if not isinstance(text, str):
        return f"a text of type {type(text).__name__}, not str"
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"the text {shown(text)}, which UTF-8 can't encode"
    return ""


def _header_problem(headers: object) -> str:
    """Return why headers of a response can't be sent; "" if they can."""
    if not isinstance(headers, Mapping):
        return f"set headers of type {type(headers).__name__}, not a mapping"
    for name, value in headers.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            return f"set a header that is no text: {shown(name)}: {shown(value)}"
        if name.lower() in _SERVER_HEADERS:
            return f"set the header {name}, which the server writes itself"
        if not (_HEADER_NAME.fullmatch(name) and _HEADER_VALUE.fullmatch(value)):
            return f"set a header that is not valid: {name!r}: {value!r}"
    return ""
