"""Serves HTTP over real sockets, on both event loops, without and with TLS."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import pytest
import uvloop

from dynamo_trtllm.frontend.api.error_bodies import openai_error
from dynamo_trtllm.support.http_server.exchange import HttpRequest, HttpResponse
from dynamo_trtllm.support.http_server.limits import ConnectionLimits
from dynamo_trtllm.support.http_server.server import HttpServer
from dynamo_trtllm.support.tls import ServerCertificate
from tests.kit.certificates import client_context, shared_server_certificate
from tests.kit.waiting import SOON_S

LIMITS = ConnectionLimits(
    max_connections=10,
    reserved_connections=1,
    max_header_bytes=4096,
    receive_timeout_s=SOON_S,
    keep_alive_timeout_s=SOON_S,
    max_body_bytes=1 << 20,
)
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = bytes(32 << 20)  # more than the sockets' buffers hold
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_uses_tls = ContextVar("uses_tls", default=False)


_PLAIN = {"asyncio": (asyncio.new_event_loop, False), "uvloop": (uvloop.new_event_loop, False)}
_TRANSPORTS = _PLAIN | {"tls": (uvloop.new_event_loop, True)}
Test = Callable[..., Coroutine[Any, Any, None]]
Transports = Mapping[str, tuple[Callable[[], asyncio.AbstractEventLoop], bool]]


def on_both_loops(test: Test) -> Callable[..., None]:
    """Run a test on asyncio's loop, and on that of the processes."""
    return _parametrized(test, _PLAIN)


def on_all_transports(test: Test) -> Callable[..., None]:
    """Run a test on asyncio's loop, on that of the processes, and on that with TLS."""
    return _parametrized(test, _TRANSPORTS)


def _parametrized(test: Test, transports: Transports) -> Callable[..., None]:
    def run(transport: str, **given: Any) -> None:
        loop, uses_tls = transports[transport]

        async def over_transport() -> None:
            _uses_tls.set(uses_tls)
            await test(**given)

        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(over_transport())

    parameters = [inspect.Parameter("transport", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    parameters += inspect.signature(test).parameters.values()
    run.__name__ = test.__name__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.pytestmark = getattr(test, "pytestmark", [])  # type: ignore[attr-defined]
    return pytest.mark.parametrize("transport", transports)(run)


class Held:
    """A handler that answers when `go` is set."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, request: HttpRequest, response: HttpResponse) -> None:
        self.begun.set()
        await self.go.wait()
        response.send_json(200, {})


class Served:
    """A server that runs."""

    def __init__(self, server: HttpServer, task: asyncio.Task[None], port: int) -> None:
        self.server = server
        self.task = task
        self.port = port

    async def connect(self, data: bytes = b"") -> Client:
        context = client_context() if _uses_tls.get() else None
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=context)
        writer.write(data)
        return reader, writer


@asynccontextmanager
async def serving(
    handler: Any,
    shutdown_s: float = SOON_S,
    certificate: ServerCertificate | None = None,
    **limits: Any,
) -> AsyncIterator[Served]:
    """No connection and no task is left at the end."""
    if certificate is None and _uses_tls.get():
        certificate = shared_server_certificate()
    server = HttpServer(
        handler,
        replace(LIMITS, **limits),
        error_form=openai_error,
        shutdown_s=shutdown_s,
        certificate=certificate,
    )
    sock = socket.create_server(("127.0.0.1", 0))
    served = Served(server, asyncio.create_task(server.serve(sock)), sock.getsockname()[1])
    async with asyncio.timeout(SOON_S):
        yield served
        server.stop()
        await served.task
        await server.until_ended()
