"""Run several frontend processes on one port: start them, restart them and aggregate their metrics.

The parent handles no requests: the kernel distributes connections among the processes. It aggregates metrics because it
outlives the processes. This module imports only what starting a process needs.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Mapping

from dynamo_trtllm.config.commands import FrontendProcessConfig
from dynamo_trtllm.config.deployment import RestartConfig
from dynamo_trtllm.config.load import ENV_PREFIX, to_argv
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.errors import DeadlineExceeded, Disconnected
from dynamo_trtllm.frontend.control_pipe import ControlPipe
from dynamo_trtllm.network.listening import bind, listen
from dynamo_trtllm.observability.metrics_aggregator import MetricsAggregator, Snapshot
from dynamo_trtllm.subprocesses.child import Child, decide, describe, spawn

_MODULE = "dynamo_trtllm.frontend.frontend_process"
_STOP_S = 34.0  # from SIGTERM to SIGKILL: a process waits 30 s for running requests
_METRICS_TIMEOUT_S = 1.0  # per process; after that its last metrics are used

_log = logging.getLogger(__name__)


def reserve_port(config: FrontendConfig) -> socket.socket:
    """Reserve the port for processes that share it, without listening.

    Raises:
        ConfigError: the port is in use, also if another frontend would share it.
    """
    with listen(config.http_host, config.http_port) as probe:
        port = probe.getsockname()[1]
    return bind(config.http_host, port, is_shared=True)


def process_argv(config: FrontendConfig, number: int, port: int) -> list[str]:
    """Return the command line of process `number`, counted from 1.

    Every user of the host can read a command line, so settings that may contain a password are in `process_environ`.
    """
    settings = config.model_dump(exclude={"nats_server"}) | {"http_port": port, "number": number}
    return [sys.executable, "-m", _MODULE, *to_argv(FrontendProcessConfig, settings)]


def process_environ(config: FrontendConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of every process."""
    return {**environ, f"{ENV_PREFIX}NATS_SERVER": config.nats_server}


def combined_exit_status(statuses: Mapping[str, int]) -> int:
    """Return one exit status for all processes: the largest, where death by signal N counts as 128 + N.

    SIGTERM counts as 0: it is sent to all at shutdown, and it kills a process that is just starting.
    """
    counted = (0 if status == -signal.SIGTERM else status for status in statuses.values())
    return max((status if status >= 0 else 128 - status for status in counted), default=0)


class _RestartLimitReached(Exception):
    def __init__(self, text: str, exit_status: int) -> None:
        super().__init__(text)
        self.exit_status = exit_status


class ProcessGroup:
    """The processes of one frontend. Created and run once, in the main thread. Processes inherit `environ`."""

    def __init__(self, config: FrontendConfig, port: int, environ: Mapping[str, str]) -> None:
        self._config = config
        self._port = port
        self._environ = process_environ(config, environ)
        self._stopping = asyncio.Event()
        self._children: dict[str, Child] = {}
        self._pipes: dict[str, ControlPipe] = {}
        self._ready: set[str] = set()
        self._statuses: dict[str, int] = {}
        self._aggregator = MetricsAggregator()

    def stop(self) -> None:
        """Stop all processes after their running requests. The second call kills them."""
        if self._stopping.is_set():
            self._kill_all()
        self._stopping.set()

    async def run(self) -> int:
        """Run until `stop` is called or a process cannot be restarted. Return the exit status; no process is left."""
        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(each, self.stop)
        limit_reached: _RestartLimitReached | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(1, self._config.workers + 1):
                    group.create_task(self._supervise(number))
                group.create_task(self._stop_all())
        except* _RestartLimitReached as failed:
            (limit_reached, *_) = (exc for exc in failed.exceptions if isinstance(exc, _RestartLimitReached))
            _log.error("%s; stopping all frontend processes", limit_reached)
            self._stopping.set()
            await self._stop_all()
        finally:
            self._kill_all()
        return combined_exit_status(self._statuses) if limit_reached is None else limit_reached.exit_status

    async def _supervise(self, number: int) -> None:
        name = f"frontend-{number}"
        restarts: list[float] = []
        while not self._stopping.is_set():
            status = await self._run_once(name, number)
            if self._stopping.is_set():
                self._statuses[name] = status
                return
            if name not in self._ready:
                raise _RestartLimitReached(
                    f"{name} {describe(status)} before it was ready", combined_exit_status({name: status}) or 1
                )
            decision = decide(RestartConfig(), status, restarts, time.monotonic())
            if not decision.is_restart:
                raise _RestartLimitReached(f"{name} {decision.text}", decision.exit_status)
            _log.error("%s %s", name, decision.text)
            restarts.append(time.monotonic())

    async def _run_once(self, name: str, number: int) -> int:
        """Start one process, wait for its end and return its exit status."""
        own_end, child_end = socket.socketpair()
        with child_end:
            pipe = await ControlPipe.connect(own_end, self._total_metrics, lambda: self._on_process_ready(name))
            if self._stopping.is_set():  # set meanwhile: `_stop_all` would miss a process that is started now
                pipe.close()
                return 0
            argv = process_argv(self._config, number, self._port)
            child = self._children[name] = Child(spawn(argv, env=self._environ, stdin=child_end.fileno()), _STOP_S)
        self._pipes[name] = pipe
        pipe_task = asyncio.create_task(pipe.run(), name=f"control pipe of {name}")
        try:
            return await child.ended()
        finally:
            del self._pipes[name]
            self._aggregator.ended(name)
            pipe_task.cancel()
            pipe.close()
            await asyncio.gather(pipe_task, return_exceptions=True)

    def _on_process_ready(self, name: str) -> None:
        """Record that a process is ready. Once all are, notify each, so that `/ready` answers alike everywhere."""
        self._ready.add(name)
        if len(self._ready) == self._config.workers:
            for pipe in self._pipes.values():
                pipe.send_ready()

    async def _total_metrics(self) -> Snapshot:
        """Return the aggregated metrics of all processes."""
        await asyncio.gather(*(self._refresh(name, pipe) for name, pipe in self._pipes.items()))
        return self._aggregator.total()

    async def _refresh(self, name: str, pipe: ControlPipe) -> None:
        try:
            snapshot = await pipe.request_snapshot(_METRICS_TIMEOUT_S)
        except (DeadlineExceeded, Disconnected) as exc:
            _log.warning("no metrics from %s, using its last ones: %s", name, exc.message)
            return
        if name in self._pipes:  # it may have exited meanwhile
            self._aggregator.update(name, snapshot)

    async def _stop_all(self) -> None:
        await self._stopping.wait()
        await asyncio.gather(*(child.stop() for child in self._children.values()))

    def _kill_all(self) -> None:
        for child in self._children.values():
            child.kill()
