"""Workers with the real TensorRT-LLM. Needs `pip install tensorrt-llm`, GPUs and a model:

pytest tests/gpu/trtllm --gpu -m trtllm --trtllm-model FOLDER
"""

from __future__ import annotations

import signal

import psutil
import pytest

from tests.gpu.trtllm import checks
from tests.kit.cluster import Process

pytestmark = [pytest.mark.gpu, pytest.mark.trtllm, pytest.mark.timeout(3600)]


def test_greedy_when_split_over_two_engines_then_equal_to_one(served: checks.Served) -> None:
    checks.check_parity(served)


def test_cancel_when_tokens_flow_then_nothing_left(served: checks.Served) -> None:
    checks.check_cancellation(served)


def test_prompt_when_longer_than_a_step_then_chunked_or_refused(served: checks.Served) -> None:
    checks.check_chunked_prefill(served)


def test_attention_dp_when_on_then_tokens_equal_to_one_rank(served: checks.Served) -> None:
    if served.site.gpus < 2:
        pytest.skip("attention DP over two ranks needs two GPUs")
    checks.check_attention_dp(served)


def test_drain_when_a_request_runs_then_it_is_finished(served: checks.Served) -> None:
    checks.check_drain(served)


def test_executor_when_a_rank_is_killed_then_the_worker_leaves(served: checks.Served) -> None:
    def kill_ranks(worker: Process) -> None:
        for child in psutil.Process(worker.pid).children(recursive=True):
            child.send_signal(signal.SIGKILL)

    checks.check_death(served, kill_ranks)
