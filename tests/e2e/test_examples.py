"""The examples as somebody would run them: with real etcd and NATS, a frontend in front, until SIGTERM."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import TINY, Cluster, Process
from tests.fakes_path import FAKES

pytestmark = pytest.mark.timeout(240)

EXAMPLES = Path(__file__).parents[2] / "examples"
STAND_IN = {"PYTHONPATH": str(FAKES), "STANDIN_CARRIER": "tcp"}


@pytest.fixture(scope="module")
def cluster(etcd_server: str, nats_server: str) -> Iterator[Cluster]:
    made = Cluster(etcd_server, nats_server, f"examples-{secrets.token_hex(4)}")
    yield made
    made.stop()


def check_serves(cluster: Cluster, worker: Process, model: str) -> None:
    worker.instance()
    cluster.until_status(model, 200)
    with cluster.client() as client:
        body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0
    worker.send(signal.SIGTERM)
    assert worker.wait(20.0) == 0
    cluster.until_status(model, 503)


def test_torch_when_embedded_then_it_serves_beside_other_work_and_leaves_when_told(cluster: Cluster) -> None:
    env = cluster.env
    flags = {"--etcd-endpoints": "ETCD_ENDPOINTS", "--nats-server": "NATS_SERVER", "--namespace": "DYN_NAMESPACE"}
    argv = [text for flag, name in flags.items() for text in (flag, env[name])]
    worker = cluster.script([sys.executable, str(EXAMPLES / "embedded_torch.py")], argv)
    check_serves(cluster, worker, "embedded")


def test_trtllm_when_embedded_then_it_serves_with_every_flag_of_a_worker(cluster: Cluster) -> None:
    argv = ["--model-path", TINY, "--served-model-name", "mine", "--max-batch-size", "4"]
    worker = cluster.script([sys.executable, str(EXAMPLES / "embedded_trtllm.py")], argv, STAND_IN)
    check_serves(cluster, worker, "mine")


def test_trtllm_when_started_by_its_launcher_then_rank_0_serves(cluster: Cluster) -> None:
    path = os.pathsep.join([str(FAKES / "bin"), os.environ["PATH"]])
    argv = ["--model-path", TINY, "--served-model-name", "ranks"]
    command = [str(EXAMPLES / "llmapi_launch.sh")]
    worker = cluster.script(command, argv, {**STAND_IN, "PATH": path, "PYTHON": sys.executable})
    worker.wait_for("STAND-IN: trtllm-llmapi-launch")
    check_serves(cluster, worker, "ranks")


def test_trtllm_when_it_is_not_installed_then_the_script_says_so_in_one_line() -> None:
    command = [sys.executable, str(EXAMPLES / "embedded_trtllm.py")]
    worker = Process("", ["--model-path", TINY], dict(os.environ), command=command)
    assert worker.wait(20.0) == 2
    assert "pip install tensorrt-llm" in worker.lines[-1]
