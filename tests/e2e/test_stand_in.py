"""Workers with TensorRT-LLM's adapter over its stand-in: real processes, the bundled model.

One worker is started as examples/llmapi_launch.sh starts examples/embedded_trtllm.py. The checks of
a pair are those of tests/gpu/trtllm, which the real package is held to: here it is known that their
text works. They are long, because tests/contract has what they check without processes:
test_engine.py (two calls equal one), test_engine_trtllm_cancellation.py, test_engine_trtllm.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dynamo_trtllm.launch import demonstration
from tests.gpu.trtllm import checks
from tests.kit.cluster import TINY, Cluster, Process
from tests.kit.fake_packages import FAKES

pytestmark = pytest.mark.timeout(300)  # the first test also starts a worker

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join([str(FAKES), str(ROOT)])
# A pair of 1.2.1 has no log-probabilities, which show the tokens of an answer.
ENV = {
    "PYTHONPATH": PYTHONPATH,
    "STANDIN_BACKEND": "tcp",
    "STANDIN_RELEASE": "1.3.0rc29",
    "DYN_TRTLLM_WARM_UP_BUDGET_S": "0",  # a CPU has no kernels to compile
}
EXAMPLE = "example"
SITE = checks.Site(model=TINY, gpus=0, env=ENV)


class Example(NamedTuple):
    """A worker that the example for several nodes has started, with flags of any worker."""

    cluster: Cluster
    worker: Process


def start_example(cluster: Cluster, role: str, name: str) -> Process:
    flags = ["--model-path", TINY, "--served-model-name", name, "--system-port", "0"]
    flags += ["--disaggregation-mode", role]
    arguments = json.dumps(SITE.arguments(role))
    env = {
        **SITE.env,
        "PATH": os.pathsep.join([str(FAKES / "bin"), os.environ["PATH"]]),
        "PYTHON": sys.executable,
    }
    return cluster.script(
        [str(ROOT / "examples" / "llmapi_launch.sh")],
        [*flags, "--override-engine-args", arguments],
        env,
    )


@pytest.fixture(scope="module")
def cluster(etcd_server: str, nats_server: str) -> Iterator[Cluster]:
    cluster = Cluster(etcd_server, nats_server, f"stand-in-{secrets.token_hex(4)}")
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def example(cluster: Cluster) -> Example:
    worker = start_example(cluster, "prefill_and_decode", EXAMPLE)
    cluster.until_ready(EXAMPLE)
    return Example(cluster, worker)


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> checks.Served:
    """A pair, whose decode worker the example starts."""
    return checks.start(
        cluster,
        SITE,
        start_decode=lambda cluster: start_example(cluster, "decode", checks.PAIR),
    )


@pytest.fixture(scope="module")
def compared(served: checks.Served) -> checks.Served:
    """The pair, and an aggregated worker to compare it with."""
    aggregated = checks.start_worker(served.cluster, SITE, "prefill_and_decode", checks.AGGREGATED)
    checks.await_serving(aggregated)
    served.cluster.until_ready(checks.AGGREGATED)
    return dataclasses.replace(served, aggregated=aggregated)


def chat(cluster: Cluster, model: str) -> Mapping[str, Any]:
    """The demo's question, answered greedily."""
    with cluster.client() as client:
        answer = client.post(
            "/v1/chat/completions", json=demonstration.sample_request(model) | {"logprobs": True}
        )
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return {
        "message": choice["message"] | {"tool_calls": None},
        "reason": choice["finish_reason"],
        "tokens": [entry["token"] for entry in choice["logprobs"]["content"]],
    }


def test_launched_example_recites_the_answer_until_stopped(example: Example) -> None:
    """That the tokens are those of one engine is proved in tests/contract/test_engine_trtllm.py."""
    answer = chat(example.cluster, EXAMPLE)
    assert "Disaggregated serving" in answer["message"]["content"]
    assert answer["reason"] == "stop"
    assert len(answer["tokens"]) > 20
    example.worker.wait_for("STAND-IN: trtllm-llmapi-launch")
    example.worker.wait_for("STAND-IN: this is not TensorRT-LLM")
    example.worker.send(signal.SIGTERM)
    assert example.worker.wait(20.0) == 0
    example.cluster.until_status(EXAMPLE, 503)


@pytest.mark.long
def test_pair_recites_the_answer_of_the_model(served: checks.Served) -> None:
    assert "Disaggregated serving" in chat(served.cluster, checks.PAIR)["message"]["content"]


@pytest.mark.long
def test_answer_equals_one_engine_token_for_token(compared: checks.Served) -> None:
    cluster = compared.cluster
    assert chat(cluster, checks.PAIR) == chat(cluster, checks.AGGREGATED)


@pytest.mark.long
def test_workers_log_that_tensorrt_llm_is_a_stand_in(served: checks.Served) -> None:
    for worker in served.workers():
        worker.wait_for("STAND-IN: this is not TensorRT-LLM")


@pytest.mark.long
def test_greedy_when_split_over_two_engines_then_equal_to_one(compared: checks.Served) -> None:
    checks.check_parity(compared)


@pytest.mark.long
def test_cancel_when_tokens_flow_then_nothing_left(served: checks.Served) -> None:
    checks.check_cancellation(served)


@pytest.mark.long
def test_prompt_when_longer_than_a_step_then_chunked_or_refused(compared: checks.Served) -> None:
    checks.check_chunked_prefill(compared)


@pytest.mark.long
def test_attention_dp_when_on_then_tokens_equal_to_one_rank(compared: checks.Served) -> None:
    checks.check_attention_dp(compared)


@pytest.mark.long
def test_drain_when_a_request_runs_then_it_is_finished(served: checks.Served) -> None:
    checks.check_drain(served)


@pytest.mark.long
def test_executor_when_it_dies_then_the_worker_leaves(served: checks.Served) -> None:
    def kill(_: Process) -> None:
        """It dies of the request: the first of more than one token, which the worker's own start is
        not.
        """

    checks.check_death(served, kill, env={"STANDIN_TRAPS": "dies_of_long"})


@pytest.mark.long
def test_event_loop_blocked_by_dead_rank_ends_the_worker(served: checks.Served) -> None:
    """No signal would reach this worker, and its own checks do not run.

    The request blocks it before it has a token.
    """

    def leave(_: Process) -> None:
        """The request itself finds the dead rank."""

    checks.check_death(served, leave, env={"STANDIN_TRAPS": "submit_blocks"})


CONTRADICTIONS = [(["--stand-in"], "needs --engine trtllm"), (["--engine"], "needs a value")]


@pytest.mark.parametrize(("argv", "said"), CONTRADICTIONS)
def test_demo_when_flags_contradict_then_it_says_so(argv: list[str], said: str) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "demo", *argv], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert re.search(said, done.stderr)


def test_worker_without_package_explains_how_to_install_it(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "dynamo_trtllm", "--model", TINY, "--engine", "trtllm"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 2
    assert "pip install tensorrt-llm" in done.stderr.splitlines()[-1]


def test_example_without_tensorrt_llm_prints_one_line() -> None:
    command = [sys.executable, str(ROOT / "examples" / "embedded_trtllm.py")]
    worker = Process("", ["--model-path", TINY], dict(os.environ), command=command)
    assert worker.wait() == 2
    assert "pip install tensorrt-llm" in worker.lines[-1]
