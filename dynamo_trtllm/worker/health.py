"""Serve a worker's health and metrics over HTTP: /live, /ready, /health, /metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from dynamo_trtllm.background import BackgroundTasks
from dynamo_trtllm.http_server.exchange import HttpRequest, HttpResponse
from dynamo_trtllm.http_server.server import ConnectionLimits, HttpServer, Route, Router
from dynamo_trtllm.network.listening import listen, warn_if_exposed

log = logging.getLogger(__name__)

# Probes and scrapes are short, so idle connections are closed early to leave connections for them.
LIMITS = ConnectionLimits(
    max_connections=64,
    max_header_bytes=16 << 10,
    receive_timeout_s=5.0,
    keep_alive_timeout_s=5.0,
    answer_timeout_s=5.0,
    closes_least_recent=True,
)
_REACHED_AS_LOCALHOST = ("0.0.0.0", "::", "127.0.0.1")


@dataclass(slots=True)
class Health:
    """Health of a worker. The worker updates it and the routes read it."""

    phase: str = "starting"  # starting, loading, serving, draining, stopped
    reason: str = ""  # why the worker is not ready, as text for users; while loading, the current step
    instance_id: str = ""  # hexadecimal, as in subjects and in `pairs` of a frontend's /health

    failure: str = ""  # the failure that ends this worker

    @property
    def is_ready(self) -> bool:
        """Return True if the worker accepts requests."""
        return self.phase == "serving" and not self.reason and not self.failure


def health_app(health: Health, render_metrics: Callable[[], bytes]) -> Router:
    """Return the app. /live is 200 while the event loop runs, /ready and /health while the worker accepts requests."""

    async def live(_: HttpRequest, response: HttpResponse) -> None:
        response.send_json(200, {"status": "live"})

    async def ready(_: HttpRequest, response: HttpResponse) -> None:
        body = {"status": health.phase, "reason": health.failure or health.reason, "instance_id": health.instance_id}
        response.send_json(200 if health.is_ready else 503, body)

    async def report(_: HttpRequest, response: HttpResponse) -> None:
        status = "ready" if health.is_ready else "notready"
        about = {"phase": health.phase, "reason": health.failure or health.reason, "instance_id": health.instance_id}
        response.send_json(200 if health.is_ready else 503, {"status": status} | about)

    async def metrics(_: HttpRequest, response: HttpResponse) -> None:
        response.send(200, render_metrics(), "text/plain; version=0.0.4; charset=utf-8")

    handlers = {"/live": live, "/ready": ready, "/health": report, "/metrics": metrics}
    return Router([Route("GET", path, handler) for path, handler in handlers.items()])


class HealthServer:
    """HTTP server of the health routes while its context is open. Port None: no server. Port 0: any free port."""

    def __init__(
        self,
        host: str,
        port: int | None,
        health: Health,
        render_metrics: Callable[[], bytes],
        tasks: BackgroundTasks,
    ) -> None:
        """`tasks` owns the server's task."""
        self._tasks = tasks
        self._host = host
        self._port = port
        self._app = health_app(health, render_metrics)
        self._server: HttpServer | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> HealthServer:
        if self._port is None:
            return self
        self._sock = listen(self._host, self._port, setting="system")
        self._server = HttpServer(self._app, LIMITS, shutdown_s=1)
        self._task = self._tasks.start(self._server.serve(self._sock), "worker-health")
        warn_if_exposed(self._host, self._sock.getsockname()[1], "read health and metrics", "--system-host")
        shown = "localhost" if self._host in _REACHED_AS_LOCALHOST else self._host
        log.info("health at http://%s:%d", shown, self._sock.getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is None or self._task is None:
            return
        self._tasks.release(self._task)
        self._server.stop()
        await asyncio.gather(self._task, return_exceptions=True)  # `BackgroundTasks` has reported a failure
        self._sock.close()  # the server closed it, unless its task failed
