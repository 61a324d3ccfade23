"""Run one of several frontend processes on a port. `process_group` starts it with a socket pair as standard input.

It serves like a single frontend process and exits with its parent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from dynamo_trtllm.config.commands import FrontendProcessConfig
from dynamo_trtllm.config.load import command_errors, load
from dynamo_trtllm.frontend.process.control_pipe import ControlPipe
from dynamo_trtllm.frontend.process.main import serve
from dynamo_trtllm.network.listening import listen
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.observability.metrics_aggregator import Snapshot

if TYPE_CHECKING:
    from dynamo_trtllm.observability.metrics import FrontendMetrics

PROG = "python -m dynamo_trtllm.frontend.process.frontend_process"
_METRICS_TIMEOUT_S = 5.0  # for the totals of all processes; the parent's wait per process is shorter

log = logging.getLogger(__name__)


class FrontendProcess:
    """This process, one of several. It reaches its peers through the parent.

    Call `connect` first, and run `run` in a task.
    """

    pipe: ControlPipe

    def __init__(self) -> None:
        self.stop: Callable[[], None] = lambda: None  # called when the parent process has ended
        self._metrics: FrontendMetrics | None = None

    async def connect(self, sock: socket.socket) -> None:
        """Connect to the parent."""
        self.pipe = ControlPipe(*await asyncio.open_unix_connection(sock=sock), self._snapshot)

    async def run(self) -> None:
        """Exchange messages until the parent exits, then stop this process."""
        try:
            await self.pipe.run()
            log.error("parent process exited; shutting down")
        finally:
            self.stop()

    def share(self, metrics: FrontendMetrics) -> None:
        """Include this process's metrics in every scrape, so that each process returns the totals of all."""
        self._metrics = metrics
        metrics.gather = partial(self.pipe.request_snapshot, _METRICS_TIMEOUT_S)

    def not_ready_reason(self) -> str | None:
        """Return why not all processes of this frontend are ready, as text for `/ready`; None when they are."""
        return None if self.pipe.is_other_ready else "other processes of this frontend are starting"

    async def _snapshot(self) -> Snapshot:
        return () if self._metrics is None else self._metrics.snapshot()


@command_errors(PROG)
def main() -> None:
    """Run the process. The exit statuses are those of `frontend.main`."""
    config = load(FrontendProcessConfig, prog=PROG)
    observe_logging.setup(config.log_level, f"frontend-{config.number}", config.log_format)
    uvloop.run(_serve(config))


async def _serve(config: FrontendProcessConfig) -> None:
    process = FrontendProcess()
    await process.connect(socket.socket(fileno=sys.stdin.fileno()))
    parent = asyncio.create_task(process.run())
    try:
        await serve(config, listen(config.http_host, config.http_port, is_shared=True), process)
    finally:
        parent.cancel()
        (ended,) = await asyncio.gather(parent, return_exceptions=True)
    if isinstance(ended, Exception):
        raise ended


if __name__ == "__main__":
    main()
