"""Run an etcd or nats-server process that has the same address after a restart."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from dynamo_trtllm.launch.local_servers import JETSTREAM, start_etcd, start_nats

from .blocking import wait_for

Kind = Literal["etcd", "nats"]


class Server:
    """One server process."""

    def __init__(self, kind: Kind, folder: Path, flags: Sequence[str] = JETSTREAM) -> None:
        """Start the server with its data in `folder`. `flags` are for nats-server."""
        self.kind = kind
        self._folder = folder
        self._server = wait_for(
            start_etcd(folder) if kind == "etcd" else start_nats(folder, flags=flags)
        )
        self.address = self._server.address

    def send(self, number: signal.Signals) -> None:
        """Send a signal. After SIGKILL or SIGTERM, wait until the process has ended."""
        with suppress(ProcessLookupError):
            os.kill(self._server.pid, number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            wait_for(self._server.ended())

    def start(self) -> None:
        """Start the server again after it has ended, at the same address and with the same data."""
        self._server = wait_for(self._server.restart())

    def lose_data(self) -> None:
        """Delete the data of a server that has ended."""
        for name in ("etcd", "jetstream"):
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def close(self) -> None:
        self._server.kill()
        wait_for(self._server.ended())
