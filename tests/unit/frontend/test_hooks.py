"""Middleware and routes of a program: what they may do, and what a wrong one costs."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any
from unittest.mock import AsyncMock

import pytest

from dynamo_trtllm import ConfigError, Frontend, FrontendConfig, Refusal
from dynamo_trtllm import FrontendRequest as Request
from dynamo_trtllm import FrontendResponse as Response
from dynamo_trtllm.frontend.api.error_bodies import openai_error
from dynamo_trtllm.frontend.http.hooks import Hooks, Middleware, RouteHandler, import_hooks
from dynamo_trtllm.protocol.errors import Overloaded
from dynamo_trtllm.support.http_server.server import HttpServer
from tests.kit.cases import each_case
from tests.kit.frontend_app import FakeFrontend, ScriptedRouter
from tests.kit.memory_http import LIMITS, MemoryClient
from tests.kit.waiting import SOON_S

HANG_S = 0.05


def frontend(
    *middleware: Middleware,
    routes: Mapping[str, RouteHandler] | None = None,
    timeout_s: float = SOON_S,
    **config: Any,
) -> FakeFrontend:
    hooks = Hooks(middleware, routes, timeout_s)
    return FakeFrontend(ScriptedRouter([]), FrontendConfig(**config), hooks=hooks)


async def ask(
    served: FakeFrontend, line: str = "GET /v1/models", *headers: str, body: bytes = b""
) -> tuple[int, dict[str, str], Any]:
    """Return the status, the headers by name in lower case, and the JSON of the body."""
    limits = replace(LIMITS, keeps_all_headers=True)
    server = HttpServer(served.app, limits, error_form=openai_error, shutdown_s=0.0)
    client = MemoryClient(served.app, server=server)
    lines = [f"{line} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers, "", ""]
    client.send("\r\n".join(lines).encode() + body)
    async with asyncio.timeout(SOON_S):
        await client.until_answered()
    head, _, content = client.received.partition(b"\r\n\r\n")
    first, *others = head.decode().split("\r\n")
    pairs = [line.split(": ", 1) for line in others]
    return (
        int(first.split()[1]),
        {name.lower(): value for name, value in pairs},
        json.loads(content or b"null"),
    )


async def check_token(request: Request) -> Refusal | None:
    request.response_headers["X-Served-By"] = "me"
    if request.path.startswith("/v1/") and request.headers.get("x-token") != "right":
        return Refusal(401, "the token is wrong; send x-token", "wrong_token")
    return None


async def hello(request: Request) -> Response:
    return Response.json([request.path_params, request.query(), request.client, request.id])


async def echo(request: Request) -> Response:
    body = await request.body()
    assert await request.body() == body
    return Response(body, headers={"X-Size": str(len(body))})


async def test_refusal_of_middleware_has_the_form_of_the_api() -> None:
    served = frontend(check_token)
    status, headers, body = await ask(served, "POST /v1/chat/completions")
    assert (status, body["error"]["code"]) == (401, "wrong_token")
    assert body["error"]["type"] == "invalid_request_error"
    assert headers["x-served-by"] == "me"
    status, _, body = await ask(served, "POST /v1/messages")
    assert (status, body["type"], body["error"]["code"]) == (401, "error", "wrong_token")


@pytest.mark.parametrize(
    ("line", "status"), [("GET /v1/models", 200), ("GET /no/such", 404), ("PUT /v1/models", 405)]
)
async def test_middleware_when_it_returns_none_then_request_goes_on(line: str, status: int) -> None:
    answered, headers, _ = await ask(frontend(check_token), line, "X-Token: right")
    assert (answered, headers["x-served-by"]) == (status, "me")


async def test_middleware_is_not_called_for_preflights_of_browsers() -> None:
    served = frontend(check_token, routes={"PUT /own": echo}, cors_origins="*")
    status, headers, _ = await ask(
        served, "OPTIONS /v1/models", "Origin: http://a", "Access-Control-Request-Method: PUT"
    )
    assert status == 200
    assert "PUT" in headers["access-control-allow-methods"]


async def test_middleware_when_it_answers_then_no_later_one_is_called() -> None:
    async def answer(request: Request) -> Response:
        return Response(b'"first"')

    assert (await ask(frontend(answer, check_token)))[::2] == (200, "first")


async def test_route_has_parts_of_its_path_and_the_query() -> None:
    served = frontend(routes={"GET /hello/{name}": hello})
    status, headers, body = await ask(served, "GET /hello/you?a=1&a=2")
    request_id = headers["x-request-id"]
    assert (status, body) == (200, [{"name": "you"}, {"a": ["1", "2"]}, "127.0.0.1", request_id])
    assert (await ask(served, "HEAD /hello/you"))[0] == 200
    assert (await ask(served, "POST /hello/you"))[0] == 405


async def test_route_when_it_reads_a_body_then_within_the_limits() -> None:
    served = frontend(routes={"POST /echo": echo}, max_body_bytes=10, max_total_body_bytes=20)
    status, headers, body = await ask(served, "POST /echo", body=b'"hi"')
    assert (status, headers["x-size"], body) == (200, "4", "hi")
    status, _, body = await ask(served, "POST /echo", body=b'"too long..."')
    assert (status, body["error"]["code"]) == (413, "payload_too_large")
    assert "body_bytes 0.0" in served.metrics.render().decode()


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("GET /a/1", ["get", {"x": "1"}]),
        ("POST /a/1", ["post", {"y": "1"}]),
        ("GET /a/b", ["get", {"x": "b"}]),
        ("PUT /a/b", ["put", {}]),
        ("PATCH /a/b", ["patch", {"rest": "a/b"}]),
    ],
)
async def test_route_when_paths_overlap_then_the_method_decides(line: str, answer: Any) -> None:
    def named(name: str) -> RouteHandler:
        async def handler(request: Request) -> Response:
            return Response.json([name, request.path_params])

        return handler

    served = frontend(
        routes={
            "GET /a/{x}": named("get"),
            "POST /a/{y}": named("post"),
            "PUT /a/b": named("put"),
            "PATCH /{rest:path}": named("patch"),
        }
    )
    assert (await ask(served, line))[::2] == (200, answer)
    status, headers, _ = await ask(served, "DELETE /a/b")
    assert (status, headers["allow"]) == (405, "PUT, GET, POST, PATCH, HEAD")


async def test_route_for_any_path_gets_none_of_the_frontend() -> None:
    served = frontend(routes={"POST /{rest:path}": echo})
    assert (await ask(served, "POST /else"))[0] == 200
    assert (await ask(served, "POST /health"))[0] == 405


async def fail(request: Request) -> Response:
    raise ValueError("a secret")


async def exit_process(request: Request) -> Response:
    sys.exit(3)


async def cancel(request: Request) -> Response:
    raise asyncio.CancelledError


async def read_in_middleware(request: Request) -> None:
    await request.body()


class Unprintable(Exception):
    def __repr__(self) -> str:
        raise ValueError("no representation")


async def raise_unprintable(request: Request) -> None:
    raise Unprintable


async def raise_surrogate(request: Request) -> None:
    raise Overloaded("\ud800")


def returning(result: Any, **headers: Any) -> Callable[[Request], Awaitable[Any]]:
    async def hook(request: Request) -> Any:
        request.response_headers.update(headers)
        return result

    return hook


def response(**fields: Any) -> Response:
    """Return a response, also with fields of wrong types."""
    return Response(**fields)


def refusal(**fields: Any) -> Refusal:
    """Return a refusal, also with fields of wrong types."""
    return Refusal(**{"status": 400, "message": "no", "code": "no", **fields})


@pytest.mark.parametrize(
    ("hook", "logged"),
    [
        (fail, "hook fail raised ValueError('a secret')"),
        (exit_process, "called sys.exit(3)"),
        (cancel, "raised CancelledError()"),
        (read_in_middleware, "middleware can't read the body"),
        (raise_unprintable, "hook raise_unprintable raised <Unprintable>"),
        (returning(True), "returned bool; return a FrontendResponse or a Refusal"),
        (returning(Response(status=99)), "returned a FrontendResponse with status 99"),
        (returning(Response(status=204)), "returned a FrontendResponse with status 204"),
        (returning(Response(status=205)), "returned a FrontendResponse with status 205"),
        (returning(response(status=[200])), "a FrontendResponse with status [200]"),
        (returning(response(status=200.0)), "a FrontendResponse with status 200.0"),
        (returning(response(status=Unprintable())), "with status <Unprintable>"),
        (returning(response(body="text")), "returned a body of type str"),
        (returning(response(content_type=None)), "returned the content type None"),
        (returning(response(headers=None)), "set headers of type NoneType"),
        (returning(Response(content_type="a\r\nX: b")), "returned the content type"),
        (returning(Response(headers={"X": "a\r\nY: b"})), "set a header that is not valid"),
        (returning(Response(headers={"content-LENGTH": "1"})), "which the server writes itself"),
        (returning(Refusal(200, "no", "no")), "returned a Refusal with status 200"),
        (returning(refusal(status="400")), "returned a Refusal with status '400'"),
        (returning(refusal(message=None)), "a Refusal with a text of type NoneType"),
        (returning(refusal(message=b"no")), "a Refusal with a text of type bytes"),
        (returning(refusal(message="\ud800")), "which UTF-8 can't encode"),
        (returning(refusal(code=5)), "a Refusal with a text of type int"),
        (returning(refusal(code="\ud800")), "which UTF-8 can't encode"),
        (returning(None, a="\n"), "set a header that is not valid"),
        (returning(None, a=1), "set a header that is no text"),
    ],
)
async def test_hook_when_it_is_wrong_then_its_request_gets_500(
    hook: Middleware, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    served = frontend(hook)
    status, headers, body = await ask(served)
    assert (status, body["error"]["code"]) == (500, "hook_failed")
    assert "log says why" in body["error"]["message"]
    assert "secret" not in body["error"]["message"]
    assert headers["content-type"] == "application/json"
    assert logged in caplog.text
    assert 'hook_failures_total{code="hook_failed"} 1.0' in served.metrics.render().decode()


async def test_hook_whose_error_is_no_text_gives_its_request_500(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Nothing is logged, because processes of a test run can't pass such text on.
    with caplog.at_level(logging.CRITICAL, logger=Hooks.__module__):
        status, _, body = await ask(frontend(raise_surrogate))
    assert (status, body["error"]["code"]) == (500, "hook_failed")


async def test_route_when_it_fails_then_its_request_gets_500() -> None:
    served = frontend(routes={"GET /own": fail, "GET /none": returning(None)})
    for path in ("/own", "/none"):
        status, _, body = await ask(served, f"GET {path}")
        assert (status, body["error"]["code"]) == (500, "hook_failed")


async def test_hook_when_it_raises_a_dynamo_error_then_that_is_sent() -> None:
    async def overload(request: Request) -> None:
        raise Overloaded("later")

    status, headers, body = await ask(frontend(overload))
    assert (status, body["error"]["code"]) == (429, "overloaded")
    assert headers["retry-after"] == "1"


async def hang(request: Request) -> None:
    await asyncio.Event().wait()


async def ignore_cancel(request: Request) -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.Event().wait()


@pytest.mark.parametrize("hook", [hang, ignore_cancel])
async def test_hook_when_it_never_returns_then_its_request_gets_504(
    hook: Middleware, caplog: pytest.LogCaptureFixture
) -> None:
    served = frontend(hook, timeout_s=HANG_S)
    status, _, body = await ask(served)
    assert (status, body["error"]["code"]) == (504, "hook_timeout")
    assert f"hook {hook.__name__} did not return within" in caplog.text  # type: ignore[attr-defined]
    assert served.hooks is not None
    await served.hooks.aclose()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("hook ")]


async def test_hook_when_its_client_disconnects_then_it_is_cancelled() -> None:
    began = asyncio.Event()
    cancelled = asyncio.Event()

    async def wait(request: Request) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    client = MemoryClient(frontend(wait).app)
    client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(SOON_S):
        await began.wait()
        client.transport.close()
        await cancelled.wait()


class Callables:
    async def __call__(self, request: Request) -> None:
        return None

    async def method(self, request: Request) -> None:
        return None


async def two(first: str, request: Request) -> None:
    return None


@wraps(two)
async def adds_argument(request: Request) -> None:
    await two("a", request)


@pytest.mark.parametrize(
    "hook",
    [
        Callables(),
        Callables().method,
        partial(two, "a"),
        adds_argument,
        AsyncMock(return_value=None),
    ],
)
async def test_hook_when_it_is_any_async_callable_then_it_is_taken(hook: Middleware) -> None:
    assert (await ask(frontend(hook)))[0] == 200


async def without_parameters() -> None:
    return None


def not_async(request: Request) -> None:
    return None


@each_case(
    ("arguments", "message"),
    [
        ({"middleware": [not_async]}, "not an async function; define it with `async def`"),
        ({"middleware": ["module:name"]}, "not an async function"),
        ({"middleware": hello}, "a list of async functions"),
        ({"middleware": Unprintable()}, "middleware is <Unprintable>; pass a list"),
        ({"middleware": [Unprintable()]}, "<Unprintable> is not an async function"),
        ({"middleware": [Callables]}, "not an async function"),
        ({"middleware": [without_parameters]}, "define it like `async def hook"),
        ({"middleware": [two]}, "can't be called with a request .missing a required argument"),
        ({"routes": {"GET /a": without_parameters}}, "define it like `async def hook"),
        ({"routes": {5: hello}}, "route 5 is not a method and a path"),
        ({"routes": {b"GET /a": hello}}, "route b'GET /a' is not a method and a path"),
        ({"routes": {"GET /{a²}": hello}}, "is not a method and a path"),
        ({"routes": [hello]}, "a mapping of"),
        ({"routes": {"GET /a": not_async}}, "not an async function"),
        ({"routes": {"/a": hello}}, "is not a method and a path; write it like 'GET /hello'"),
        ({"routes": {"get /a": hello}}, "is not a method and a path"),
        ({"routes": {"GET a": hello}}, "is not a method and a path"),
        ({"routes": {"GET /{a}/{a}": hello}}, "is not a method and a path"),
        ({"routes": {"GET /a(": hello}}, "is not a method and a path"),
        ({"hook_timeout_s": 0}, "hook_timeout_s"),
        ({"hook_timeout_s": None}, "hook_timeout_s"),
        ({"hook_timeout_s": 86_401}, "a number of seconds above 0 and up to 86400"),
        ({"hook_timeout_s": 10**5000}, "hook_timeout_s is <int>; pass"),
    ],
)
def test_frontend_when_a_hook_is_wrong_then_it_says_what_to_do(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Frontend(FrontendConfig(), **arguments)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/models/mine", "/health", "/v1/models/{a}"]
)
def test_route_when_its_path_is_of_the_frontend_then_rejected(path: str) -> None:
    with pytest.raises(ConfigError, match="has a path of the frontend itself"):
        frontend(routes={f"GET {path}": hello})


def test_hooks_of_a_module_when_named_then_imported_again() -> None:
    hooks = Hooks([check_token], {"GET /hello": hello}, 2.0)
    assert import_hooks(json.loads(json.dumps(hooks.names()))) == {
        "middleware": [check_token],
        "routes": {"GET /hello": hello},
        "hook_timeout_s": 2.0,
    }


@pytest.mark.parametrize(
    "hook",
    [
        returning(None),
        Callables(),
        partial(two, "a"),
        wraps(check_token)(returning(None)),
    ],
    ids=["nested", "object", "partial", "wrapped"],
)
def test_hook_without_a_name_is_rejected_for_several_processes(hook: Middleware) -> None:
    with pytest.raises(ConfigError, match="move it to a module outside of the script"):
        Hooks([hook]).names()


def test_frontend_of_several_processes_checks_names_of_hooks() -> None:
    config = FrontendConfig(workers=2, http_host="127.0.0.1", http_port=0)
    with pytest.raises(ConfigError, match="move it to a module outside of the script"):
        Frontend(config, middleware=[returning(None)]).run()


def test_import_of_a_hook_that_is_gone_is_named() -> None:
    with pytest.raises(ConfigError, match="hook no_such:f can't be imported: ModuleNotFound"):
        import_hooks({"middleware": ["no_such:f"], "routes": {}, "hook_timeout_s": 1})
