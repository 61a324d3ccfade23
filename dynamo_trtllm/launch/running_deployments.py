"""Know the deployments that run on this machine: each launcher writes a file about its deployment.

The files are in a folder in memory that only this user reads. A launcher removes its file at its
end. The file has the process id and the start time of the launcher. If no running process has both,
the launcher was killed, and the file is ignored.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

import msgspec

from dynamo_trtllm.config.client_commands import DEFAULT_FRONTEND
from dynamo_trtllm.config.load import process_environment
from dynamo_trtllm.launch.process_specs import FRONTEND
from dynamo_trtllm.observability.recorder import check_owner, runtime_folder, start_ticks
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.number_types import Port, PositiveCount
from dynamo_trtllm.support.network.addresses import shown_address

_FOLDER: Final = "deployments"
_SUFFIX: Final = ".json"
_NEW_SUFFIX: Final = ".new"  # a file that is being written
_LOCK: Final = "lock"
_MAX_LOCK_WAIT_S: Final = 2.0  # a launcher holds the lock for milliseconds
_LOCK_PAUSE_S: Final = 0.02


class ProcessRecord(msgspec.Struct, kw_only=True):
    """One frontend or worker of a launched deployment, as it runs now."""

    name: str
    role: str  # frontend, or the role of a worker
    engine: str = ""
    model: str = ""
    host: str
    port: Port  # the port of /ready, /health and /metrics
    pid: PositiveCount
    instance_id: str = ""  # id of a worker that has been ready, hexadecimal
    uses_tls: bool = False
    certificate: str = ""  # file with its own certificate; "": it has none

    @property
    def address(self) -> str:
        """Return HOST:PORT for connections from this machine."""
        return shown_address(self.host, self.port)

    @property
    def url(self) -> str:
        """Return the URL for connections from this machine."""
        scheme = "https" if self.uses_tls else "http"
        return f"{scheme}://{self.address}"


class LaunchRecord(msgspec.Struct, kw_only=True):
    """What a running launcher has started. Commands without an address read it."""

    pid: PositiveCount  # process id of the launcher
    start_ticks: int = 0  # start time of the launcher, see `recorder.start_ticks`
    namespace: str
    name: str = ""  # the namespace, with a number if a deployment of this name runs already
    etcd: str = ""  # "": the servers are starting
    nats: str = ""
    # Files with credentials, for servers that the launcher has started. {role} stands for the role
    # of a process.
    etcd_credentials_file: str = ""
    nats_credentials_file: str = ""
    # File with the lines of all processes, see the module `launch.log_file`. "": there is no file.
    log_file: str = ""
    server_logs: dict[str, str] = msgspec.field(default_factory=dict)  # files by name: etcd, nats
    processes: list[ProcessRecord] = msgspec.field(default_factory=list)
    # Instance ids of workers that have ended, whose leases may not have expired yet.
    ended_instances: list[str] = msgspec.field(default_factory=list)

    @property
    def frontend(self) -> ProcessRecord | None:
        return next((process for process in self.processes if process.role == FRONTEND), None)

    @property
    def title(self) -> str:
        """Return the name, and the URL if there is a frontend."""
        frontend = self.frontend
        return self.name if frontend is None else f"{self.name} ({frontend.url})"

    @property
    def is_running(self) -> bool:
        """Return True if the launcher that wrote the record still runs."""
        return has_process(self.pid, self.start_ticks)


def has_process(pid: int, started: int) -> bool:
    """Return True if a process has this id and this start time (`recorder.start_ticks`)."""
    try:
        return start_ticks(pid) == started
    except OSError:
        return False


@contextmanager
def recorded(record: LaunchRecord, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Name a deployment, and keep its file while the context lasts.

    Args:
        record: the deployment of this process. Its name and the start time are set here.
        say: gets a line if the file can't be written. The deployment runs without the file, too.

    Yields:
        A function that writes the changed record.
    """
    record.name = record.namespace
    path: Path | None = None

    def write() -> None:
        if path is None:
            return
        try:
            _write(path, record)
        except OSError as exc:
            _report_failed_write(say, exc)

    try:
        folder = _created_folder()
        record.start_ticks = start_ticks(record.pid)
        with _locked(folder):
            _remove_stale(folder)
            names = {other.name for other in running_deployments()}
            record.name = _free_name(record.namespace, names)
            path = folder / f"{record.pid}{_SUFFIX}"
            _write(path, record)
    except OSError as exc:
        _report_failed_write(say, exc)
    try:
        yield write
    finally:
        if path is not None:
            # Readers ignore a file that is left, because its launcher has ended.
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _report_failed_write(say: Callable[[str], None], error: OSError) -> None:
    """Say that the record was not written: commands find no record, or the one before."""
    say(f"dynamo-trtllm status, stop and logs do not know this deployment as it is now: {error}")


def running_deployments() -> list[LaunchRecord]:
    """Return the deployments of this user's launchers that run on this machine, oldest first.

    Raises:
        ConfigError: the folder of their files is not this user's.
    """
    folder = _folder()
    try:
        check_owner(folder)
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise ConfigError(
            f"the deployments that run here can't be read: {exc}; set XDG_RUNTIME_DIR to a folder"
            " of your own"
        ) from exc
    records = []
    for path in folder.glob(f"*{_SUFFIX}"):
        # The launcher may end just now.
        with suppress(OSError, msgspec.DecodeError):
            record = msgspec.json.decode(path.read_bytes(), type=LaunchRecord)
            if record.is_running:
                records.append(record)
    return sorted(records, key=lambda record: (record.start_ticks, record.pid))


def running_deployment(name: str | None, how: str) -> LaunchRecord | None:
    """Return the deployment that a command without an address means.

    None: no deployment runs here.

    Args:
        name: the name of the deployment. Default: the only one that runs.
        how: how to choose a deployment, for the error: `with --deployment-name`.

    Raises:
        ConfigError: no deployment has this name; or no name is given, and several deployments run.
    """
    records = running_deployments()
    titles = ", ".join(record.title for record in records)
    if name is not None:
        for record in records:
            if record.name == name:
                return record
        unknown = f"no deployment named {name!r} runs on this machine"
        if not records:
            raise ConfigError(f"{unknown}; no other one does")
        raise ConfigError(f"{unknown}; these run: {titles}")
    if len(records) > 1:
        raise ConfigError(
            f"{len(records)} deployments run on this machine: {titles}; choose one {how}"
        )
    return records[0] if records else None


def frontend_here(name: str | None) -> tuple[str, str]:
    """Return the URL of the frontend that a command without --url means, and its certificate file.

    The file is "" if the frontend has no certificate of its own. Where no deployment runs, the URL
    is DEFAULT_FRONTEND.

    Args:
        name: the name of the deployment. Default: the only one that runs.

    Raises:
        ConfigError: as for `running_deployment`, or the deployment has no frontend.
    """
    record = running_deployment(name, "with --deployment-name, or pass --url")
    if record is None:
        return DEFAULT_FRONTEND, ""
    frontend = record.frontend
    if frontend is None:
        raise ConfigError(
            f"deployment {record.name} has no frontend, or none yet; see dynamo-trtllm status, or"
            " pass --url"
        )
    return frontend.url, frontend.certificate


def _folder() -> Path:
    return runtime_folder(process_environment()) / _FOLDER


def _created_folder() -> Path:
    """Create the folder if it does not exist, and return it. Only this user reads it.

    Raises:
        OSError: the folder can't be created, or other users could change it.
    """
    folder = _folder()
    for made in (folder.parent, folder):
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(made)
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let no other launcher choose a name during the block.

    Raises:
        OSError: another launcher holds the lock for too long.
    """
    with (folder / _LOCK).open("w", encoding="ascii") as file:
        _lock(file)
        yield


def _lock(file: IO[str]) -> None:
    deadline_s = time.monotonic() + _MAX_LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as exc:
            if time.monotonic() > deadline_s:
                raise OSError(f"another launcher holds {file.name}") from exc
        time.sleep(_LOCK_PAUSE_S)


def _remove_stale(folder: Path) -> None:
    """Remove the files of launchers that have ended. Call it with the lock."""
    running = {str(record.pid) for record in running_deployments()}
    for path in folder.iterdir():
        if path.suffix in (_SUFFIX, _NEW_SUFFIX) and path.stem not in running:
            path.unlink(missing_ok=True)


def _free_name(namespace: str, taken: Set[str]) -> str:
    """Return the namespace, with a number if that name is taken."""
    if namespace not in taken:
        return namespace
    names = (f"{namespace}-{number}" for number in itertools.count(2))
    return next(name for name in names if name not in taken)


def _write(path: Path, record: LaunchRecord) -> None:
    """Replace the file in one step. Readers see the former content or the new one."""
    written = path.with_suffix(_NEW_SUFFIX)
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(record))
    written.replace(path)
