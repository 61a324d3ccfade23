"""One of several frontend processes on a port. `process_group` starts it; standard input is its end of a socket pair.

It serves like a single frontend process, and ends with its parent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvloop

from dynamo_trtllm.config.commands import FrontendProcessConfig
from dynamo_trtllm.config.load import exit_with, load
from dynamo_trtllm.errors import ConfigError, DynamoError
from dynamo_trtllm.frontend.control_pipe import ControlPipe
from dynamo_trtllm.frontend.main import DESCRIPTION, serve
from dynamo_trtllm.network.addresses import listen
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.observability.metrics_aggregator import Snapshot

if TYPE_CHECKING:
    from dynamo_trtllm.observability.metrics import FrontendMetrics

PROG = "python -m dynamo_trtllm.frontend.frontend_process"
_METRICS_TIMEOUT_S = 5.0  # of all processes; the parent waits for each of them a shorter time

_log = logging.getLogger(__name__)


class FrontendProcess:
    """The other processes, reached through the parent. `run` in a task of the owner's."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._metrics: FrontendMetrics | None = None
        self._are_all_ready = False
        self._stop: Callable[[], None] = lambda: None

    async def join(self) -> None:
        """Before all else."""
        self._pipe = await ControlPipe.connect(self._sock, self._snapshot, self._on_all_ready)

    async def run(self) -> None:
        """Until the parent is gone."""
        try:
            await self._pipe.run()
            _log.error("the parent of this process has ended, and so it does")
        finally:
            self._stop()

    def share(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics
        metrics.gather = self._total_metrics

    def announce_ready(self) -> None:
        self._pipe.send_ready()

    def not_ready_reason(self) -> str | None:
        return None if self._are_all_ready else "other processes of this frontend are starting"

    def on_parent_exit(self, stop: Callable[[], None]) -> None:
        self._stop = stop

    def _on_all_ready(self) -> None:
        self._are_all_ready = True

    async def _snapshot(self) -> Snapshot:
        return () if self._metrics is None else self._metrics.snapshot()

    async def _total_metrics(self) -> Snapshot:
        return await self._pipe.request_snapshot(_METRICS_TIMEOUT_S)


def main() -> None:
    """Exit statuses as of `frontend.main`."""
    try:
        config = load(FrontendProcessConfig, prog=PROG, description=DESCRIPTION).config
        observe_logging.setup(config.log_level, f"frontend-{config.number}", config.log_format)
        uvloop.run(_serve(config))
    except ConfigError as exc:
        exit_with(PROG, exc)
    except DynamoError as exc:
        _log.error("%s: %s", exc.code, exc.message)
        raise SystemExit(1) from exc


async def _serve(config: FrontendProcessConfig) -> None:
    process = FrontendProcess(socket.socket(fileno=sys.stdin.fileno()))
    await process.join()
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
