"""vLLM behind our frontend and workers on real GPUs: what is answered, what is freed, what a kill
does.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from benchmarks.gpu import tokens
from benchmarks.gpu.deployment import GpuDeployment
from benchmarks.gpu.parity import Reference, parity
from benchmarks.gpu.plan import MODEL_NAME, Plan
from benchmarks.gpu.result import Row
from benchmarks.gpu.scenario import cancellations, kill_worker
from benchmarks.scrape import fetch
from tests.gpu.vllm.conftest import SIZES, plan_for, started

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]


def check(rows: list[Row]) -> None:
    """Every row that has a bar meets it."""
    missed = [f"{row.what}: {row.value}, wanted {row.bar}" for row in rows if row.met is False]
    assert not missed, "\n".join(missed)


async def test_answers_with_separate_prefill_equal_aggregated(
    pair: GpuDeployment, aggregated: Reference
) -> None:
    rows, detail = await parity(pair.url, aggregated, SIZES)
    check(rows[:2])  # one at a time: under load the answers of dummy weights differ from run to run
    assert detail["alone"] == detail["aggregated alone"] == []
    assert detail["different answers"] > SIZES.parity_prompts // 2, (
        "the model says the same to everything"
    )


async def test_first_request_needs_no_handshake(pair: GpuDeployment) -> None:
    (record,) = await tokens.send(
        pair.url,
        tokens.prompts(1, 300, seed=3),
        osl=8,
        concurrency=1,
        extra=tokens.SAMPLED,
        timeout_s=30.0,
    )
    assert record.is_ok
    assert record.first_s is not None
    assert fetch(f"{pair.url}/v1/models/{MODEL_NAME}/ready")


async def test_streams_when_many_run_at_once_then_all_get_their_tokens(pair: GpuDeployment) -> None:
    records = await tokens.send(
        pair.url,
        tokens.prompts(48, 1000, seed=4),
        osl=32,
        concurrency=24,
        extra=tokens.SAMPLED,
        timeout_s=300.0,
    )
    assert [record.error for record in records if not record.is_ok] == []
    assert {record.output_tokens for record in records} == {32}
    assert {record.prompt_tokens for record in records} == {1000}


async def test_kv_when_clients_leave_at_random_then_free(pair: GpuDeployment) -> None:
    rows, detail = await cancellations(pair, SIZES)
    check(rows)
    assert detail["left"] > 0, "no client left in time"


async def test_kernels_are_not_compiled_for_requests(pair: GpuDeployment) -> None:
    """The log of a ready worker: vLLM's monitor, which the warm-up turns off, logs each later
    compilation.
    """
    for extra in (
        {"logprobs": 5},
        {"top_k": 20, "seed": 1},
        {"top_p": 0.9, "seed": 1},
        {"top_k": 9, "top_p": 0.9},
    ):
        for count in (1, 8, 24):
            given = tokens.prompts_between(count, 10, 3000, seed=count)
            records = await tokens.send(
                pair.url, given, osl=4, concurrency=count, extra=tokens.SAMPLED | extra
            )
            assert [record.error for record in records if not record.is_ok] == []
    assert [line for line in pair.lines if "JIT compilation during inference" in line] == []


@pytest.mark.parametrize("victim", ["decode", "prefill"])
async def test_killed_worker_successor_serves_and_holds_nothing(
    pair: GpuDeployment, victim: str
) -> None:
    rows, _ = await kill_worker(pair, victim, SIZES)
    check(rows)


def test_answers_with_wider_decode_are_complete_and_stable(
    model: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plan: Plan = plan_for(model, 3, first=1)
    for deployed in started(plan, tmp_path_factory.mktemp("log") / "unequal.log"):
        given = tokens.prompts_between(8, 100, 4000, seed=5)
        asked: dict[str, Any] = {
            "osl": 16,
            "concurrency": 1,
            "extra": tokens.GREEDY,
            "keep_text": True,
        }
        first, again = (
            tokens.texts(asyncio.run(tokens.send(deployed.url, given, **asked))) for _ in range(2)
        )
        assert None not in first.values()
        assert first == again
