"""Statistics of the trtllm engine outlive whatever TensorRT-LLM does when it has none."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.engines.trtllm.reports.statistics import StatsPoller
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.testing.engine_requests import check_stats, prompt_of, started
from tests.kit.engines import make, prefill_params
from tests.kit.fake_packages import RELEASES, fake_tensorrt_llm, shorten_waits
from tests.kit.waiting import SOON_S

PROMPT = prompt_of(70)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_waits(monkeypatch)


@pytest.mark.parametrize("version", RELEASES)
async def test_statistics_continue_after_failure(
    version: str, gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_tensorrt_llm(version) as package:
        executor_class = package.executor.executor.GenerationExecutor
        rounds = [asyncio.Event()]  # each is set by a call that began in its round and gave nothing
        loop = asyncio.get_running_loop()
        get_stats = executor_class.get_stats

        def watched(executor: Any, *args: Any) -> Any:
            rows: list[Any] = []
            ended = rounds[-1]
            try:
                rows = get_stats(executor, *args)
            finally:
                if not rows:  # it raised, or there were none
                    loop.call_soon_threadsafe(ended.set)
            return rows

        monkeypatch.setattr(executor_class, "get_stats", watched)
        engine = make("trtllm", gpt_oss, Role.PREFILL, ttl_s=60.0)
        async with started(engine):
            for held, traps in enumerate([(), ("stats_fail",), ("stats_rpc_fails",)], 1):
                with package.standin.traps.turned(*traps):
                    rounds.append(asyncio.Event())
                    await asyncio.wait_for(rounds[-1].wait(), SOON_S)
                await prefill_params(engine, PROMPT)
                await check_stats(engine, pending_kv_transfers=held, kv_blocks_used=3 * held)


@pytest.mark.parametrize("version", RELEASES[:2])
async def test_statistics_are_read_when_they_come_continuously(version: str, gpt_oss: Path) -> None:
    with fake_tensorrt_llm(version):
        engine: Any = make("trtllm", gpt_oss, Role.AGGREGATED)
        async with started(engine), asyncio.timeout(SOON_S):
            while not engine.stats().kv_blocks_total:
                engine._llm._executor.note_step()
                await asyncio.sleep(0.005)


async def test_statistics_are_read_after_a_pause_without_a_request(gpt_oss: Path) -> None:
    with fake_tensorrt_llm(RELEASES[0]):
        engine: Any = make("trtllm", gpt_oss, Role.AGGREGATED)
        async with started(engine), asyncio.timeout(SOON_S):
            await asyncio.sleep(3 * StatsPoller.timeout_s)
            poller = engine.library._stats_poller
            before = time.monotonic()
            engine._llm._executor.note_step()
            while poller.changed_at < before:  # noqa: ASYNC110 - a thread sets it
                await asyncio.sleep(0.005)


async def test_start_without_statistics_warns_once(
    gpt_oss: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        logged = [record for record in caplog.records if record.levelno == logging.WARNING]
        return [record.message for record in logged if "enable_iter_perf_stats" in record.message]

    with fake_tensorrt_llm():
        async with started(make("trtllm", gpt_oss, Role.AGGREGATED)):
            assert warnings() == []
        engine = make("trtllm", gpt_oss, Role.AGGREGATED, enable_iter_perf_stats=False)
        async with started(engine):
            (warning,) = warnings()
            assert "reports no KV blocks" in warning
            assert engine.stats().kv_blocks_total == 0


@pytest.mark.parametrize(("stages", "num_steps"), [(1, 4), (2, 0)])
async def test_steps_are_measured_except_in_a_pipeline(
    stages: int, num_steps: int, gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(number: int) -> dict[str, Any]:
        batch = {
            "numGenRequests": 2,
            "numGenKvTokens": 90,
            "numCtxTokens": 0,
            "numContextRequests": 0,
        }
        # ten apart
        times = {"timestamp": f"11-24-2026 01:00:00.{number:02}0000", "iterLatencyMS": 9.0}
        return {
            "iter": number,
            "numNewActiveRequests": 0,
            "numActiveRequests": 2,
            "inflightBatchingStats": batch,
            **times,
        }

    polls = iter([[row(0)], [row(n) for n in range(1, 6)]])
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def get_stats(llm: Any, timeout: float) -> Any:
        if (rows := next(polls, None)) is None:
            loop.call_soon_threadsafe(ended.set)
        return rows

    with fake_tensorrt_llm("1.3.0rc29") as package:
        monkeypatch.setattr(package.LLM, "get_stats", get_stats)
        engine = make("trtllm", gpt_oss, Role.AGGREGATED, pipeline_parallel_size=stages)
        async with started(engine):
            await asyncio.wait_for(ended.wait(), SOON_S)
            assert [step[1:] for step in engine.steps] == [(2, 90, 0, 0.0)] * num_steps
            assert [step.seconds for step in engine.steps] == pytest.approx([0.009] * num_steps)


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc29"])
async def test_statistics_count_kv_of_all_data_parallel_ranks(version: str, gpt_oss: Path) -> None:
    async def total_kv(**args: Any) -> int:
        engine = make("trtllm", gpt_oss, Role.AGGREGATED, kv_cache_blocks=400, **args)
        async with started(engine):
            await check_stats(engine, kv_blocks_total=400)
            return engine.stats().kv_blocks_total

    with fake_tensorrt_llm(version):
        assert (
            await total_kv()
            == await total_kv(enable_attention_dp=True, tensor_parallel_size=4)
            == 400
        )
