"""How many files of the package a request passes: a reader of the code has to follow it.

`pytest -s` shows how many functions they are, and how many switches between files: functions whose
first call follows that of a function in another file.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.kit.cluster import Cluster, Process, events, until

ROOT = Path(__file__).resolve().parents[2]
RECORDER = ROOT / "tests" / "e2e" / "recorded_process.py"
# Today 85. Files are cut by subject, so this only notices a path that grows.
MAX_FILES = 86
# Renews leases; sends heartbeats; looks for clients that hung up; broadcasts the load, with the times
# that the worker has learned.
BESIDE = {
    "cluster/discovery/etcd_store.py",
    "cluster/discovery/etcd_connection.py",
    "cluster/request_plane/plane.py",
    "support/http_server/hangup_watch.py",
    "worker/health.py",
    "worker/cost_fit.py",
    "protocol/cost_model.py",
}
ASKED = {
    "model": "mock",
    "stream": True,
    "max_tokens": 20,
    "messages": [{"role": "user", "content": "Hi"}],
}


class Function(NamedTuple):
    file: str
    name: str
    line: int


class RecordedCluster(Cluster):
    """A cluster whose processes record the functions that they execute between two SIGUSR2."""

    def __init__(self, etcd: str, nats: str, folder: Path) -> None:
        self.folder = folder
        self.recorded: list[Path] = []
        super().__init__(etcd, nats, f"path-{secrets.token_hex(4)}")

    def _start(self, module: str, argv: Sequence[str], env: Mapping[str, str] = {}) -> Process:
        self.recorded.append(self.folder / f"{len(self.recorded)}.json")
        return self.script(
            [sys.executable, str(RECORDER), str(self.recorded[-1]), module], argv, env
        )

    def toggle(self) -> None:
        for process in self._processes:
            process.send(signal.SIGUSR2)

    def passed(self, client: httpx.Client) -> list[list[Function]]:
        """Ask. Return the functions of each process that were executed meanwhile."""
        self.toggle()
        self.ask(client)
        self.toggle()
        until(lambda: all(path.exists() for path in self.recorded), 30)
        return [self._taken(path) for path in self.recorded]

    @staticmethod
    def _taken(path: Path) -> list[Function]:
        functions = [Function(*function) for function in json.loads(path.read_text())]
        path.unlink()
        return functions

    def ask(self, client: httpx.Client) -> None:
        """Ask, and wait for the line of the log that follows the answer."""
        logged = len(self.frontend.lines)
        with client.stream("POST", "/v1/chat/completions", json=ASKED) as answer:
            assert answer.status_code == 200
            assert list(events(answer.iter_lines()))
        self.frontend.wait_for(r"request \S+ ended", after=logged)


@pytest.mark.long  # it checks the layout of the code and a page, and no behavior
def test_streamed_chat_passes_few_files(etcd_server: str, nats_server: str, tmp_path: Path) -> None:
    """Counts what two requests pass, because others than `BESIDE` may run beside one of them."""
    cluster = RecordedCluster(etcd_server, nats_server, tmp_path)
    try:
        for role in ("prefill", "decode"):
            cluster.mock(role, "mock")
        cluster.until_ready("mock")
        with cluster.client() as client:
            for _ in range(3):
                cluster.ask(client)
            first = cluster.passed(client)
            second = cluster.passed(client)
    finally:
        cluster.stop()
    paths = [
        [function for function in path if function in other and function.file not in BESIDE]
        for path, other in zip(first, second, strict=True)
    ]
    executed = {function.file for path in paths for function in path}
    num_functions = sum(map(len, paths))
    num_switches = sum(
        before.file != after.file for path in paths for before, after in itertools.pairwise(path)
    )
    print(f"{len(executed)} files, {num_functions} functions, {num_switches} switches")
    assert len(executed) <= MAX_FILES, "\n".join(sorted(executed))
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    path = page.partition("## Life of a request")[2].partition("\n## ")[0]
    named = re.findall(r"^\d+\. `([\w/]+\.py)`", path, re.MULTILINE)
    assert 10 < len(named) <= 15
    assert set(named) <= executed
