"""An etcd or a nats-server of our own, at an address that stays the same whatever is done to it."""

from __future__ import annotations

import random
import shutil
import signal
import socket
from pathlib import Path
from typing import Literal

from dynamo_trtllm.launch.servers import LocalServer, start_etcd, start_nats

Kind = Literal["etcd", "nats"]
_PORTS = range(20_000, 32_000)  # below those that the system gives to connections, so that a port waits for its server


def free_port() -> int:
    """A loopback port that nobody listens on."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


class Server:
    """Blocks for tens of milliseconds in `start`; must be started by the main thread."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind = kind
        self._folder = folder
        self._ports = free_port(), free_port()
        self._server = self._start()
        self.address = self._server.address

    def _start(self) -> LocalServer:
        if self.kind == "etcd":
            return start_etcd(self._folder, self._ports)
        return start_nats(self._folder, self._ports[0])

    def send(self, number: signal.Signals) -> None:
        """Waits for its end, if the signal means one."""
        self._server.process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._server.process.wait(10)

    def start(self) -> None:
        """After its end: at the same address, on what it has on disk."""
        self._server = self._start()

    def lose_data(self) -> None:
        """After its end: the next start finds nothing."""
        for name in ("etcd", "jetstream"):
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def close(self) -> None:
        self._server.kill()
