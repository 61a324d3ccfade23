"""Start a frontend (`python -m dynamo_trtllm.frontend`).

It answers status requests at once, while the rest loads. This module imports only what the first
answer needs. `run_app` imports the rest and is loaded in a thread. `python -m` of this module runs
one of several frontend processes on a port.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import logging
import signal
import socket
import sys
from typing import TYPE_CHECKING

import uvloop

from dynamo_trtllm.config.commands import FrontendProcessConfig
from dynamo_trtllm.config.load import command, process_environment, warn_of_ignored_variables
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.http.frontend_server import frontend_server
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.observability.outputs import OUTPUTS
from dynamo_trtllm.protocol.errors import Draining
from dynamo_trtllm.protocol.http_status import retry_headers
from dynamo_trtllm.support.background import cancel_all
from dynamo_trtllm.support.http_server.exchange import Handler, HttpRequest, HttpResponse
from dynamo_trtllm.support.http_server.server import set_request_id
from dynamo_trtllm.support.network.listening import listen, warn_if_exposed

if TYPE_CHECKING:
    from dynamo_trtllm.frontend.process.control_pipe import ControlPipe

# The parameters of mallopt(3), from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

PROG = "python -m dynamo_trtllm.frontend"

# In one of several processes, the name of this module is __main__.
log = logging.getLogger("dynamo_trtllm.frontend.process.main")

_STARTING = "this frontend is starting"
_NO_LISTS: dict[str, object] = dict.fromkeys(
    ("endpoints", "instances", "pairs", "mismatched", "rejected_records"), ()
)
_NO_COUNTS = {"num_instances": {}, "num_pairs": 0, "num_quarantined": 0}
_EARLY = {
    "/live": (200, {"status": "live"}),
    "/ready": (503, {"status": "loading", "reason": _STARTING}),
    "/health": (200, {"status": "loading", **_NO_LISTS, **_NO_COUNTS, "message": _STARTING}),
}


class StartupGate:
    """The handler of a starting frontend. Requests wait until `open` or `close` is called, once.

    Status requests are answered at once. Another one needs the models: an earlier answer would be
    404.
    """

    def __init__(self) -> None:
        self._app: Handler | None = None
        self._decided = asyncio.Event()

    def open(self, app: Handler) -> None:
        """Forward all requests to `app`, including those that wait."""
        self._app = app
        self._decided.set()

    def close(self) -> None:
        """Answer the waiting requests with a retryable error. Does nothing if the gate is open."""
        self._decided.set()

    async def __call__(self, request: HttpRequest, response: HttpResponse) -> None:
        """Answer the request, now or once the gate is decided. Raises ClientDisconnected."""
        set_request_id(request, response)
        if self._app is None and request.path in _EARLY and request.method in ("GET", "HEAD"):
            status, body = _EARLY[request.path]
            response.send_json(status, body, retry_headers(status))
            return
        response.cancel_on_disconnect()
        await self._decided.wait()
        response.continue_on_disconnect()  # the app decides
        if self._app is None:
            response.send_error(Draining("this frontend failed to start; see its log"))
        else:
            await self._app(request, response)


@command(FrontendConfig, PROG)
def main(config: FrontendConfig) -> int:
    """Run the frontend.

    Exit status: 0 after a signal, 2 for a wrong configuration, 1 for a later failure.
    """
    OUTPUTS.start("frontend", config.log_format)
    observe_logging.setup(config.log_level, "frontend", config.log_format)
    warn_of_ignored_variables(config)
    if config.workers > 1:
        from dynamo_trtllm.frontend.process.process_group import ProcessGroup, reserve_port

        with reserve_port(config) as port:
            _warn_if_exposed(config, port)
            group = ProcessGroup(config, port.getsockname()[1], process_environment())
            return asyncio.run(group.run())
    sock = listen(config.http_host, config.http_port)
    _warn_if_exposed(config, sock)
    uvloop.run(serve(config, sock))
    return 0


@command(FrontendProcessConfig, PROG)
def process_main(config: FrontendProcessConfig) -> None:
    """Run one of several frontend processes.

    `process_group` starts it with a socket pair as standard input. It serves like a single frontend
    process, and exits with its parent. The exit statuses are those of `main`.
    """
    name = f"frontend-{config.number}"
    OUTPUTS.start(name, config.log_format)
    observe_logging.setup(config.log_level, name, config.log_format)
    uvloop.run(_serve_with_parent(config))


async def _serve_with_parent(config: FrontendProcessConfig) -> None:
    from dynamo_trtllm.frontend.process.control_pipe import ControlPipe

    own_end = socket.socket(fileno=sys.stdin.fileno())
    reader, writer = await asyncio.open_unix_connection(sock=own_end)
    pipe = ControlPipe(reader, writer)
    sock = listen(config.http_host, config.http_port, is_shared=True)
    await serve(config, sock, pipe)


def _warn_if_exposed(config: FrontendConfig, sock: socket.socket) -> None:
    warn_if_exposed(config.http_host, sock.getsockname()[1], "use the API", "--http-host")


async def serve(
    config: FrontendConfig, sock: socket.socket, pipe: ControlPipe | None = None
) -> None:
    """Serve on `sock` until SIGTERM or SIGINT, then close it. Raises what `run_app` raises.

    Args:
        pipe: leads to the parent, if this process is one of several on the port. Its end stops this
            process.
    """
    _tune_malloc()
    with sock:
        gate = StartupGate()
        server = frontend_server(gate, config)

        def open_gate(app: Handler) -> None:
            server.handler = app
            gate.open(app)

        async def run() -> None:
            # This takes most of the start-up time, so it runs in a thread.
            await asyncio.to_thread(
                importlib.import_module, "dynamo_trtllm.frontend.process.run_app"
            )
            from dynamo_trtllm.frontend.process.run_app import run_app

            await run_app(config, open_gate, pipe, server.stop)

        async def follow_parent(pipe: ControlPipe) -> None:
            await pipe.run()
            log.error("parent process exited; shutting down")

        running = asyncio.create_task(run())
        running.add_done_callback(lambda _: gate.close())
        work = [running]
        if pipe is not None:
            work.append(asyncio.create_task(follow_parent(pipe)))
        for task in work:
            task.add_done_callback(lambda _: server.stop())
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, server.stop)
        loop.add_signal_handler(signal.SIGINT, server.interrupt)
        log.info("listening on http://%s:%d", *sock.getsockname()[:2])
        try:
            await server.serve(sock)
        finally:
            ended = await cancel_all(work)
        for failure in ended:
            if isinstance(failure, Exception):
                raise failure


def _tune_malloc() -> None:
    """Make glibc return freed memory to the system: fixed thresholds and few arenas (mallopt(3)).

    By default glibc raises its threshold for large blocks to the largest freed one, and keeps an
    arena per thread. After some hundred megabytes of request bodies, the process would keep most of
    that memory.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries lack it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 256 << 10)
        mallopt(_M_TRIM_THRESHOLD, 1 << 20)
        mallopt(_M_ARENA_MAX, 2)


if __name__ == "__main__":
    process_main()
