"""Servers that a test may restart, pause and empty."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

from benchmarks.blocking import wait_for
from dynamo_trtllm.launch.servers import LocalServer, start_etcd, start_nats


class TestServer:
    """One etcd or nats-server that keeps its address over restarts."""

    __test__ = False

    def __init__(self, kind: str, data_dir: Path) -> None:
        self._data_dir = data_dir
        start = start_nats if kind == "nats" else start_etcd
        self._server: LocalServer = wait_for(start(data_dir))
        self.address = self._server.address

    @property
    def pid(self) -> int:
        return self._server.pid

    def stop(self) -> None:
        self.resume()
        wait_for(self._server.stop())

    def kill(self) -> None:
        self._server.kill()
        wait_for(self._server.ended())

    def start(self) -> None:
        """Start again after `stop` or `kill`, with the same data and port."""
        self._server = wait_for(self._server.restart())

    def restart(self) -> None:
        self.stop()
        self.start()

    def lose_data(self) -> None:
        """Delete the data after `stop`."""
        shutil.rmtree(self._data_dir / "etcd", ignore_errors=True)

    def pause(self) -> None:
        """Stop the process with SIGSTOP. Connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
