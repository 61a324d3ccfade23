"""Servers that a test may restart, pause and empty."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

from benchmarks.blocking import wait_for
from dynamo_trtllm.launch.local_servers import JETSTREAM, LocalServer, start_etcd, start_nats


class TestServer:
    """One etcd or nats-server that keeps its address over restarts."""

    __test__ = False

    def __init__(self, kind: str, data_dir: Path, nats_config: Path | None = None) -> None:
        """Start one.

        Args:
            kind: nats or etcd.
            data_dir: folder for its data and log.
            nats_config: configuration of nats-server.
        """
        self._data_dir = data_dir
        if kind == "etcd":
            starting = start_etcd(data_dir)
        elif nats_config is None:
            starting = start_nats(data_dir)
        else:
            starting = start_nats(data_dir, [*JETSTREAM, "--config", str(nats_config)])
        self._server: LocalServer = wait_for(starting)
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

    def reload(self) -> None:
        """Let nats-server read its configuration again."""
        os.kill(self.pid, signal.SIGHUP)

    def pause(self) -> None:
        """Stop the process with SIGSTOP. Connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
