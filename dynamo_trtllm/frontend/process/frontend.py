"""A frontend: it answers status requests at once, while the rest loads.

This module imports only what the first answer needs. `run_app` imports the rest and is loaded in a
thread.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import logging
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dynamo_trtllm.access.access_control import AccessControl
from dynamo_trtllm.access.key_usage import UsageTable
from dynamo_trtllm.config.load import process_environment
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.config.value_errors import check_settings_type
from dynamo_trtllm.frontend.http.frontend_server import frontend_server
from dynamo_trtllm.frontend.http.hooks import HOOK_TIMEOUT_S, Hooks, Middleware, RouteHandler
from dynamo_trtllm.protocol.errors import ConfigError, Draining, EngineNotReady
from dynamo_trtllm.protocol.http_status import retry_headers
from dynamo_trtllm.support.background import cancel_all
from dynamo_trtllm.support.garbage_collection import tune_gc
from dynamo_trtllm.support.http_server.exchange import Handler, HttpRequest, HttpResponse
from dynamo_trtllm.support.http_server.server import HttpServer, set_request_id
from dynamo_trtllm.support.lifecycle import Lifecycle
from dynamo_trtllm.support.network.addresses import host_and_port, http_url
from dynamo_trtllm.support.network.listening import listen, warn_if_exposed
from dynamo_trtllm.support.tls import ServerCertificate, server_certificate

if TYPE_CHECKING:
    from dynamo_trtllm.frontend.process.control_pipe import ControlPipe

log = logging.getLogger(__name__)

# The parameters of mallopt(3), from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

# The answers to status requests while the rest of the frontend is loaded.
_STARTING = "this frontend is starting"
_EMPTY_LISTS: dict[str, object] = dict.fromkeys(
    ("endpoints", "instances", "pairs", "mismatched", "rejected_records"), ()
)
_ZERO_COUNTS = {"num_instances": {}, "num_pairs": 0, "num_quarantined": 0}
_EARLY_ANSWERS = {
    "/live": (200, {"status": "live"}),
    "/ready": (503, {"status": "loading", "reason": _STARTING}),
    "/health": (200, {"status": "loading", **_EMPTY_LISTS, **_ZERO_COUNTS, "message": _STARTING}),
}


class StartupGate:
    """The handler of a starting frontend. Requests wait until `open` or `close` is called, once.

    Status requests are answered at once. All other requests need the models: without the models,
    the answer would be 404.
    """

    def __init__(self) -> None:
        self._app: Handler | None = None
        self._opened_or_closed = asyncio.Event()

    def open(self, app: Handler) -> None:
        """Forward all requests to `app`, including those that wait."""
        self._app = app
        self._opened_or_closed.set()

    def close(self) -> None:
        """Answer the waiting requests with a retryable error. Does nothing if the gate is open."""
        self._opened_or_closed.set()

    async def __call__(self, request: HttpRequest, response: HttpResponse) -> None:
        """Answer the request at once, or after `open` or `close`. Raises ClientDisconnected."""
        set_request_id(request, response)
        if (
            self._app is None
            and request.path in _EARLY_ANSWERS
            and request.method in ("GET", "HEAD")
        ):
            status, body = _EARLY_ANSWERS[request.path]
            response.send_json(status, body, retry_headers(status))
            return
        response.cancel_on_disconnect()
        await self._opened_or_closed.wait()
        response.continue_on_disconnect()  # the app sets what a disconnect does
        if self._app is None:
            response.send_error(Draining("this frontend failed to start; see its log"))
        else:
            await self._app(request, response)


class Frontend(Lifecycle):
    """An OpenAI-compatible HTTP frontend, in this process.

    Use it with `async with`, or run `serve()` in a task; or call `run()` in a program that does
    nothing else. Only `run` handles signals and changes settings of the process.
    """

    def __init__(
        self,
        config: FrontendConfig,
        *,
        middleware: Sequence[Middleware] = (),
        routes: Mapping[str, RouteHandler] | None = None,
        hook_timeout_s: float = HOOK_TIMEOUT_S,
        sock: socket.socket | None = None,
        pipe: ControlPipe | None = None,
        usage: UsageTable | None = None,
    ) -> None:
        """Create the frontend, which does nothing yet.

        Args:
            config: its settings.
            middleware: async functions that are called for each request, in this order. Each may
                answer it, by returning a FrontendResponse or a Refusal instead of None, and may add
                headers to its response.
            routes: async functions that answer requests, by method and path, such as
                "GET /hello/{name}".
            hook_timeout_s: longest time in seconds of each call of middleware or of a route.
            sock: a listening socket to serve on, which the frontend closes. Default: it listens on
                `http_host` and `http_port`.
            pipe: leads to the parent, if this process is one of several on the port. When the
                parent ends, the frontend stops.
            usage: counts what API keys use in all processes on the port. Default: what they use in
                this process is counted.

        Raises:
            ConfigError: `config` is no FrontendConfig, middleware or a route is no async function,
                or a path is wrong.
        """
        super().__init__()
        check_settings_type(config, FrontendConfig)
        self._config = config
        self._hooks = Hooks(middleware, routes, hook_timeout_s)
        self._sock = sock
        self._pipe = pipe
        self._usage = usage
        self._server: HttpServer | None = None
        self._url: str | None = None
        self._has_own_notice = False  # a signal has announced the stop
        self._owns_process = False  # True: nothing but this frontend runs in the process

    @property
    def url(self) -> str:
        """The URL at which this machine reaches the frontend. The API is below `{url}/v1`.

        Raises:
            EngineNotReady: the frontend does not listen yet; await `ready()`.
        """
        if self._url is None:
            raise EngineNotReady("this frontend does not listen yet; await ready() first")
        return self._url

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT, in the main thread only. Return the exit status.

        With `workers` in the settings, start that many processes. If middleware or a route does not
        end, the process exits after 30 s, or 5 s after a second SIGINT.

        Raises:
            ConfigError: the configuration is invalid.
            Unreachable: NATS or etcd does not answer.
            RuntimeError: this is not the main thread, or the thread runs an event loop already.
        """
        self._prepare_run()
        config = self._config
        config.check_exposure()
        if config.workers > 1:
            from dynamo_trtllm.frontend.process.process_group import ProcessGroup, reserve_port

            with reserve_port(config) as reserved:
                _warn_if_exposed(config, reserved)
                # The processes read these files, too. Reading them here first reports an error
                # once, before any process starts.
                AccessControl(config)
                server_certificate(config.tls_files)
                port = reserved.getsockname()[1]
                hooks = self._hooks.names() if self._hooks else None
                group = ProcessGroup(config, port, process_environment(), hooks)
                return asyncio.run(group.run())
        self._run_loop(self.serve_with_signals())
        return 0

    async def serve_with_signals(self) -> None:
        """Serve until SIGTERM, SIGINT or SIGHUP, in a process of its own.

        Raises what `serve` raises.
        """
        self._owns_process = True
        _tune_malloc()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stop)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        loop.add_signal_handler(signal.SIGUSR1, self._announce_stop)
        self._stop_on_hangup()
        await self.serve()

    def _announce_stop(self) -> None:
        """Answer `/ready` with 503 from now on, and all other requests as before."""
        if not self._has_own_notice:
            log.info("this frontend will be stopped, so /ready answers 503; it still serves")
        self._has_own_notice = True

    def _is_stop_announced(self) -> bool:
        return self._has_own_notice or (self._pipe is not None and self._pipe.is_stop_announced)

    def _interrupt(self) -> None:
        """Stop. From the second call on, do not wait for running requests."""
        if self._is_stopped:
            self._force_exit()
        self.stop()
        if self._server is not None:
            self._server.interrupt()

    async def _serve(self) -> None:
        config = self._config
        is_one_of_several = self._pipe is not None
        if config.workers > 1 and not is_one_of_several:
            raise ConfigError(
                f"workers={config.workers} starts several processes, which only run() and the"
                " command line do; use one of them, or workers=1",
                field="workers",
            )
        # A caller that passes a socket has decided who can connect to it.
        if self._sock is None:
            config.check_exposure()
        access = AccessControl(config, self._usage)
        certificate = server_certificate(config.tls_files)
        sock = self._sock or listen(config.http_host, config.http_port, is_shared=is_one_of_several)
        with sock:
            if not is_one_of_several:
                _warn_if_exposed(config, sock)
            host, port = sock.getsockname()[:2]
            self._url = http_url(host, port, "", uses_tls=certificate is not None)
            await self._serve_on(sock, access, certificate)

    async def _serve_on(
        self, sock: socket.socket, access: AccessControl, certificate: ServerCertificate | None
    ) -> None:
        """Serve on a listening socket until stopped. Raise the error of a task that has failed."""
        gate = StartupGate()
        keeps_all_headers = bool(self._hooks)
        server = frontend_server(
            gate, self._config, keeps_all_headers=keeps_all_headers, certificate=certificate
        )
        self._server = server
        app = self._run_app(gate, server, access, certificate)
        app_task = asyncio.create_task(app, name="frontend-app")
        app_task.add_done_callback(lambda _: gate.close())
        # The server stops when the first of these tasks ends.
        work = [app_task, asyncio.create_task(self._stop_requested(), name="frontend-stop")]
        if self._pipe is not None:
            work.append(asyncio.create_task(_follow_parent(self._pipe), name="frontend-parent"))
        for task in work:
            task.add_done_callback(lambda _: server.stop())
        scheme = "http" if certificate is None else "https"
        log.info("listening on %s://%s", scheme, host_and_port(*sock.getsockname()[:2]))
        try:
            await server.serve(sock)
        finally:
            outcomes = await cancel_all(work)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _stop_requested(self) -> None:
        await self._stop_event.wait()

    async def _run_app(
        self,
        gate: StartupGate,
        server: HttpServer,
        access: AccessControl,
        certificate: ServerCertificate | None,
    ) -> None:
        """Load the app and run it behind the gate, until cancelled."""
        # The import takes most of the start-up time, so it runs in a thread.
        await asyncio.to_thread(importlib.import_module, "dynamo_trtllm.frontend.process.run_app")
        from dynamo_trtllm.frontend.process.run_app import run_app

        def open_gate(app: Handler) -> None:
            if self._owns_process:
                tune_gc()
            server.handler = app
            gate.open(app)
            self._note_ready()

        try:
            await run_app(
                self._config,
                open_gate,
                pipe=self._pipe,
                is_stop_announced=self._is_stop_announced,
                stop=server.stop,
                hooks=self._hooks,
                access=access,
                certificate=certificate,
            )
        finally:
            await self._hooks.aclose()


async def _follow_parent(pipe: ControlPipe) -> None:
    """Handle messages of the parent process until it exits."""
    await pipe.run()
    log.error("parent process exited; shutting down")


def _warn_if_exposed(config: FrontendConfig, sock: socket.socket) -> None:
    if config.needs_api_key or config.needs_certificate:
        return
    warn_if_exposed(config.http_host, sock.getsockname()[1], "use the API", "--http-host")


def _tune_malloc() -> None:
    """Make glibc return freed memory to the system.

    By default, glibc raises its threshold for large blocks to the size of the largest freed block,
    and keeps an arena per thread. After some hundred megabytes of request bodies, the process would
    keep most of that memory. Therefore, this sets fixed thresholds and a low number of arenas (see
    mallopt(3)).
    """
    # Other C libraries than glibc have no such function.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 256 << 10)
        mallopt(_M_TRIM_THRESHOLD, 1 << 20)
        mallopt(_M_ARENA_MAX, 2)
