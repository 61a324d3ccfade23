"""`dynamo-trtllm explain` against real processes: running, frozen and killed ones."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from dynamo_trtllm.cli import explain
from tests.e2e.cluster import Cluster, until

CHAT = "/v1/chat/completions"
ASKED = {"model": "mock", "max_tokens": 10, "messages": [{"role": "user", "content": "Hi"}]}
LIFE = (  # of a request, in the order of the events
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
    """The lines of the timeline contain those of `LIFE` in their order."""
    lines = [re.sub(r"^ *\S+ +(\S+) \S+ +", r"\1 ", line) for line in said.splitlines()]
    rest = iter(lines)
    for wanted in LIFE:
        wanted = wanted.replace("PREFILL", prefill).replace("DECODE", decode)
        assert any(line.startswith(wanted) for line in rest), f"no line {wanted!r} in:\n{said}"


def test_explain_when_processes_are_frozen_and_killed_then_it_explains_their_requests(
    make_cluster: Callable[..., Cluster], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--recorder-dir", str(tmp_path))

    def said(*words: str, status: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            explain.main([*flags, *words])
        output = capsys.readouterr()
        assert ended.value.code == status, output
        return output.out

    def stuck() -> str:
        with pytest.raises(SystemExit):
            explain.main([*flags, "--stuck", "--older-than-s", "1.5"])
        return capsys.readouterr().out

    cluster = make_cluster(flags=(*flags, "--stall-timeout-s", "60"))
    prefill, decode = (cluster.mock(role, "mock", *flags, step_s=0.02) for role in ("prefill", "decode"))
    cluster.until_ready("mock")
    ids = prefill.instance(), decode.instance()
    with cluster.client() as client:
        answer = client.post(CHAT, json=ASKED, headers={"X-Request-Id": "job-7"}).json()["id"]
        for name in (answer, "job-7"):
            check_life(said(name), *ids)
        started = threading.Event()

        def stream() -> None:
            with (
                suppress(httpx.HTTPError),  # its frontend is killed
                cluster.client() as own,
                own.stream("POST", CHAT, json=ASKED | {"stream": True, "max_tokens": 10_000}) as response,
            ):
                for _ in response.iter_lines():
                    started.set()

        thread = threading.Thread(target=stream)
        thread.start()
        assert started.wait(10)
        decode.send(signal.SIGSTOP)
        frozen = f"held by decode {ids[1]}: it is frozen"
        until(lambda: frozen in stuck(), 10)
        (line,) = [line for line in stuck().splitlines() if frozen in line]
        running = re.search(r"request (\w+):", line)
        assert running is not None
        for process in (decode, cluster.frontend):
            process.send(signal.SIGKILL)
            process.wait()
        thread.join(10)
    check_life(said(answer), *ids)
    of_running = said(running[1])
    assert "not finished, its frontend was killed" in of_running
    assert f"note: decode {ids[1]}" in of_running
    trace = tmp_path / "trace.jsonl"
    said("--trace", str(trace))
    assert [json.loads(line) for line in trace.read_text().splitlines()] == [
        {"timestamp": 0, "input_length": 68, "output_length": 10, "hash_ids": [0]}
    ]
    said("chatcmpl-unknown", status=1)
