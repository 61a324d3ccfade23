"""The command `serve` with real processes: a deployment, and, with --long, two side by side, which
differ in nothing but the port.
"""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import httpx
import pytest

from dynamo_trtllm.support.network.addresses import free_ports
from tests.kit.cluster import PLAIN
from tests.kit.launcher_process import WAIT_S, LauncherProcess, ask_until_answered
from tests.kit.waiting import SOON_S

SERVE = (sys.executable, "-m", "dynamo_trtllm.launch.serve")
MODEL = "tiny-gpt-oss"
MOCK = ["--engine", "mock"]  # starts faster than torch

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("flags", "others", "engine"),
    [
        (MOCK, 0, "mock: given with --engine"),
        pytest.param(
            [], 1, "torch: no NVIDIA GPU was found .*, and it runs on CPUs", marks=pytest.mark.long
        ),
    ],
    ids=["mock", "torch"],
)
def test_deployments_run_and_stop_independently(
    tmp_path: Path, flags: list[str], others: int, engine: str
) -> None:
    ports = [free_ports() for _ in range(1 + others)]
    started = []
    try:
        for port, own in zip(ports, (flags, *[MOCK] * others), strict=True):
            folder = tmp_path / str(port)
            folder.mkdir()
            argv = (MODEL, "--prefill", "1", "--decode", "1", "--port", str(port), *own)
            started.append(
                LauncherProcess(folder, *argv, command=SERVE, env={"CUDA_VISIBLE_DEVICES": ""})
            )
        for running, port in zip(started, ports, strict=True):
            running.wait_line(r"launch +\| topology: +1 prefill and 1 decode worker, as given")
            running.wait_line(rf"launch +\| Ready: http://localhost:{port}")
            ask_until_answered(port)
        first = started[0]
        first.wait_line(rf"launch +\| engine: +{engine}")
        messages = [{"role": "user", "content": "Is everything up and running?"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 16}
        url = f"http://localhost:{ports[0]}/v1/chat/completions"
        answer = httpx.post(
            url, json=body, headers={"x-dynamo-stats": "1"}, timeout=WAIT_S, **PLAIN
        ).json()
        assert answer["usage"]["completion_tokens"] > 0
        assert answer["dynamo_trtllm"]["kv_bytes"] > 0
        first.process.send_signal(signal.SIGINT)
        assert first.end() == (0, "")
        first.wait_gone(SOON_S)
        for other, port in zip(started[1:], ports[1:], strict=True):
            ask_until_answered(port)
            other.process.send_signal(signal.SIGINT)
            assert other.end() == (0, "")
            other.wait_gone(SOON_S)
        assert not [*tmp_path.glob("*/dynamo-*")]
        for running in started:
            assert not [line for line in running.lines if re.search(r"\b(ERROR|WARNING)\b", line)]
    finally:
        for running in started:
            running.close()
