"""`dynamo-trtllm explain` against real processes: running, frozen and killed ones, one of them of
another machine.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from dynamo_trtllm.cli import explain
from tests.kit.cluster import Cluster, Process, until

CHAT = "/v1/chat/completions"
STUCK = ("--stuck", "--older-than-s", "1.5")
ASKED = {"model": "mock", "max_tokens": 10, "messages": [{"role": "user", "content": "Hi"}]}
# Runs a worker as on another machine: it has another boot, whose clock began an hour earlier.
OTHER_MACHINE = """
import runpy, time
now = time.monotonic_ns
time.monotonic_ns = lambda: now() + 3600 * 10**9
from dynamo_trtllm.observability import recorder
recorder.boot_id = lambda: b"0" * 36
runpy.run_module("dynamo_trtllm", run_name="__main__", alter_sys=True)
"""
LIFE = (  # of a request, in the order of the events in each process
    "frontend received",
    "frontend tokenized: 68 prompt tokens, at most 10 output tokens",
    "frontend placed: prefill PREFILL, decode DECODE",
    "frontend call sent: prefill at PREFILL",
    "prefill call received: prefill of 68 prompt tokens",
    "prefill kv published",
    "frontend call sent: decode at DECODE",
    "decode call received: decode of 68 prompt tokens",
    "decode kv fetched",
    "decode first token",
    "frontend first token",
    "decode call ended: 10 tokens, length",
    "frontend last token: 10 tokens, length",
    "frontend finished: HTTP 200, 10 tokens, length",
)


def check_life(said: str, prefill: str, decode: str) -> None:
    """The lines of the timeline contain those of `LIFE`, those of each process in their order."""
    lines = [re.sub(r"^ *\S+ +(\S+) \S+ +", r"\1 ", line) for line in said.splitlines()]
    for process in ("frontend", "prefill", "decode"):
        rest = iter(lines)
        for wanted in LIFE:
            if wanted.startswith(process):
                wanted = wanted.replace("PREFILL", prefill).replace("DECODE", decode)
                found = any(line.startswith(wanted) for line in rest)
                assert found, f"no line {wanted!r} in:\n{said}"


def prefill_of_another_machine(cluster: Cluster, folder: Path) -> tuple[Process, tuple[str, ...]]:
    """Start a prefill worker of another machine.

    Return the flags with which `explain` reaches it, too.
    """
    role = ("--disaggregation-mode", "prefill", "--recorder-dir", str(folder))
    prefill = cluster.script(
        [sys.executable, "-c", OTHER_MACHINE], ["--engine", "mock", "--model", "mock", *role]
    )
    names = {
        "--etcd-endpoints": "ETCD_ENDPOINTS",
        "--nats-server": "NATS_SERVER",
        "--namespace": "DYN_NAMESPACE",
    }
    addresses = (word for flag, name in names.items() for word in (flag, cluster.env[name]))
    return prefill, (*addresses, "--timeout-s", "10")


def begin_stream(cluster: Cluster) -> threading.Thread:
    """Begin a stream on a thread, and wait until its decode worker generates tokens.

    The first token may come from the prefill worker. The frontend may be killed.
    """
    started = threading.Event()

    def stream() -> None:
        body = ASKED | {"stream": True, "max_tokens": 10_000}
        with (
            suppress(httpx.HTTPError),
            cluster.client() as own,
            own.stream("POST", CHAT, json=body) as response,
        ):
            lines = (line for line in response.iter_lines() if line)
            for number, _ in enumerate(lines):
                if number == 4:
                    started.set()

    thread = threading.Thread(target=stream)
    thread.start()
    assert started.wait(10)
    return thread


def test_explain_reports_frozen_and_killed_processes(
    make_cluster: Callable[..., Cluster], memory_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--recorder-dir", str(memory_path))

    def said(*words: str, status: int | None = 0, reaches: Sequence[str] = ("--local",)) -> str:
        with pytest.raises(SystemExit) as ended:
            explain.main([*flags, *reaches, *words])
        output = capsys.readouterr()
        assert status in (None, ended.value.code), output
        return output.out

    cluster = make_cluster(flags=(*flags, "--stall-timeout-s", "60"))
    decode = cluster.mock("decode", "mock", *flags, step_s=0.02)
    prefill, reaches = prefill_of_another_machine(cluster, memory_path / "other")
    cluster.until_ready("mock")
    ids = prefill.instance(), decode.instance()
    with cluster.client() as client:
        answer = client.post(CHAT, json=ASKED, headers={"X-Request-Id": "job-7"}).json()["id"]
        life = said("job-7", reaches=reaches)
        check_life(life, *ids)
        assert re.search(
            rf"^note: prefill {ids[0]} is on machine .*; its times are exact to ±\d",
            life,
            re.MULTILINE,
        )
        prefill.send(signal.SIGSTOP)
        silent = said("--stuck", status=1, reaches=(*reaches, "--timeout-s", "1"))
        assert f"process prefill {ids[0]}: it has not answered for 1 s" in silent
        prefill.send(signal.SIGCONT)
        thread = begin_stream(cluster)
        decode.send(signal.SIGSTOP)
        frozen = f"held by decode {ids[1]}: it is frozen"
        until(lambda: frozen in said(*STUCK, status=None), 10)
        (line,) = [line for line in said(*STUCK, status=1).splitlines() if frozen in line]
        running = re.search(r"request (\w+):", line)
        assert running is not None
        for process in (decode, cluster.frontend):
            process.send(signal.SIGKILL)
            process.wait()
        thread.join(10)
    check_life(said(answer, reaches=reaches), *ids)
    of_running = said(running[1])
    assert "not finished, its frontend was killed" in of_running
    assert f"note: decode {ids[1]}" in of_running
    trace = memory_path / "trace.jsonl"
    said("--trace", str(trace))
    assert [json.loads(line) for line in trace.read_text().splitlines()] == [
        {"timestamp": 0, "input_length": 68, "output_length": 10, "hash_ids": [0]}
    ]
    said("chatcmpl-unknown", status=1)
