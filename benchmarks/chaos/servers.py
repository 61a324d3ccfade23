"""An etcd or a nats-server of our own, at an address that stays the same whatever is done to it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from benchmarks.blocking import wait_for
from dynamo_trtllm.launch.servers import JETSTREAM, start_etcd, start_nats

Kind = Literal["etcd", "nats"]


class Server:
    """Blocks for tens of milliseconds in `start`. `flags`: of nats-server."""

    def __init__(self, kind: Kind, folder: Path, flags: Sequence[str] = JETSTREAM) -> None:
        self.kind = kind
        self._folder = folder
        self._server = wait_for(start_etcd(folder) if kind == "etcd" else start_nats(folder, flags=flags))
        self.address = self._server.address

    def send(self, number: signal.Signals) -> None:
        """Waits for its end, if the signal means one."""
        with suppress(ProcessLookupError):
            os.kill(self._server.pid, number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            wait_for(self._server.ended())

    def start(self) -> None:
        """After its end: at the same address, on what it has on disk."""
        self._server = wait_for(self._server.restart())

    def lose_data(self) -> None:
        """After its end: the next start finds nothing."""
        for name in ("etcd", "jetstream"):
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def close(self) -> None:
        self._server.kill()
        wait_for(self._server.ended())
