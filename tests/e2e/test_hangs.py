"""Planted hangs: `explain --stuck` names the process that holds the request, and why."""

from __future__ import annotations

import json
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_trtllm.cli.stuck_requests import StuckReport
from dynamo_trtllm.observability.recorder import RecordedEvent
from dynamo_trtllm.observability.recordings import Recordings
from tests.kit.cluster import PLAIN, TINY, Cluster, Process, until
from tests.kit.servers import TestServer

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

ASKED: dict[str, Any] = {
    "model": "mock",
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "Hi"}],
}
LONG = ASKED | {"stream": True, "max_tokens": 20_000}
SILENT_S = 1.5
PATIENT = ("--stall-timeout-s", "100")  # so that no side gives up


class Hanging:
    """A cluster with long timeouts, whose processes record into one folder."""

    def __init__(self, etcd: str, nats: str, folder: Path) -> None:
        self.folder = folder
        self._etcd = etcd
        self._nats = nats
        self._threads: list[threading.Thread] = []
        self.clusters: list[Cluster] = []

    def start(
        self, *flags: str, roles: tuple[str, ...] = ("prefill", "decode"), **engine_args: Any
    ) -> list[Process]:
        """Start a frontend with these flags and workers with these engine arguments.

        Return the processes.
        """
        recorder = ("--recorder-dir", str(self.folder))
        namespace = f"hang-{secrets.token_hex(4)}"
        without_probes = ("--probe-interval-s", "0")
        cluster = Cluster(
            self._etcd, self._nats, namespace, (*PATIENT, *recorder, *without_probes, *flags)
        )
        self.clusters.append(cluster)
        workers = [self.add(role, **engine_args) for role in roles]
        for worker in workers:
            worker.instance()
        if len(roles) == 2:
            cluster.until_ready("mock")
        return [cluster.frontend, *workers]

    def add(
        self, role: str, *, before: str = "", env: Mapping[str, str] = {}, **engine_args: Any
    ) -> Process:
        """Start another worker. `before`: Python code that it runs first, which plants a fault."""
        argv = [
            "--engine",
            "mock",
            "--model",
            "mock",
            "--disaggregation-mode",
            role,
            "--system-port",
            "0",
        ]
        argv += ["--lease-ttl-s", "100", *PATIENT, "--recorder-dir", str(self.folder)]
        argv += ["--override-engine-args", json.dumps({"step_s": 0.02} | engine_args)]
        run = "import runpy; runpy.run_module('dynamo_trtllm', run_name='__main__', alter_sys=True)"
        return self.clusters[-1].script([sys.executable, "-c", f"{before}\n{run}"], argv, env)

    def start_torch(self, **engine_args: Any) -> Process:
        """Start a frontend and workers of the torch engine. Return the decode worker."""
        recorder = ("--recorder-dir", str(self.folder))
        cluster = Cluster(
            self._etcd, self._nats, f"hang-{secrets.token_hex(4)}", (*PATIENT, *recorder)
        )
        self.clusters.append(cluster)
        args = ("--override-engine-args", json.dumps(engine_args))
        flags = (*PATIENT, *recorder, *args, "--lease-ttl-s", "100")
        workers = [cluster.torch(role, TINY, *flags) for role in ("prefill", "decode")]
        cluster.until_ready(TINY)
        return workers[1]

    def ask(self, body: dict[str, Any]) -> None:
        """Send a request in a thread, which ends with the cluster."""
        url = self.clusters[-1].frontend.url()

        def run() -> None:
            with (
                suppress(httpx.HTTPError),
                httpx.Client(base_url=url, timeout=200, **PLAIN) as client,
            ):
                client.post("/v1/chat/completions", json=body)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def recorded(self, event: RecordedEvent, title: str, count: int = 1) -> None:
        """Wait until processes of this kind have recorded an event so often."""

        def has() -> bool:
            processes = Recordings.read(self.folder).processes
            entries = [
                entry
                for process in processes
                if process.title.startswith(title)
                for entry in process.entries
            ]
            return sum(entry.event == event for entry in entries) >= count

        until(has, 20)

    def check(self, holder: str, reason: str, said: str = "held by ") -> None:
        """Wait until a line of `--stuck` names this holder and reason, after `said`."""
        last = ""

        def is_named() -> bool:
            nonlocal last
            last = StuckReport.of(Recordings.read(self.folder), SILENT_S).text()
            return any(f"{said}{holder}" in line and reason in line for line in last.splitlines())

        try:
            print(f"named after {until(is_named, 15):.1f} s:")
        finally:
            print(last)

    def stop(self) -> None:
        for cluster in self.clusters:
            for process in (cluster.frontend, *cluster.workers()):
                with suppress(ProcessLookupError):
                    process.send(signal.SIGKILL)
            cluster.stop()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def hanging(etcd_server: str, nats_server: str, memory_path: Path) -> Iterator[Hanging]:
    made = Hanging(etcd_server, nats_server, memory_path)
    try:
        yield made
    finally:
        made.stop()


def test_hang_when_the_decode_worker_is_frozen_then_it(hanging: Hanging) -> None:
    _, _, decode = hanging.start()
    hanging.ask(LONG)
    hanging.recorded(RecordedEvent.FIRST_TOKEN, "frontend")
    decode.send(signal.SIGSTOP)
    hanging.check("decode", "frozen")


def test_hang_when_the_decode_worker_is_killed_then_it(hanging: Hanging) -> None:
    _, _, decode = hanging.start()
    hanging.ask(LONG)
    hanging.recorded(RecordedEvent.FIRST_TOKEN, "frontend")
    decode.send(signal.SIGKILL)
    hanging.check("decode", "killed or crashed")


def test_hang_when_the_prefill_worker_is_frozen_then_it(hanging: Hanging) -> None:
    _, prefill, _ = hanging.start()
    prefill.send(signal.SIGSTOP)
    hanging.ask(ASKED)
    hanging.check("prefill", "frozen")


def test_hang_when_the_frontend_is_frozen_then_it(hanging: Hanging) -> None:
    frontend, _, decode = hanging.start()
    hanging.ask(LONG)
    hanging.recorded(RecordedEvent.FIRST_TOKEN, "frontend")
    frontend.send(signal.SIGSTOP)
    decode.send(signal.SIGSTOP)  # it would go on for 400 s
    hanging.check("frontend", "frozen")


def test_hang_explained_when_prefill_freezes_before_fetch(hanging: Hanging) -> None:
    _, prefill, decode = hanging.start()
    decode.send(signal.SIGSTOP)
    hanging.ask(ASKED)
    hanging.recorded(RecordedEvent.CALL_SENT, "frontend", count=2)
    prefill.send(signal.SIGSTOP)
    decode.send(signal.SIGCONT)
    hanging.check("prefill", "fetches KV from it")


def test_hang_explained_when_kv_blocks_are_exhausted(hanging: Hanging) -> None:
    _, _, decode = hanging.start(kv_cache_blocks=4)
    decode.send(signal.SIGSTOP)  # the KV of the first prompt stays
    hanging.ask(ASKED)
    hanging.recorded(RecordedEvent.KV_PUBLISHED, "prefill")
    hanging.ask(ASKED)
    hanging.check("prefill", "waits for KV blocks")


def test_hang_explained_when_transfer_buffer_is_full(hanging: Hanging) -> None:
    decode = hanging.start_torch(kv_staging_gib=0.0012, max_seq_len=1024)
    decode.send(signal.SIGSTOP)
    for _ in range(3):
        hanging.ask(ASKED | {"model": TINY, "messages": [{"role": "user", "content": "Hi " * 300}]})
    hanging.check("prefill", "waits for space in the transfer buffer")


def test_hang_when_the_batch_is_full_then_the_engine_s_queue(hanging: Hanging) -> None:
    hanging.start("--decode-fallback", max_batch_size=1, step_s=5.0)
    hanging.ask(ASKED)
    hanging.ask(ASKED)
    hanging.check("prefill", "engine's queue, behind 1 call")


def test_hang_explained_when_a_prompt_takes_long(hanging: Hanging) -> None:
    hanging.start(prefill_tokens_per_step=1, step_s=1.0)
    hanging.ask(ASKED)
    hanging.check("prefill", "has not computed its prompt")


def test_hang_when_the_frontend_is_full_then_its_queue(hanging: Hanging) -> None:
    hanging.start("--max-inflight", "1", step_s=10.0)
    hanging.ask(ASKED)
    hanging.recorded(RecordedEvent.PLACED, "frontend")
    hanging.ask(ASKED)
    hanging.check("frontend", "--max-inflight")


def test_hang_when_a_role_has_no_worker_then_the_wait_for_one(hanging: Hanging) -> None:
    frontend, _, decode = hanging.start("--hold-for-roles-s", "100")
    decode.send(signal.SIGTERM)
    decode.wait()
    hanging.ask(ASKED)
    hanging.check(f"frontend {frontend.pid}", "no worker can take it")


def test_hang_explained_when_the_body_does_not_arrive(hanging: Hanging) -> None:
    frontend, *_ = hanging.start()
    host, port = frontend.url().removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        )
        client.sendall(b"Content-Length: 1000\r\n\r\n{")
        hanging.check("frontend", "body has not arrived")


def test_hang_when_the_client_does_not_read_then_the_client(hanging: Hanging) -> None:
    frontend, *_ = hanging.start(step_s=0.0)
    host, port = frontend.url().removeprefix("http://").split(":")
    body = httpx.Request("POST", frontend.url(), json=LONG | {"max_tokens": 60_000}).read()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        )
        client.sendall(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        hanging.check("the client of frontend", "does not read")


@pytest.mark.parametrize("is_running", [False, True])
def test_hang_when_nats_is_frozen_then_the_lost_message(
    etcd_server: str, tmp_path: Path, memory_path: Path, is_running: bool
) -> None:
    nats = TestServer("nats", tmp_path / "nats")
    hanging = Hanging(etcd_server, nats.address, memory_path)
    try:
        hanging.start()
        if is_running:
            hanging.ask(ASKED | {"max_tokens": 100})
            hanging.recorded(RecordedEvent.FIRST_TOKEN, "frontend")
        nats.pause()
        if is_running:
            hanging.check("NATS", "has not received the end")
        else:
            hanging.ask(ASKED)
            hanging.check("NATS", "the call has not arrived at prefill")
    finally:
        nats.resume()
        hanging.stop()
        nats.stop()


def test_hang_when_the_frontend_is_killed_then_the_worker_s_call(hanging: Hanging) -> None:
    frontend, _, decode = hanging.start()
    hanging.ask(LONG)
    hanging.recorded(RecordedEvent.FIRST_TOKEN, "frontend")
    decode.send(signal.SIGSTOP)
    frontend.send(signal.SIGKILL)
    frontend.wait()
    hanging.check("decode", "its frontend is gone")


def test_hang_explained_when_etcd_is_frozen(
    nats_server: str, tmp_path: Path, memory_path: Path
) -> None:
    etcd = TestServer("etcd", tmp_path / "etcd")
    hanging = Hanging(etcd.address, nats_server, memory_path)
    try:
        frontend, _ = hanging.start("--hold-for-roles-s", "100", roles=("prefill",))
        frontend.wait_for("model mock is loaded")
        etcd.pause()
        hanging.ask(ASKED)
        hanging.add("decode")
        hanging.check("etcd", "etcd has not answered it")
    finally:
        etcd.resume()
        hanging.stop()
        etcd.stop()


_AHEAD = """
import time
date, date_ns = time.time, time.time_ns
time.time = lambda: date() + 3600
time.time_ns = lambda: date_ns() + 3600 * 10**9
"""


def test_hang_when_the_date_of_a_worker_is_wrong_then_it(hanging: Hanging) -> None:
    hanging.start(roles=("prefill",))
    decode = hanging.add("decode", before=_AHEAD)
    decode.instance()
    hanging.ask(ASKED)
    hanging.check(f"{decode.pid}, decode", "its date is 3600 s ahead", said="process ")


_FAILING = """
from dynamo_trtllm.engines.mock.engine import MockEngine
from dynamo_trtllm.protocol.errors import TransferFailed
async def fail(*_):
    raise TransferFailed("no route")
MockEngine.import_kv = fail
"""


def test_hang_when_the_only_pair_is_quarantined_then_it(hanging: Hanging) -> None:
    _, prefill = hanging.start("--hold-for-roles-s", "100", roles=("prefill",))
    decode = hanging.add("decode", before=_FAILING)
    pair = f"{prefill.instance()} -> {decode.instance()}"
    for _ in range(3):
        hanging.ask(ASKED)
    hanging.check("frontend", f"pair {pair} is quarantined")


def test_hang_explained_when_a_decode_step_does_not_end(hanging: Hanging) -> None:
    hanging.start(roles=("prefill",))
    hanging.add("decode", step_s=1000.0).instance()
    hanging.clusters[-1].until_ready("mock")
    hanging.ask(LONG)
    hanging.check("decode", "has generated 1 tokens of the call, and no more")


class LossyNats:
    """A proxy of a NATS server for one client, which drops the last frame of the client's first
    stream.
    """

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("nats://").split(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"nats://127.0.0.1:{self._listener.getsockname()[1]}"
        self.dropped = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with (
            self._listener,
            self._listener.accept()[0] as client,
            socket.create_connection(self._server) as server,
        ):
            answers = threading.Thread(target=self._pass_answers, args=(server, client))
            answers.start()
            with suppress(OSError), client.makefile("rb") as lines:
                for line in lines:
                    words = line.split()
                    message = line + (lines.read(int(words[-1]) + 2) if words[0] == b"PUB" else b"")
                    if not self.dropped.is_set() and b"length" in message:
                        self.dropped.set()
                    else:
                        server.sendall(message)
            server.shutdown(socket.SHUT_RDWR)
            answers.join()

    def _pass_answers(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)

    def close(self) -> None:
        self._thread.join()


def test_hang_when_one_message_is_lost_then_nats(hanging: Hanging, nats_server: str) -> None:
    hanging.start(roles=("prefill",))
    lossy = LossyNats(nats_server)
    try:
        hanging.add("decode", env={"NATS_SERVER": lossy.address}).instance()
        hanging.ask(ASKED)
        assert lossy.dropped.wait(20)
        hanging.check("NATS", "has not received the end")
    finally:
        hanging.stop()
        lossy.close()
