"""A worker's own HTTP port: /live, /ready, /health, /metrics. Answers from the worker's state; decides nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dynamo_trtllm.background import BackgroundTasks
from dynamo_trtllm.http_server.connection import ConnectionLimits, HttpServer
from dynamo_trtllm.network.addresses import BACKLOG, listen, warn_if_exposed

_log = logging.getLogger(__name__)

# Probes and scrapes are short; connections that stay open without a request must not keep these out.
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
    """Where a worker is in its life. Written by the worker, read by the routes."""

    phase: str = "starting"  # starting, loading, serving, draining, stopped
    reason: str = ""  # why it is not fit to serve, for people; while loading, what it is doing
    instance_id: str = ""  # in hexadecimal, as in subjects and at a frontend's /health under `pairs`

    failure: str = ""  # what ends this worker

    @property
    def is_ready(self) -> bool:
        return self.phase == "serving" and not self.reason and not self.failure


def health_app(health: Health, render_metrics: Callable[[], bytes]) -> Starlette:
    """The routes. /live: the event loop runs; /ready and /health: 200 only while it takes requests."""

    async def live(_: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(_: Request) -> Response:
        body = {"status": health.phase, "reason": health.failure or health.reason, "instance_id": health.instance_id}
        return JSONResponse(body, status_code=200 if health.is_ready else 503)

    async def report(_: Request) -> Response:
        status = "ready" if health.is_ready else "notready"
        about = {"phase": health.phase, "reason": health.failure or health.reason, "instance_id": health.instance_id}
        body = {"status": status} | about
        return JSONResponse(body, status_code=200 if health.is_ready else 503)

    async def metrics(_: Request) -> Response:
        return Response(render_metrics(), media_type="text/plain; version=0.0.4")

    return Starlette(
        routes=[Route("/live", live), Route("/ready", ready), Route("/health", report), Route("/metrics", metrics)]
    )


class HealthServer:
    """Serves the routes while entered; does nothing when `port` is None. Port 0 takes a free one and logs it."""

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
        self._server = HttpServer(self._app, LIMITS, backlog=BACKLOG, shutdown_s=1)
        # `serve` would take the process's signals, which are the worker's
        self._task = self._tasks.start(self._server._serve([self._sock]), "worker-health")
        warn_if_exposed(self._host, self._sock.getsockname()[1], "read health and metrics", "--system-host")
        shown = "localhost" if self._host in _REACHED_AS_LOCALHOST else self._host
        _log.info("health at http://%s:%d", shown, self._sock.getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is None or self._task is None:
            return
        self._tasks.release(self._task)
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)  # a failure was reported already
        self._sock.close()  # uvicorn closed it, unless its task failed
