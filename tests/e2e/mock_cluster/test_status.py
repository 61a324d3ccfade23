"""`dynamo-trtllm status` against real processes: by their frontend, by etcd, and where nothing
runs.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from dynamo_trtllm.cli import status
from dynamo_trtllm.launch.running_deployments import LaunchRecord, ProcessRecord
from dynamo_trtllm.observability.recorder import start_ticks
from dynamo_trtllm.support.network.addresses import free_ports
from tests.kit.cluster import Cluster
from tests.kit.waiting import SOON_S

Status = Callable[..., tuple[int, str, str]]
Server = Callable[..., int]


@pytest.fixture
def show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Status:
    """Run the command where no launcher runs. Return its exit status and what it says."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

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


def test_status_of_frontend_shows_load_and_workers(mock_cluster: Cluster, show: Status) -> None:
    url = mock_cluster.frontend.url()
    code, said, _ = show("--url", url)
    lines = said.splitlines()
    namespace = mock_cluster.env["DYN_NAMESPACE"]
    # of models of other tests that have left
    problems = [line for line in lines if line.startswith("not ready: ")]
    assert code == bool(problems), said
    assert "model mock " not in " ".join(problems)
    assert lines[0] == f"deployment {namespace}: {'NOT READY' if problems else 'ready'}, {url}"
    assert [
        line
        for line in lines
        if re.match(r"model mock: (1 prefill, 1 decode|1 decode, 1 prefill) ", line)
    ]
    (frontend,) = [line for line in lines if line.startswith("frontend ")]
    assert " ready " in frontend
    assert " 0 in flight, 0 queued" in frontend
    ids = {worker.instance() for worker in mock_cluster.workers()}
    assert ids <= {line.split()[0] for line in lines if " registered" in line}


def test_status_of_namespace_shows_workers_or_suggestions(
    mock_cluster: Cluster, show: Status, tmp_path: Path
) -> None:
    namespace = mock_cluster.env["DYN_NAMESPACE"]
    words = (
        "--etcd-endpoints",
        mock_cluster.env["ETCD_ENDPOINTS"],
        "--namespace",
        namespace,
        "--json",
    )
    code, said, _ = show(*words)
    (report,) = json.loads(said)
    assert (code, report["namespace"]) == (0, namespace)
    assert {process["instance_id"] for process in report["processes"]} >= {
        worker.instance() for worker in mock_cluster.workers()
    }
    assert {process["role"] for process in report["processes"]} == {"prefill", "decode"}
    record(tmp_path, os.getpid(), "here", starts=free_ports())
    code, said, error = show(
        "--etcd-endpoints", mock_cluster.env["ETCD_ENDPOINTS"], "--namespace", "nope"
    )
    assert (code, said) == (1, "")
    assert (
        "only here was launched on this machine, etcd has no worker in namespace nope (it has"
        " workers in " in error
    )
    assert namespace in error


def test_status_when_nothing_runs_then_names_the_address(
    show: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "DEFAULT_FRONTEND", f"http://localhost:{free_ports()}")
    monkeypatch.setenv("DYN_TRTLLM_ETCD_ENDPOINTS", f"http://localhost:{free_ports()}")
    code, said, error = show("--timeout-s", "1")
    assert (code, said) == (1, "")
    assert error.startswith("dynamo-trtllm status: no deployment was launched on this machine, ")
    assert "start one with 'dynamo-trtllm demo'" in error
    assert error.count("\n") == 1


def test_status_waits_no_longer_than_asked(show: Status, silent: int) -> None:
    begun = time.monotonic()
    code, _, error = show("--url", f"http://127.0.0.1:{silent}", "--timeout-s", "0.3")
    assert time.monotonic() - begun < 10
    assert code == 1
    assert f"no frontend answers at http://127.0.0.1:{silent} (no answer in time)" in error


class Answers(BaseHTTPRequestHandler):
    """An HTTP handler with one status and body for each path."""

    bodies: ClassVar[Mapping[str, tuple[int, str]]] = {}
    together: threading.Barrier | None = None  # answers wait until so many requests are there

    def do_GET(self) -> None:
        if self.together is not None:
            self.together.wait(SOON_S)
        status, body = self.bodies.get(self.path.partition("?")[0], (404, ""))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Write no log."""


@pytest.fixture
def server() -> Iterator[Server]:
    """Start servers that answer with these bodies by path. Return their ports."""
    with ExitStack() as stack:

        def start(
            bodies: Mapping[str, tuple[int, str]], together: threading.Barrier | None = None
        ) -> int:
            handler = type("Given", (Answers,), {"bodies": bodies, "together": together})
            served = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), handler))
            thread = threading.Thread(target=served.serve_forever, args=(0.01,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(served.shutdown)
            return served.server_port

        yield start


@pytest.fixture
def loading(server: Server) -> int:
    """The port of a worker that still loads."""
    return server(
        {"/ready": (503, '{"status": "loading", "reason": "weights", "instance_id": "ab"}')}
    )


def health(*ids: str, model: str = "m", **more: object) -> str:
    """Return `/health` of a frontend that knows these workers. `more`: other fields."""
    instances = [
        {"id": instance_id, "namespace": "here", "role": "decode", "model": model, "engine": "mock"}
        for instance_id in ids
    ]
    body = {"status": "healthy", "instances": instances, "mismatched": []}
    return json.dumps(body | more)


def record(folder: Path, pid: int, namespace: str, ended: Sequence[str] = (), **ports: int) -> None:
    """Write the record of a launcher, with a frontend, or a worker whose instance has its name, for
    each port.
    """
    processes = [
        ProcessRecord(
            name=name,
            role="frontend" if name == "frontend" else "decode",
            engine="" if name == "frontend" else "mock",
            model="" if name == "frontend" else "m",
            host="127.0.0.1",
            port=port,
            pid=os.getpid(),
            instance_id="" if name == "frontend" else name,
        )
        for name, port in ports.items()
    ]
    content = LaunchRecord(
        pid=pid,
        start_ticks=start_ticks(pid) if pid == os.getpid() else 1,
        namespace=namespace,
        name=namespace,
        etcd="https://etcd:2379",
        nats="",
        processes=processes,
        ended_instances=[*ended],
    )
    records = folder / "dynamo_trtllm" / "deployments"
    records.mkdir(mode=0o700, parents=True, exist_ok=True)
    (records / f"{pid}.json").write_bytes(msgspec.json.encode(content))


def test_status_of_unready_workers_exits_with_1(
    show: Status, tmp_path: Path, silent: int, loading: int
) -> None:
    record(tmp_path, os.getpid(), "here", loads=loading, hangs=silent, starts=free_ports())
    record(tmp_path, 2**22 + 1, "gone", dead=1)  # a process id that no process can have
    code, said, _ = show("--timeout-s", "0.5")
    assert code == 1
    assert said.splitlines()[:2] == [
        "deployment here: NOT READY",
        "model m: 3 decode (engine mock)",
    ]
    rows = {line.split()[0]: line for line in said.splitlines()}
    assert " loading: weights " in rows["loads"]
    assert " unreachable: no answer in time " in rows["hangs"]
    assert " starting " in rows["starts"]
    assert " registered " in rows["etcd"]  # with TLS: not asked
    assert "gone" not in said


def test_status_of_frozen_or_restarted_worker_has_one_row(
    show: Status, tmp_path: Path, server: Server, silent: int
) -> None:
    frontend = server(
        {"/ready": (200, '{"status": "ready"}'), "/health": (200, health("frozen", "old", "far"))}
    )
    record(tmp_path, os.getpid(), "here", ended=["old"], frontend=frontend, frozen=silent)
    _, said, _ = show("--timeout-s", "0.5")
    rows = [line.split()[:3] for line in said.splitlines()[5:]]
    assert rows == [
        ["frontend", "frontend", "ready"],
        ["frozen", "decode", "unreachable:"],
        ["far", "decode", "registered"],
    ]


def test_status_shows_pairs_that_fail_beside_one_that_works(show: Status, server: Server) -> None:
    pairs = [
        {"prefill": "a", "decode": "b", "state": "working", "reason": ""},
        {"prefill": "a", "decode": "c", "state": "quarantined", "reason": "unknown key"},
    ]
    body = health("a", "b", "c", "d", pairs=pairs, mismatched=["instance d: no key"])
    port = server({"/ready": (200, '{"status": "ready"}'), "/health": (200, body)})
    code, said, _ = show("--url", f"http://127.0.0.1:{port}")
    assert code == 0  # as /v1/models/m/ready
    assert said.startswith("deployment here: ready, ")
    assert "problem: instance d: no key\n" in said
    assert "problem: the pair prefill a, decode c gets no requests: unknown key\n" in said
    assert "decode b" not in said


def test_status_is_not_ready_for_the_reason_in_health(show: Status, server: Server) -> None:
    body = health("a", status="not_ready", message="model m has no decode worker")
    port = server({"/ready": (200, '{"status": "ready"}'), "/health": (200, body)})
    code, said, _ = show("--url", f"http://127.0.0.1:{port}")
    assert code == 1
    assert said.startswith("deployment here: NOT READY, ")
    assert "not ready: model m has no decode worker\n" in said


REJECTED = (401, '{"error": {"message": "the API key is not valid"}}')


def test_status_says_that_the_frontend_rejects_it(show: Status, server: Server) -> None:
    port = server({"/ready": (200, '{"status": "ready"}'), "/health": REJECTED})
    code, _, error = show("--url", f"http://127.0.0.1:{port}", "--api-key", "of-another-server")
    assert code == 1
    assert f"http://127.0.0.1:{port}/health" in error
    assert "rejects a client with an API key (status 401: the API key is not valid)" in error
    assert "DYN_TRTLLM_API_KEY" in error
    assert "no frontend answers" not in error
    assert "of-another-server" not in error


def test_status_of_launched_processes_that_reject_it(
    show: Status, server: Server, tmp_path: Path
) -> None:
    frontend = server(
        {"/ready": (200, '{"status": "ready"}'), "/health": REJECTED, "/metrics": REJECTED}
    )
    record(tmp_path, os.getpid(), "here", frontend=frontend)
    code, said, _ = show()
    assert code == 1  # nothing is known of the models
    assert f"http://127.0.0.1:{frontend}/metrics rejects a client with no API key" in said
    assert "unreachable" not in said
    assert said.startswith("deployment here: its state is not known, ")
    assert "not known: the health of the models: " in said


def test_status_requests_share_one_timeout(show: Status, tmp_path: Path, server: Server) -> None:
    both = threading.Barrier(2)
    frontend = server(
        {"/ready": (503, '{"status": "loading"}'), "/health": (200, health("far"))}, both
    )
    record(tmp_path, os.getpid(), "here", frontend=frontend)
    for words in ((), ("--url", f"http://127.0.0.1:{frontend}")):
        _, said, error = show("--timeout-s", "5", *words)
        assert " registered " in said, error


def test_status_when_text_of_others_is_shown_then_it_is_escaped(
    show: Status, server: Server
) -> None:
    bodies = {
        "/ready": (503, '{"status": "a\\u001b[2Jb"}'),
        "/health": (200, health("far", model="m\x1b[31m")),
    }
    _, said, _ = show("--url", f"http://127.0.0.1:{server(bodies)}")
    assert "a\\x1b[2Jb" in said
    assert "m\\x1b[31m" in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    "url", ["http://user:secret@x:1", "https://user:secret@x:1", "http://x:1/a"]
)
def test_status_rejects_unused_address_parts(show: Status, url: str) -> None:
    code, _, error = show("--url", url)
    assert code == 2
    assert "needs http://HOST:PORT or https://HOST:PORT, without a password or path" in error
    assert "secret" not in error


def test_status_of_another_service_is_no_deployment(show: Status, server: Server) -> None:
    port = server(
        {"/ready": (200, '{"status": "ok"}'), "/health": (200, '{"status": "ok", "instances": []}')}
    )
    code, said, error = show("--url", f"http://127.0.0.1:{port}")
    assert (code, said) == (1, "")
    assert "the answer is not that of a frontend" in error


def test_status_watched_in_a_pipe_prints_json_lines(
    show: Status,
    tmp_path: Path,
    loading: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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
