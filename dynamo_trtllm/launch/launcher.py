"""Start the processes of a deployment in order, restart those that die, and stop all at the end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dynamo_trtllm.config.deployment import START, DeploymentConfig
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.launch.console import Console, LineSplitter
from dynamo_trtllm.launch.dependents import DependentRestart
from dynamo_trtllm.launch.plan import Addresses, ProcessSpec, processes, reachable
from dynamo_trtllm.launch.readiness_checks import NotYet, is_taken, ready, until
from dynamo_trtllm.launch.servers import LocalServer, start_etcd, start_nats
from dynamo_trtllm.network.listening import bind
from dynamo_trtllm.subprocesses.child import Child, decide, describe, scratch_folder, spawn
from dynamo_trtllm.subprocesses.ports import free_ports

_READ_BYTES = 1 << 16
_LAST_LINES_S = 1.0  # after its exit: longest wait for its output, which a grandchild may still hold open


class ManagedProcess(Child):
    """One run of a process, with its output. Create it on the event loop, in the main thread (see `spawn`)."""

    def __init__(
        self, spec: ProcessSpec, port: int, environ: Mapping[str, str], on_line: Callable[[str], None]
    ) -> None:
        argv = [sys.executable, "-m", spec.module, *spec.arguments(port)]
        process = spawn(argv, env={**environ, **spec.env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        super().__init__(process, spec.stop_timeout_s)
        self.spec = spec
        self.port = port
        self.is_ready = False  # has answered /ready with 200; the supervisor sets it
        self._lines = asyncio.create_task(self._pump(on_line), name=f"lines of {spec.name}")

    async def _pump(self, on_line: Callable[[str], None]) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
        )
        splitter = LineSplitter()
        try:
            while data := await reader.read(_READ_BYTES):
                for line in splitter.feed(data):
                    on_line(line)
            for line in splitter.end():
                on_line(line)
        finally:
            transport.close()

    async def ended(self) -> int:
        """Return the exit status, once all output lines were passed on. Several tasks may await it."""
        status = await super().ended()
        await asyncio.wait({self._lines}, timeout=_LAST_LINES_S)
        if self._lines.done():
            if not self._lines.cancelled():
                self._lines.result()
        else:
            self._lines.cancel()
        return status


class LaunchFailed(Exception):
    """The deployment failed. `exit_status` is that of the launcher."""

    def __init__(self, text: str, exit_status: int = 1) -> None:
        super().__init__(text)
        self.exit_status = exit_status


class _Stopped(Exception):
    """`stop` was called, and all processes have exited."""


@dataclass(slots=True)
class DeploymentStatus:
    """Address and instances of a ready deployment. Restarts update it."""

    frontend: str | None = None  # HOST:PORT
    names: dict[str, str] = field(default_factory=dict)  # instance id (hexadecimal) -> process name


OnReady = Callable[[DeploymentStatus], Awaitable[bool]]


class Supervisor:
    """Supervisor of one deployment. Create and run it once, in the main thread.

    Args:
        deployment: The deployment.
        console: Output of the launcher and its processes.
        environ: Environment that the processes inherit.
    """

    def __init__(self, deployment: DeploymentConfig, console: Console, environ: Mapping[str, str]) -> None:
        self._deployment = deployment
        self._console = console
        self._environ = environ
        self._stopping = asyncio.Event()
        self._all_ready = asyncio.Event()
        self._not_ready: set[str] = set()
        self._running: dict[str, ManagedProcess] = {}
        self._servers: list[LocalServer] = []
        self.deployment_status = DeploymentStatus()

    def stop(self) -> None:
        """Stop the processes in order. A second call kills them at once."""
        if self._stopping.is_set():
            for running in self._running.values():
                running.kill()
        self._stopping.set()

    async def run(self, on_ready: OnReady) -> None:
        """Run the deployment until `stop` is called or `on_ready` returns True. Then stop all processes.

        Args:
            on_ready: Awaited once, when all processes are ready.

        Raises:
            ConfigError: A port is in use, or a server does not start.
            LaunchFailed: A process was not ready in time, or has reached its restart limit.
        """
        failure: LaunchFailed | ConfigError | None = None
        for spec in processes(self._deployment, Addresses(etcd="localhost", nats="localhost"), self._environ):
            _check_port(spec)
        with scratch_folder("dynamo-launch-") as folder:
            try:
                addresses = await self._unless_stopped(self._start_servers(folder))
                await self._supervise_all(processes(self._deployment, addresses, self._environ), on_ready)
            except* (LaunchFailed, ConfigError) as group:
                failure = _first(group)
            except* _Stopped:
                self._console.say("stopped")
            finally:
                await self._stop_processes()
                await asyncio.gather(*(server.stop() for server in self._servers))
        if failure is not None:
            raise failure

    async def _unless_stopped(self, start: Coroutine[Any, Any, Addresses]) -> Addresses:
        """Return the result of `start`. If `stop` is called first, cancel `start` and raise _Stopped."""
        starting = asyncio.create_task(start, name="start of servers")
        stopping = asyncio.create_task(self._stopping.wait(), name="stop")
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                return starting.result()
            raise _Stopped
        finally:
            for task in (starting, stopping):
                task.cancel()
            await asyncio.gather(starting, stopping, return_exceptions=True)

    async def _start_servers(self, folder: Path) -> Addresses:
        services = self._deployment.services
        etcd, nats = services.etcd, services.nats
        if etcd == START:
            etcd = await self._start_server("etcd", start_etcd(folder / "etcd"))
        if nats == START:
            nats = await self._start_server("nats", start_nats(folder / "nats"))
        return Addresses(etcd=etcd, nats=nats)

    async def _start_server(self, name: str, start: Coroutine[Any, Any, LocalServer]) -> str:
        began = time.monotonic()
        server = await start
        self._servers.append(server)
        self._report_ready(name, began, f"at {server.address}")
        return server.address

    async def _supervise_all(self, specs: list[ProcessSpec], on_ready: OnReady) -> None:
        self._not_ready = {spec.name for spec in specs}
        dependents = DependentRestart(specs, self._running, self._console.say)
        async with asyncio.TaskGroup() as group:
            for at in range(len(self._servers)):
                group.create_task(self._supervise_server(at))
            for spec in specs:
                group.create_task(self._supervise(spec, dependents))
            group.create_task(self._when_ready(on_ready))
            await self._stopping.wait()
            await self._stop_processes()
            raise _Stopped  # ends the rest of the group

    async def _when_ready(self, on_ready: OnReady) -> None:
        await self._all_ready.wait()
        if await on_ready(self.deployment_status):
            self._stopping.set()

    async def _supervise_server(self, at: int) -> None:
        """Restart a server whenever it exits. Workers and frontends keep running and reconnect."""
        restarts: list[float] = []
        while not self._stopping.is_set():
            server = self._servers[at]
            name = server.log_path.stem
            status = await server.ended()
            decision = decide(self._deployment.restart, status, restarts, time.monotonic(), is_status_2_final=False)
            if not decision.is_restart:
                raise LaunchFailed(f"{name} {decision.text}", decision.exit_status)
            self._console.say(f"{name} {decision.text}")
            restarts.append(time.monotonic())
            if await self._stopped_within(decision.pause_s):
                return
            began = time.monotonic()
            self._servers[at] = await server.restart()
            self._report_ready(name, began, f"at {server.address}")

    async def _supervise(self, spec: ProcessSpec, dependents: DependentRestart) -> None:
        restarts: list[float] = []
        may_be_mapped = False  # other processes may have mapped memory of an earlier run
        while not self._stopping.is_set():
            status, last_line = await self._run_once(spec, dependents)
            process = self._running[spec.name]
            if self._stopping.is_set():
                return
            if process.is_terminating:  # by `dependents`
                self._console.say(f"{spec.name} {describe(status)} as requested; restarting")
                continue
            # Another process may have taken the port between the choice of the port and the start. Exit status 2 then
            # says nothing about the configuration, so the process is restarted.
            lost_port = not spec.port and not process.is_ready and await is_taken(spec.host, process.port)
            decision = decide(
                self._deployment.restart, status, restarts, time.monotonic(), is_status_2_final=not lost_port
            )
            if not decision.is_restart:
                raise LaunchFailed(f"{spec.name} {decision.text}; last line: {last_line}", decision.exit_status)
            self._console.say(f"{spec.name} {decision.text}")
            restarts.append(time.monotonic())
            may_be_mapped = may_be_mapped or process.is_ready
            # A process that exits with 0 has normally released its GPU memory. If not, its successor fails to start
            # with another status, and then the dependents are restarted.
            if self._deployment.restart.readers_too and may_be_mapped and status != 0:
                await dependents.restart_dependents(spec)
                may_be_mapped = False
            if await self._stopped_within(decision.pause_s):
                return

    async def _stopped_within(self, pause_s: float) -> bool:
        """Wait for `pause_s` seconds or until `stop` is called; return True if it was."""
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._stopping.wait()
        return self._stopping.is_set()

    async def _run_once(self, spec: ProcessSpec, dependents: DependentRestart) -> tuple[int, str]:
        """Run a process until it exits; return its exit status and its last line of output."""
        began = time.monotonic()
        last_line = ""

        def on_line(line: str) -> None:
            nonlocal last_line
            last_line = line or last_line
            self._console.line(spec.name, line)

        running = ManagedProcess(spec, self._port_of(spec), self._environ, on_line)
        self._running[spec.name] = running
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(self._await_ready(running, began, dependents))
            status = await running.ended()
            waiting.cancel()
        dependents.notify_changed()
        return status, last_line

    def _port_of(self, spec: ProcessSpec) -> int:
        """Return the configured port, or a free port that no process of this launcher uses."""
        if spec.port:
            return spec.port
        given = {running.port for running in self._running.values()}
        while (port := free_ports(host=spec.host)) in given:
            pass
        return port

    async def _await_ready(self, running: ManagedProcess, began: float, dependents: DependentRestart) -> None:
        spec, limit_s = running.spec, self._deployment.ready_timeout_s
        try:
            answer = await until(partial(ready, spec.host, running.port), limit_s)
        except NotYet as exc:
            raise LaunchFailed(
                f"{spec.name} was not ready within {limit_s:g} s ({exc}); raise ready_timeout_s"
            ) from None
        running.is_ready = True
        dependents.notify_changed()
        if spec.is_frontend:
            self.deployment_status.frontend = reachable(f"{spec.host}:{running.port}")
            self._report_ready(spec.name, began, f"at http://{self.deployment_status.frontend}")
        else:
            self.deployment_status.names[answer.instance_id] = spec.name
            self._report_ready(spec.name, began, f"as instance {answer.instance_id}")
        self._not_ready.discard(spec.name)
        if not self._not_ready:
            self._all_ready.set()

    def _report_ready(self, name: str, began: float, where: str) -> None:
        self._console.say(f"{name} is ready after {time.monotonic() - began:.2f} s {where}")

    async def _stop_processes(self) -> None:
        """Stop the workers first, because they drain while the frontend still streams their output."""
        for is_frontend in (False, True):
            group = [running for running in self._running.values() if running.spec.is_frontend is is_frontend]
            await asyncio.gather(*(running.stop() for running in group))


def _check_port(spec: ProcessSpec) -> None:
    """Raise ConfigError if the port is in use, because its owner would answer our readiness check."""
    if not spec.port:
        return
    try:
        bind(spec.host, spec.port, setting=spec.port_flag.removeprefix("--").removesuffix("-port")).close()
    except ConfigError as exc:
        hint = "; --port of this command changes it" if spec.is_frontend else ""
        raise ConfigError(f"{spec.name}: {exc.message}{hint}", field=exc.field) from exc


def _first(group: BaseExceptionGroup[LaunchFailed | ConfigError]) -> LaunchFailed | ConfigError:
    """Return the first failure of a possibly nested group."""
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
