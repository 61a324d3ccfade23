"""Run a deployment: start its servers and processes in order, and keep them running."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.config.deployment import START, DeploymentConfig
from dynamo_trtllm.config.engine_names import BUILT_IN
from dynamo_trtllm.config.flags import ENV_PREFIX
from dynamo_trtllm.engines.gpu import VISIBLE
from dynamo_trtllm.launch.local_servers import JETSTREAM, LocalServer, start_etcd, start_nats
from dynamo_trtllm.launch.process_output import ProcessOutput, next_line
from dynamo_trtllm.launch.process_specs import (
    ADDRESS_VARIABLES,
    ProcessSpec,
    without_other_servers,
)
from dynamo_trtllm.launch.readiness import NotYet, check_ready, poll
from dynamo_trtllm.launch.running_deployments import LaunchRecord, ProcessRecord, recorded
from dynamo_trtllm.launch.secret_files import SecretFiles
from dynamo_trtllm.protocol.errors import ConfigError, Unreachable
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.support.background import wait_for_first
from dynamo_trtllm.support.network.addresses import reserved_ports
from dynamo_trtllm.support.network.listening import bind
from dynamo_trtllm.support.subprocesses import (
    Child,
    RunFailed,
    Supervisor,
    module_command,
    scratch_folder,
    spawn,
)

if TYPE_CHECKING:
    from dynamo_trtllm.launch.server_users import PasswordFolder

_FOLDER = "dynamo-launch-"
_NATS_USERS = "nats-users.conf"
_LOG = "lines.log"
_MAX_LINE_BYTES = 1 << 20
_KEY_FILE_VARIABLE = "DYN_TRTLLM_KV_TRANSFER_KEY_FILE"
_KEY_BYTES = 32
# Longest wait for the output of a process after its exit: a grandchild may still hold it open.
_LAST_LINES_S = 1.0
# A restart that takes longer than ready_timeout_s is tried again, each time with twice the limit: a
# busy machine needs longer than at the first start. No limit is more than _MAX_LIMIT_FACTOR times
# ready_timeout_s.
_MAX_LIMIT_FACTOR = 8


class ManagedProcess(Child):
    """One run of a process, with its output.

    Create it on the event loop, in the main thread (see `spawn`).
    """

    def __init__(
        self,
        spec: ProcessSpec,
        port: int,
        environ: Mapping[str, str],
        on_line: Callable[[str], None],
    ) -> None:
        argv = module_command(spec.module, *spec.arguments(port))
        env = {**environ, **spec.env}
        process = spawn(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        super().__init__(process, spec.stop_timeout_s)
        self.spec = spec
        self.record = ProcessRecord(
            name=spec.name,
            # Only workers have a role. Other processes, such as the frontend, are shown by name.
            role=str(spec.role or spec.name),
            engine=spec.engine or "",
            model=spec.model,
            host=spec.host,
            port=port,
            pid=self.pid,
            uses_tls=spec.tls_files is not None,
            certificate="" if spec.certificate is None else str(spec.certificate),
        )
        # Workers drain first, while the frontend still streams their output.
        self.stop_rank = 1 if spec.is_frontend else 0
        self._on_line = on_line
        self._pumping = asyncio.create_task(self._pump(), name=f"lines of {spec.name}")

    def announce_stop(self) -> None:
        """Make a frontend answer `/ready` with 503 while workers drain, which end before it.

        A load balancer then sends new requests to other frontends. A frontend that is not ready
        answers 503 already, and may not handle the signal yet, which would end it.
        """
        if self.spec.is_frontend and self.is_ready and not self.has_ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)

    async def stop(self) -> None:
        """Send SIGTERM, then kill after the stop time-out. See `Child.stop`.

        A process that was never ready is killed at once: it has no requests to finish, and reacts
        late while it imports libraries or loads.
        """
        if not self.is_ready:
            self.is_terminating = True
            self.kill()
        await super().stop()

    async def _pump(self) -> None:
        """Pass on each line of the process until its output ends."""
        reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            partial(asyncio.StreamReaderProtocol, reader), self._process.stdout
        )
        try:
            while (line := await next_line(reader)) is not None:
                if line:
                    self.last_line = line
                self._on_line(line)
        finally:
            transport.close()

    async def ended(self) -> int:
        """Return the exit status, once all output lines were passed on.

        Several tasks may await it.
        """
        status = await super().ended()
        await asyncio.wait({self._pumping}, timeout=_LAST_LINES_S)
        if not self._pumping.done():
            self._pumping.cancel()
        elif not self._pumping.cancelled():
            # Raise the error of the task, if there is one.
            self._pumping.result()
        return status


# Engines whose prefill workers leave GPU memory in use until their decode workers end.
KEEP_MAPPED = frozenset(name for name, engine in BUILT_IN.items() if engine.keeps_kv_mapped)


def dependents_of(dead: ProcessSpec, specs: Sequence[ProcessSpec]) -> list[str]:
    """Return the names of the processes that may keep GPU memory of `dead` mapped after its exit.

    Args:
        dead: a process that has ended.
        specs: all processes of the deployment.
    """
    if dead.role not in (Role.PREFILL, Role.ELASTIC) or not _shares_gpu_memory(dead):
        return []
    names = []
    for spec in specs:
        has_same_engine_and_model = spec.engine == dead.engine and spec.model == dead.model
        is_partner = has_same_engine_and_model and spec.name != dead.name
        reads_kv = spec.role in (Role.DECODE, Role.ELASTIC)
        if reads_kv and is_partner and _shares_gpu_memory(spec):
            names.append(spec.name)
    return names


def _shares_gpu_memory(spec: ProcessSpec) -> bool:
    has_gpus = bool(spec.env.get(VISIBLE))
    return spec.engine in KEEP_MAPPED and has_gpus


OnReady = Callable[[LaunchRecord], Coroutine[Any, Any, bool]]


@dataclass(eq=False)
class Launcher:
    """Launcher of one deployment. Create and run it once, in the main thread."""

    deployment: DeploymentConfig
    specs: Sequence[ProcessSpec]  # the processes of the deployment
    output: ProcessOutput  # the output of the launcher and the processes
    environ: Mapping[str, str]  # the environment that the processes inherit

    def __post_init__(self) -> None:
        services = self.deployment.services
        addresses = {"etcd": services.etcd, "nats": services.nats}
        self._own_servers = [name for name, address in addresses.items() if address == START]
        self._environ = without_other_servers(self.environ, self._own_servers)
        # Names of the processes that have never been ready.
        self._never_ready = {spec.name for spec in self.specs}
        # For each process whose last restart was too slow, by name: the limit of the next restart,
        # as a multiple of ready_timeout_s.
        self._limit_factors: dict[str, int] = {}
        self._processes: dict[str, ManagedProcess] = {}  # current or last run by name
        # Names of processes that were ready before: other processes may still map the memory of
        # those runs.
        self._mapped_by_others: set[str] = set()
        self._changed = asyncio.Event()  # set when a process has become ready or has exited
        self._supervisor = Supervisor(self.deployment.restart, self.output.say)
        self.output.on_failure(self._supervisor.stop)
        self.record = LaunchRecord(pid=os.getpid(), namespace=self.deployment.namespace)
        self._write_record: Callable[[], None]  # set by `run`
        self._secret_files: SecretFiles  # set by `run`

    async def run(self, on_ready: OnReady) -> None:
        """Run the deployment until SIGINT or SIGTERM, or until `on_ready` returns True.

        Then stop all processes.

        Args:
            on_ready: awaited once, when all processes are ready. A signal cancels it.

        Raises:
            ConfigError: a port is in use, or a server does not start.
            RunFailed: a process was not ready in time at its first start, or has reached its
                restart limit.
        """
        for spec in self.specs:
            _check_port(spec)
        with scratch_folder(_FOLDER) as folder, self.output.keeping_lines(folder / _LOG) as path:
            self.record.log_file = path
            with recorded(self.record, self.output.say) as write_record:
                self._write_record = write_record
                await self._supervisor.run(self._start_all(folder, on_ready))
        self.output.say("stopped")

    async def _start_all(self, folder: Path, on_ready: OnReady) -> None:
        """Start the servers and the processes. Await `on_ready` when all are ready."""
        services = self.deployment.services
        etcd_address = services.etcd
        nats_address = services.nats
        files = self._secret_files = SecretFiles(folder)
        users = self._make_users(files) if self._own_servers else None
        if etcd_address == START:
            etcd_address = await self._start_server("etcd", partial(start_etcd, folder / "etcd"))
            await _set_up_etcd(users, etcd_address)
        if nats_address == START:
            flags = [*JETSTREAM, "--config", str(folder / _NATS_USERS)]
            start = partial(start_nats, folder / "nats", flags)
            nats_address = await self._start_server("nats", start)
        self._environ[ADDRESS_VARIABLES["etcd"]] = etcd_address
        self._environ[ADDRESS_VARIABLES["nats"]] = nats_address
        self.record.etcd = etcd_address
        self.record.nats = nats_address
        self._give_transfer_key(files)
        self._write_record()
        for spec in self.specs:
            self._supervisor.keep(
                spec.name, partial(self._running, spec), partial(self._before_restart, spec)
            )
        while self._never_ready:
            await self._changed.wait()
        # A stop cancels `on_ready`, because its requests would keep the processes from stopping.
        # The result is then None.
        is_done = await wait_for_first(on_ready(self.record), self._supervisor.until_stopping())
        if is_done:
            self._supervisor.stop()

    def _make_users(self, files: SecretFiles) -> PasswordFolder:
        """Make random users for the servers that this launcher starts, and pass them on."""
        # Imported here, because it loads the clients of etcd and NATS.
        from dynamo_trtllm.launch.server_users import PasswordFolder, users_of

        users = PasswordFolder(files.folder, users_of(self.deployment.namespace, self.specs))
        for credentials_file in users.files:
            files.keep(credentials_file)
        files.write(_NATS_USERS, users.nats_configuration())
        for name in self._own_servers:
            path = str(users.credentials_files)
            self._environ[f"{ENV_PREFIX}{name.upper()}_CREDENTIALS_FILE"] = path
            setattr(self.record, f"{name}_credentials_file", path)
        return users

    def _give_transfer_key(self, files: SecretFiles) -> None:
        """Give the workers a random key of KV transfers.

        The workers get no such key if the environment names a file of keys. They get none either if
        other launchers may use the same etcd or NATS, because the workers of each launcher would
        have another key.
        """
        is_alone = set(self._own_servers) == {"etcd", "nats"}
        if is_alone and _KEY_FILE_VARIABLE not in self._environ:
            key_file = files.write("kv-transfer-keys", secrets.token_hex(_KEY_BYTES))
            self._environ[_KEY_FILE_VARIABLE] = str(key_file)

    async def _start_server(
        self, name: str, start: Callable[[], Coroutine[Any, Any, LocalServer]]
    ) -> str:
        """Start a server and return its address.

        While the server restarts, workers and frontends keep running.
        """
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        @asynccontextmanager
        async def running() -> AsyncIterator[LocalServer]:
            nonlocal start
            began = time.monotonic()
            self._secret_files.restore()
            server = await start()
            # The next run has the port and the data of this run.
            start = server.restart
            self.record.server_logs[name] = str(server.log_path)
            self.output.report_ready(name, time.monotonic() - began, f"at {server.address}")
            if not address.done():
                address.set_result(server.address)
            yield server

        self._supervisor.keep(name, running)
        return await address

    @asynccontextmanager
    async def _running(self, spec: ProcessSpec) -> AsyncIterator[ManagedProcess]:
        """Start a process and wait in the background until it is ready."""
        began = time.monotonic()
        self._secret_files.restore()
        on_line = partial(self.output.line, spec.name)
        port_context = nullcontext(spec.port) if spec.port else reserved_ports(1, spec.host)
        with port_context as port:
            process = ManagedProcess(spec, port, self._environ, on_line)
            self._record_start(spec.name, process)
            async with asyncio.TaskGroup() as group:
                waiting = group.create_task(self._await_ready(process, began))
                yield process
                waiting.cancel()
        self._notify_changed()

    def _record_start(self, name: str, process: ManagedProcess) -> None:
        """Add a new run to the record, in place of an ended run of the same name."""
        ended = self._processes.get(name)
        if ended is not None and ended.record.instance_id:
            self.record.ended_instances.append(ended.record.instance_id)
        self._processes[name] = process
        self.record.processes = [process.record for process in self._processes.values()]
        self._write_record()

    async def _before_restart(
        self, spec: ProcessSpec, process: ManagedProcess, status: int
    ) -> None:
        """If a process has crashed, restart those that may keep its GPU memory mapped."""
        if process.is_ready:
            self._mapped_by_others.add(spec.name)
        # A process that exits with 0 has normally released its GPU memory. If it has not, its next
        # run crashes at the start, and the dependents are restarted then.
        has_crashed = status != 0
        restarts_dependents = self.deployment.restart.decode_workers
        if has_crashed and restarts_dependents and spec.name in self._mapped_by_others:
            await self._restart_dependents(spec)
            self._mapped_by_others.remove(spec.name)

    async def _restart_dependents(self, dead: ProcessSpec) -> None:
        """Stop the processes that may hold memory of `dead`, and return when they have exited.

        Their supervisors start them again. A process that is not ready yet has read no KV and keeps
        running. If replicas of `dead` are ready, dependents drain one after the other. Otherwise
        all drain at once, because no new request can run anyway.
        """
        dependents = dependents_of(dead, self.specs)
        living = self._living_and_ready()
        holding = {name: self._processes[name] for name in dependents if name in living}
        if not holding:
            return
        names = ", ".join(holding)
        which_hold = "which holds" if len(holding) == 1 else "which hold"
        self.output.say(
            f"draining and restarting {names}, {which_hold} GPU memory of {dead.name} over CUDA IPC"
            " (restart.decode_workers: false disables this)"
        )
        replicas = [
            spec.name
            for spec in self.specs
            if spec.name != dead.name and spec.role == dead.role and spec.model == dead.model
        ]
        while remaining := [process for process in holding.values() if not process.has_ended]:
            # The event is taken before the check, so that no later change is missed.
            changed = self._changed
            serving = {
                name
                for name in self._living_and_ready()
                if not self._processes[name].is_terminating
            }
            has_ready_replica = not serving.isdisjoint(replicas)
            all_dependents_serve = serving.issuperset(dependents)
            if not has_ready_replica:
                stopping = remaining
            elif all_dependents_serve:
                stopping = remaining[:1]
            else:
                # The dependent that was stopped last is not ready again yet.
                stopping = []
            for process in stopping:
                # There is no `await` between the check above and this call. So no other call of
                # this method has counted the process as serving meanwhile.
                process.terminate()
            if stopping:
                await asyncio.gather(*(process.stop() for process in stopping))
            else:
                await changed.wait()
        self.output.say(f"{names} stopped; GPU memory of {dead.name} is free")

    def _living_and_ready(self) -> set[str]:
        return {
            name
            for name, process in self._processes.items()
            if process.is_ready and not process.has_ended
        }

    def _notify_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _await_ready(self, process: ManagedProcess, began: float) -> None:
        """Wait until a process is ready. If this takes too long, kill it, so that it is restarted.

        Raises:
            RunFailed: the process was not ready in time at its first start.
        """
        spec = process.spec
        factor = self._limit_factors.get(spec.name, 1)
        limit_s = factor * self.deployment.ready_timeout_s
        on_wait = partial(self.output.report_phase, spec.name)
        try:
            ask = partial(check_ready, spec.host, process.record.port, spec.certificate)
            answer = await poll(ask, limit_s, on_wait)
        except NotYet as exc:
            late = f"{spec.name} was not ready within {limit_s:g} s ({exc})"
            if spec.name in self._never_ready:
                raise RunFailed(f"{late}; raise ready_timeout_s") from None
            # The other processes are in use, so they keep running. The supervisor starts this
            # process again.
            factor = min(2 * factor, _MAX_LIMIT_FACTOR)
            self._limit_factors[spec.name] = factor
            self.output.say(
                f"{late} after a restart, and is killed; the next start may take"
                f" {factor * self.deployment.ready_timeout_s:g} s (ready_timeout_s)"
            )
            process.kill()
            return
        self._limit_factors.pop(spec.name, None)
        process.is_ready = True
        self._never_ready.discard(spec.name)
        self._notify_changed()
        if spec.worker is None:
            where = f"at {process.record.url}"
        else:
            process.record.instance_id = answer.instance_id
            self._write_record()
            where = f"as instance {answer.instance_id}"
        self.output.report_ready(spec.name, time.monotonic() - began, where)


async def _set_up_etcd(users: PasswordFolder | None, address: str) -> None:
    """Create the users in an etcd that was just started.

    Raises:
        RunFailed: etcd does not answer.
    """
    # Imported here, because it loads the clients of etcd and NATS.
    from dynamo_trtllm.launch.server_users import set_up_etcd

    assert users is not None
    config = ConnectionConfig(etcd_endpoints=address)
    try:
        await set_up_etcd(config, users.users, users.passwords)
    except Unreachable as exc:
        raise RunFailed(f"the users of etcd can't be set up: {exc.message}") from exc


def _check_port(spec: ProcessSpec) -> None:
    """Raise ConfigError if the port is in use: its owner would answer our readiness check."""
    if not spec.port:
        return
    # "http" for --http-port, and "system" for --system-port.
    setting = spec.port_flag.removeprefix("--").removesuffix("-port")
    try:
        bind(spec.host, spec.port, setting=setting).close()
    except ConfigError as exc:
        # The field is, for example, "http_host" or "http_port".
        is_wrong_host = exc.field == f"{setting}_host"
        flag = "host" if is_wrong_host else "port"
        hint = f"; --{flag} of this command changes it" if spec.is_frontend else ""
        raise ConfigError(f"{spec.name}: {exc.message}{hint}", field=exc.field) from exc
