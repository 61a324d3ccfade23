"""Serve /live, /ready, /health and /metrics of a worker or a planner over HTTP.

Workers also have /sleep and /wake.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from dynamo_trtllm.protocol.shares import Shares, shares_object
from dynamo_trtllm.support.background import BackgroundTasks
from dynamo_trtllm.support.http_server.exchange import Handler, HttpRequest, HttpResponse
from dynamo_trtllm.support.http_server.limits import ConnectionLimits
from dynamo_trtllm.support.http_server.server import Guard, HttpServer, Route, Router
from dynamo_trtllm.support.network.addresses import is_loopback, shown_address
from dynamo_trtllm.support.network.listening import listen
from dynamo_trtllm.support.tls import ServerCertificate

log = logging.getLogger(__name__)

# Probes and scrapes are short, so idle connections are closed early to leave connections for them.
LIMITS = ConnectionLimits(
    max_connections=64,
    reserved_connections=16,
    max_header_bytes=16 << 10,
    receive_timeout_s=5.0,
    keep_alive_timeout_s=5.0,
    answer_timeout_s=5.0,
)


@dataclass(slots=True)
class Health:
    """Health of a worker or a planner. The process updates it, and the routes read it."""

    # One of: starting, loading, registering, serving, draining, asleep, waking, stopped.
    phase: str = "starting"
    # Why the worker is not ready, as text for users. While loading, the current step.
    reason: str = ""
    instance_id: str = ""  # hexadecimal, as in subjects and in `pairs` of a frontend's /health

    shares: Shares | None = None  # the current shares of an elastic worker
    # Since when the worker has these shares, in seconds since the epoch; None: since it registered.
    shares_since: float | None = None

    is_leader: bool | None = None  # whether a planner sets the shares; None for other processes

    failure: str = ""  # the failure that ends this worker
    # Returns why no request can arrive, such as a rejection by NATS; None: requests can arrive.
    why_unreachable: Callable[[], str | None] = lambda: None

    @property
    def why_not_ready(self) -> str:
        """Return the reason that users see; "" if there is none, or only the phase."""
        return self.failure or self.reason or self.why_unreachable() or ""

    @property
    def is_ready(self) -> bool:
        """Return True if a worker accepts requests, or a planner plans."""
        return self.phase == "serving" and not self.why_not_ready


Actions = Mapping[str, Callable[[], str]]


def _error_body(
    status: int, message: str, *, param: str | None = None, code: str, request_id: str
) -> Mapping[str, Any]:
    """Return the body of an error, in the same form as the frontend's errors."""
    error_type = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def _described(health: Health) -> dict[str, Any]:
    """Return the fields that only /health has."""
    status = "ready" if health.is_ready else "notready"
    about: dict[str, Any] = {"status": status, "phase": health.phase}
    if health.shares is not None:
        about |= shares_object(health.shares, health.shares_since)
    if health.is_leader is not None:
        about["is_leader"] = health.is_leader
    return about


def health_app(
    health: Health,
    render_metrics: Callable[[], bytes],
    actions: Actions | None = None,
    guard: Guard | None = None,
) -> Router:
    """Return the app.

    /live is 200 while the event loop runs, /ready and /health while the worker accepts requests.
    /health of an elastic worker also has its shares, and /health of a planner also says whether the
    planner leads.

    Args:
        health: health of the worker.
        render_metrics: returns the body of /metrics.
        actions: by path, functions that begin a change and return ""; or return why the change is
            impossible now. Only processes of this machine and senders with an API key may call
            these paths.
        guard: checks a request, and notes its sender if the sender has an API key.
    """

    async def live(_: HttpRequest, response: HttpResponse) -> None:
        response.send_json(200, {"status": "live"})

    def send(response: HttpResponse, about: dict[str, Any]) -> None:
        about["reason"] = health.why_not_ready
        about["instance_id"] = health.instance_id
        response.send_json(200 if health.is_ready else 503, about)

    async def ready(_: HttpRequest, response: HttpResponse) -> None:
        send(response, {"status": health.phase})

    async def report(_: HttpRequest, response: HttpResponse) -> None:
        send(response, _described(health))

    async def metrics(_: HttpRequest, response: HttpResponse) -> None:
        response.send(200, render_metrics(), "text/plain; version=0.0.4; charset=utf-8")

    def action_handler(begin: Callable[[], str]) -> Handler:
        async def change(request: HttpRequest, response: HttpResponse) -> None:
            # A page of another site can make a browser send requests to this machine. To such
            # requests, browsers add the header Origin.
            is_from_page = request.header(b"origin") is not None
            has_key = request.sender is not None
            if not has_key and (is_from_page or not is_loopback(request.client)):
                refusal = "this needs an API key, or a process of the worker's machine"
                response.send_json(403, {"reason": refusal})
                return
            obstacle = begin()
            status = 409 if obstacle else 202
            response.send_json(status, {"status": health.phase, "reason": obstacle})

        return change

    handlers = {"/live": live, "/ready": ready, "/health": report, "/metrics": metrics}
    routes = [Route("GET", path, handler) for path, handler in handlers.items()]
    if actions is not None:
        routes += [Route("POST", path, action_handler(begin)) for path, begin in actions.items()]
    return Router(routes, guard=guard)


@asynccontextmanager
async def health_server(
    host: str,
    port: int | None,
    app: Router,
    tasks: BackgroundTasks,
    certificate: ServerCertificate | None = None,
) -> AsyncIterator[int | None]:
    """Serve the health routes over HTTP while the context is open, and return the port.

    Args:
        host: address to listen on.
        port: None for no server, 0 for any free port.
        app: the result of `health_app`.
        tasks: owner of the server's task.
        certificate: the certificate of the server; None without TLS.
    """
    if port is None:
        yield None
        return
    with listen(host, port, setting="system") as sock:
        port = sock.getsockname()[1]
        server = HttpServer(
            app, LIMITS, error_form=_error_body, shutdown_s=1, certificate=certificate
        )
        task = tasks.start(server.serve(sock), "worker-health")
        scheme = "http" if certificate is None else "https"
        log.info("health at %s://%s", scheme, shown_address(host, port))
        try:
            yield port
        finally:
            tasks.release(task)
            server.stop()
            # An exception of the task is not raised: `BackgroundTasks` has reported it.
            await asyncio.gather(task, return_exceptions=True)
