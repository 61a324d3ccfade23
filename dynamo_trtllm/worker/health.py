"""A worker's own HTTP port: /live, /ready, /health, /metrics. Answers from the worker's state; decides nothing."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dynamo_trtllm.errors import ConfigError

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Health:
    """Where a worker is in its life. Written by the worker, read by the routes."""

    phase: str = "starting"  # starting, loading, serving, draining, stopped
    reason: str = ""  # why it is not fit to serve, for people; while loading, what it is doing

    @property
    def is_ready(self) -> bool:
        return self.phase == "serving" and not self.reason


def health_app(health: Health, render_metrics: Callable[[], bytes]) -> Starlette:
    """The routes. /live: the event loop runs; /ready and /health: 200 only while it takes requests."""

    async def live(_: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(_: Request) -> Response:
        return JSONResponse({"status": health.phase}, status_code=200 if health.is_ready else 503)

    async def report(_: Request) -> Response:
        body = {"status": "ready" if health.is_ready else "notready", "phase": health.phase, "reason": health.reason}
        return JSONResponse(body, status_code=200 if health.is_ready else 503)

    async def metrics(_: Request) -> Response:
        return Response(render_metrics(), media_type="text/plain; version=0.0.4")

    return Starlette(
        routes=[Route("/live", live), Route("/ready", ready), Route("/health", report), Route("/metrics", metrics)]
    )


class HealthServer:
    """Serves the routes while entered; does nothing when `port` is None. Port 0 takes a free one and logs it.

    It listens on every interface, because probes and scrapers come from outside; the routes only read.
    """

    def __init__(self, port: int | None, health: Health, render_metrics: Callable[[], bytes]) -> None:
        self._port = port
        self._app = health_app(health, render_metrics)
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> HealthServer:
        if self._port is None:
            return self
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("0.0.0.0", self._port))
        except OSError as exc:
            sock.close()
            raise ConfigError(
                f"--system-port {self._port} is in use; choose another or 0", field="system_port"
            ) from exc
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app, ws="none", log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
            )
        )
        # `serve` would take the process's signals, which are the worker's
        self._task = asyncio.create_task(self._server._serve([sock]), name="worker-health")
        _log.info("health at http://localhost:%d", sock.getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        await self._task
