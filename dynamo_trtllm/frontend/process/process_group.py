"""Run several frontend processes on one port and aggregate their metrics.

The parent handles no requests: the kernel distributes connections among the processes. It
aggregates metrics because it outlives the processes. This module imports only what starting a
process needs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import Any

from dynamo_trtllm.access.key_usage import shared_memory
from dynamo_trtllm.config.child_settings import to_argv, to_environ
from dynamo_trtllm.config.commands import FrontendProcessConfig
from dynamo_trtllm.config.deployment import RestartConfig
from dynamo_trtllm.config.flags import ENV_PREFIX
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.process.control_pipe import ControlPipe
from dynamo_trtllm.observability.metrics_aggregator import MetricsAggregator
from dynamo_trtllm.observability.outputs import OUTPUTS
from dynamo_trtllm.protocol.errors import ConfigError, DeadlineExceeded, Disconnected
from dynamo_trtllm.support.network.listening import bind, listen
from dynamo_trtllm.support.subprocesses import (
    Child,
    RunFailed,
    Supervisor,
    describe,
    module_command,
    spawn,
)

_MODULE = "dynamo_trtllm.frontend.process.main"
# Time from SIGTERM to SIGKILL. A process waits 30 s for running requests.
_STOP_S = 34.0
_PROCESSES_PER_CORE = 16  # limit; each process takes about 100 MB
# Longest wait for the metrics of one process. After that, the last metrics that it sent are used.
_METRICS_TIMEOUT_S = 1.0

log = logging.getLogger(__name__)


def reserve_port(config: FrontendConfig) -> socket.socket:
    """Reserve the port for processes that share it, without listening.

    Raises:
        ConfigError: the port is in use, even if only by a frontend that would share it; or the
            machine has too few cores.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    if config.workers > _PROCESSES_PER_CORE * cores:
        raise ConfigError(
            f"--workers {config.workers} is more than {_PROCESSES_PER_CORE} processes for each of"
            f" the {cores} CPU cores; one process per core is enough"
        )
    # Unlike the shared `bind` below, this fails also if another frontend has the port.
    with listen(config.http_host, config.http_port) as probe:
        port = probe.getsockname()[1]
    return bind(config.http_host, port, is_shared=True)


def process_argv(
    config: FrontendConfig, number: int, port: int, hooks: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the command line of process `number`, counted from 1.

    Every user of the host can read a command line, so settings that may contain a password are in
    `process_environ`.
    """
    settings = config.model_dump(exclude={"nats_server"})
    settings |= {"http_port": port, "number": number, "hooks": hooks}
    return module_command(_MODULE, *to_argv(FrontendProcessConfig, settings))


def process_environ(config: FrontendConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of every process."""
    secrets = to_environ(FrontendConfig, dict(config))
    return {**environ, **secrets, f"{ENV_PREFIX}NATS_SERVER": config.nats_server}


def combined_exit_status(statuses: Mapping[str, int]) -> int:
    """Return one exit status for all processes: the largest.

    Death by signal N counts as 128 + N. SIGTERM counts as 0: all processes get it at shutdown, and
    it kills a process that is just starting.
    """
    largest = 0
    for status in statuses.values():
        if status == -signal.SIGTERM:
            continue
        counted = status if status >= 0 else 128 - status
        largest = max(largest, counted)
    return largest


class ProcessGroup:
    """The processes of one frontend.

    It is created and run once, in the main thread. The processes inherit `environ`.
    """

    def __init__(
        self,
        config: FrontendConfig,
        port: int,
        environ: Mapping[str, str],
        hooks: Mapping[str, Any] | None = None,
    ) -> None:
        self._config = config
        self._port = port
        self._hooks = hooks  # names, see `Hooks.names`
        self._environ = process_environ(config, environ)
        if hooks is not None:
            # The processes import the hooks from the folders from which this one has imported them.
            self._environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        # Descriptor of the memory in which the processes count what API keys use.
        self._usage_file: int | None = None
        if config.api_keys_file is not None:
            self._usage_file = shared_memory(config.workers)
        self._pipes: dict[str, ControlPipe] = {}
        self._is_stop_announced = False
        self._ready: set[str] = set()  # names of the processes that have been ready at least once
        self._aggregator = MetricsAggregator()
        self._supervisor = Supervisor(
            RestartConfig(), partial(log.error, "%s"), partial(log.info, "%s")
        )

    async def run(self) -> int:
        """Run until a signal or until a process can't be restarted.

        Return the exit status; no process is left.
        """
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._announce_stop)
        try:
            return combined_exit_status(await self._supervisor.run(self._start_all()))
        except RunFailed as failed:
            return failed.exit_status
        finally:
            if self._usage_file is not None:
                os.close(self._usage_file)

    async def _start_all(self) -> None:
        for number in range(1, self._config.workers + 1):
            name = f"frontend-{number}"
            argv = process_argv(self._config, number, self._port, self._hooks)
            self._supervisor.keep(name, partial(self._running, name, argv))

    @asynccontextmanager
    async def _running(self, name: str, argv: Sequence[str]) -> AsyncIterator[Child]:
        """Start one process with a control pipe, and serve the pipe until the process ends."""
        own_end, child_end = socket.socketpair()
        if self._usage_file is not None:
            # The process receives this file before anything else.
            socket.send_fds(own_end, [b"\0"], [self._usage_file])
        reader, writer = await asyncio.open_unix_connection(sock=own_end)
        on_ready = partial(self._on_process_ready, name)
        with (
            child_end,
            closing(ControlPipe(reader, writer, self._total_metrics, on_ready)) as pipe,
        ):
            # The child gets the outputs themselves, not the relay of this process: the child has a
            # relay of its own, which counts the lines that it drops.
            streams = {"stdin": child_end.fileno(), **OUTPUTS.originals}
            child = Child(spawn(argv, env=self._environ, **streams), _STOP_S)
            # Only the child keeps its end open, so the pipe ends when the child ends.
            child_end.close()
            self._pipes[name] = pipe
            if self._is_stop_announced:
                pipe.announce_stop()
            try:
                async with asyncio.TaskGroup() as tasks:
                    reading = tasks.create_task(pipe.run(), name=f"control pipe of {name}")
                    yield child
                    reading.cancel()
            finally:
                del self._pipes[name]
                self._aggregator.ended(name)
        # A process that has never been ready is not restarted: it would fail in the same way.
        if name not in self._ready and not self._supervisor.is_stopping:
            status = await child.ended()
            exit_status = combined_exit_status({name: status}) or 1
            raise RunFailed(f"{name} {describe(status)} before it was ready", exit_status)

    def _on_process_ready(self, name: str) -> None:
        """Record that a process is ready.

        Once all processes are ready, notify each of them: `/ready` then answers 200 in all.
        """
        self._ready.add(name)
        if len(self._ready) == self._config.workers:
            for pipe in self._pipes.values():
                pipe.send_ready()

    def _announce_stop(self) -> None:
        """Make `/ready` answer 503 in all processes, also in those that are restarted later."""
        if not self._is_stop_announced:
            log.info("these frontends will be stopped, so /ready answers 503; they still serve")
        self._is_stop_announced = True
        for pipe in self._pipes.values():
            pipe.announce_stop()

    async def _total_metrics(self) -> bytes:
        """Return the aggregated metrics of all processes."""
        await asyncio.gather(*(self._refresh(name, pipe) for name, pipe in self._pipes.items()))
        return self._aggregator.total()

    async def _refresh(self, name: str, pipe: ControlPipe) -> None:
        """Give the present metrics of a process to the aggregator."""
        try:
            snapshot = await pipe.request_snapshot(_METRICS_TIMEOUT_S)
        except (DeadlineExceeded, Disconnected) as exc:
            log.warning("no metrics from %s, using its last ones: %s", name, exc.message)
            return
        # The process may have exited meanwhile.
        if name in self._pipes:
            self._aggregator.update(name, snapshot)
