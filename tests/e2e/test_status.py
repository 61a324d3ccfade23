"""`dynamo-trtllm status` against real processes: by their frontend, by etcd, and where nothing runs."""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

from dynamo_trtllm.cli import status
from dynamo_trtllm.launch.launcher import LaunchRecord, ProcessRecord
from dynamo_trtllm.network.addresses import free_ports
from tests.e2e.cluster import Cluster

Status = Callable[..., tuple[int, str, str]]


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Status:
    """Run the command where no launcher runs. Return its exit status and what it says."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            status.main(words)
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.out, said.err

    return run


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_status_when_a_frontend_is_named_then_its_load_and_its_workers(mock_cluster: Cluster, show: Status) -> None:
    url = mock_cluster.frontend.url()
    code, said, _ = show("--url", url)
    lines = said.splitlines()
    namespace = mock_cluster.env["DYN_NAMESPACE"]
    problems = [line for line in lines if line.startswith("problem: ")]  # of models of other tests that have left
    assert code == bool(problems), said
    assert "model mock " not in " ".join(problems)
    assert lines[0] == f"deployment {namespace}: {'NOT READY' if problems else 'ready'}, {url}"
    assert [line for line in lines if re.match(r"model mock: (1 prefill, 1 decode|1 decode, 1 prefill) ", line)]
    (frontend,) = [line for line in lines if line.startswith("frontend ")]
    assert " ready " in frontend
    assert " 0 in flight, 0 queued" in frontend
    ids = {worker.instance() for worker in mock_cluster.workers()}
    assert ids <= {line.split()[0] for line in lines if " registered" in line}


def test_status_when_a_namespace_is_named_then_the_workers_in_etcd(mock_cluster: Cluster, show: Status) -> None:
    namespace = mock_cluster.env["DYN_NAMESPACE"]
    words = ("--etcd-endpoints", mock_cluster.env["ETCD_ENDPOINTS"], "--namespace", namespace, "--json")
    code, said, _ = show(*words)
    (report,) = json.loads(said)
    assert (code, report["namespace"]) == (0, namespace)
    assert {each["instance_id"] for each in report["processes"]} >= {
        worker.instance() for worker in mock_cluster.workers()
    }
    assert {each["role"] for each in report["processes"]} == {"prefill", "decode"}


def test_status_when_nothing_runs_then_one_line_says_where_it_looked(
    show: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_DEFAULT_URL", f"http://localhost:{free_ports()}")
    monkeypatch.setenv("DYN_TRTLLM_ETCD_ENDPOINTS", f"http://localhost:{free_ports()}")
    code, said, error = show("--timeout-s", "1")
    assert (code, said) == (1, "")
    assert error.startswith("dynamo-trtllm status: no deployment was launched on this machine, ")
    assert "start one with 'dynamo-trtllm demo'" in error
    assert error.count("\n") == 1


def test_status_when_a_server_does_not_answer_then_it_waits_no_longer_than_asked(show: Status, silent: int) -> None:
    begun = time.monotonic()
    code, _, error = show("--url", f"http://127.0.0.1:{silent}", "--timeout-s", "0.3")
    assert time.monotonic() - begun < 10
    assert code == 1
    assert f"no frontend answers at http://127.0.0.1:{silent} (no answer in time)" in error


class Loading(BaseHTTPRequestHandler):
    """A worker that still loads."""

    def do_GET(self) -> None:
        body = b'{"status": "loading", "reason": "weights", "instance_id": "ab"}'
        self.send_response(503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write no log."""


@pytest.fixture
def loading() -> Iterator[int]:
    """The port of a worker that still loads."""
    with HTTPServer(("127.0.0.1", 0), Loading) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def record(folder: Path, pid: int, namespace: str, **ports: int) -> None:
    """Write the record of a launcher, with a worker for each port."""
    processes = [
        ProcessRecord(name=name, role="decode", engine="mock", model="m", host="127.0.0.1", port=port, pid=os.getpid())
        for name, port in ports.items()
    ]
    content = LaunchRecord(pid=pid, namespace=namespace, etcd="https://etcd:2379", nats="", processes=processes)
    (folder / f"dynamo-launch-{namespace}").mkdir()
    (folder / f"dynamo-launch-{namespace}" / "deployment.json").write_bytes(msgspec.json.encode(content))


def test_status_when_workers_are_not_ready_then_their_state_and_status_1(
    show: Status, tmp_path: Path, silent: int, loading: int
) -> None:
    record(tmp_path, os.getpid(), "here", loads=loading, hangs=silent, starts=free_ports())
    record(tmp_path, 2**22 + 1, "gone", dead=1)  # a process id that no process can have
    (tmp_path / "dynamo-launch-empty").mkdir()
    code, said, _ = show("--timeout-s", "0.5")
    assert code == 1
    assert said.splitlines()[:2] == ["deployment here: NOT READY", "model m: 3 decode (engine mock)"]
    rows = {line.split()[0]: line for line in said.splitlines()}
    assert " loading: weights " in rows["loads"]
    assert " unreachable: no answer in time " in rows["hangs"]
    assert " starting " in rows["starts"]
    assert " registered " in rows["etcd"]  # with TLS: not asked
    assert "gone" not in said


def test_status_when_watched_in_a_pipe_then_a_line_of_json_each_time(
    show: Status, tmp_path: Path, loading: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, os.getpid(), "here", loads=loading)
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(status.asyncio, "sleep", pause)
    code, said, _ = show("--watch", "--json", "--interval-s", "0.25")
    assert (code, pauses) == (130, [0.25, 0.25])
    assert [json.loads(line)[0]["namespace"] for line in said.splitlines()] == ["here", "here"]
