"""The examples as somebody would run them: with real etcd and NATS, a frontend in front, until SIGTERM.

Those for TensorRT-LLM serve in tests/e2e/test_stand_in.py.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.cluster import TINY, Cluster, Process

pytestmark = pytest.mark.timeout(240)

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_torch_when_embedded_then_it_serves_beside_other_work_and_leaves_when_told(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster()
    flags = {"--etcd-endpoints": "ETCD_ENDPOINTS", "--nats-server": "NATS_SERVER", "--namespace": "DYN_NAMESPACE"}
    argv = [text for flag, name in flags.items() for text in (flag, cluster.env[name])]
    worker = cluster.script([sys.executable, str(EXAMPLES / "embedded_torch.py")], argv)
    worker.instance()
    cluster.until_status("embedded", 200)
    with cluster.client() as client:
        body = {"model": "embedded", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0
    worker.send(signal.SIGTERM)
    assert worker.wait(20.0) == 0
    cluster.until_status("embedded", 503)


def test_trtllm_when_it_is_not_installed_then_the_script_says_so_in_one_line() -> None:
    command = [sys.executable, str(EXAMPLES / "embedded_trtllm.py")]
    worker = Process("", ["--model-path", TINY], dict(os.environ), command=command)
    assert worker.wait(20.0) == 2
    assert "pip install tensorrt-llm" in worker.lines[-1]
