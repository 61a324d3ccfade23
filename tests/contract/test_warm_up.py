"""The warm-up: its budget, its progress, failed steps, and the requests for every kind that an
engine supports.
"""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.vllm import compilation
from dynamo_trtllm.engines.warm_up import WarmUp, WarmUpStep, run_requests, variants
from dynamo_trtllm.observability.recorder import RECORDER
from dynamo_trtllm.observability.recordings import Recordings
from dynamo_trtllm.protocol.errors import RequestRejected
from dynamo_trtllm.protocol.messages import Role, Sampling
from dynamo_trtllm.testing.engine_requests import check_nothing_left, started
from tests.kit.engines import make, vllm_args
from tests.kit.fake_packages import RELEASES, fake_tensorrt_llm, fake_vllm
from tests.kit.small_tokenizer import write_tokenizer


def steps(
    ran: list[str], *names: str, warm_up: WarmUp | None = None, fails: str = ""
) -> list[WarmUpStep]:
    """Steps that note their names, with the progress during them."""

    def step(name: str) -> WarmUpStep:
        async def run() -> None:
            ran.append(name if warm_up is None else f"{name}: {warm_up.progress()}")
            if name == fails:
                raise RequestRejected("no such thing")

        return WarmUpStep(name, run)

    return [step(name) for name in names]


async def test_run_within_budget_completes_every_step() -> None:
    ran: list[str] = []
    warm_up = WarmUp(60.0)
    assert warm_up.progress() == ""
    assert await warm_up.run(steps(ran, "a", "b", "c", warm_up=warm_up)) == ()
    assert ran == ["a: warming up 1/3", "b: warming up 2/3", "c: warming up 3/3"]
    assert warm_up.progress() == ""


async def test_run_names_steps_that_exceed_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[str] = []
    with caplog.at_level(logging.WARNING):
        assert await WarmUp(0.0).run(steps(ran, "16383 tokens", "a seed")) == (
            "16383 tokens",
            "a seed",
        )
    assert ran == []
    assert "16383 tokens, a seed" in caplog.text
    assert "--warm-up-budget-s" in caplog.text


async def test_run_names_a_failed_step_and_continues(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[str] = []
    assert await WarmUp(60.0).run(steps(ran, "a", "b", fails="a")) == ("a",)
    assert ran == ["a", "b"]
    assert "no such thing" in caplog.text


@pytest.mark.parametrize("kind", ["mock", "torch", "vllm", "trtllm"])
async def test_variants_run_without_failure_or_leftovers(kind: str, gpt_oss: Path) -> None:
    with ExitStack() as stack:
        if kind == "vllm":
            stack.enter_context(fake_vllm())
        elif kind == "trtllm":
            stack.enter_context(fake_tensorrt_llm())
        engine = make(kind, gpt_oss, Role.AGGREGATED)
        try:
            info = await engine.start()
            asked = variants(engine, "tiny", info)
            assert len(asked) >= 3
            assert await WarmUp(60.0).run(asked) == ()
            await check_nothing_left(engine)
        finally:
            await engine.aclose()
    without = variants(engine, "tiny", replace(info, unsupported_features=("seed", "logprobs")))
    assert not {"a seed", "log-probabilities", "top-k of a seeded batch"} & {
        step.name for step in without
    }


async def test_torch_start_reads_the_tokenizer_for_formats(
    gpt_oss: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(gpt_oss, folder)
    write_tokenizer(folder)
    engine = make("torch", folder, Role.AGGREGATED, warm_up_budget_s=60.0)
    with caplog.at_level(logging.INFO):
        async with started(engine):
            assert "loaded the tokenizer for guided decoding" in caplog.text


@pytest.mark.parametrize("kind", ["mock", "torch"])
async def test_warm_up_is_not_recorded_as_a_request(
    kind: str, gpt_oss: Path, memory_path: Path
) -> None:
    RECORDER.start(memory_path, namespace="dynamo", kind="decode")
    try:
        engine = make(kind, gpt_oss, Role.AGGREGATED)
        async with started(engine):
            await run_requests(engine, "tiny", Sampling(max_tokens=2), 2)
    finally:
        RECORDER.stop()
    assert Recordings.read(memory_path).requests == {}


@pytest.mark.parametrize("version", RELEASES)
async def test_trtllm_start_shares_no_prefix_with_its_warm_up(
    version: str, gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    salts: list[list[str | None]] = []  # of each engine

    with fake_tensorrt_llm(version) as package:
        executor_class = package.executor.executor.GenerationExecutor
        submit = executor_class.submit

        def noted(executor: Any, submission: Any, result: Any) -> None:
            salts[-1].append(submission.cache_salt)
            submit(executor, submission, result)

        monkeypatch.setattr(executor_class, "submit", noted)
        for _ in range(2):
            salts.append([])
            engine = make("trtllm", gpt_oss, Role.AGGREGATED, warm_up_budget_s=60.0)
            async with started(engine):
                assert len(salts[-1]) > 1
    first, second = map(set, salts)
    if version == "1.0.0":  # which has no salts
        assert first == second == {None}
    else:
        assert None not in first | second
        assert not first & second


@pytest.mark.parametrize("budget_s", [60.0, 0.0])
async def test_vllm_start_warms_each_kernel_token_count(
    budget_s: float,
    gpt_oss: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/cache/vllm")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with fake_vllm():
        config = WorkerConfig(
            model_path=str(gpt_oss),
            warm_up_budget_s=budget_s,
            override_engine_args=vllm_args({"max_num_batched_tokens": 2048}),
        )
        from dynamo_trtllm.engines.vllm.engine import VllmEngine

        engine = VllmEngine(config, instance_id=1)
        try:
            with caplog.at_level(logging.INFO):
                await engine.start()
            passes = engine._llm.passes
            assert passes == (
                compilation.token_counts(engine._checkpoint, engine._llm.vllm_config)
                if budget_s
                else []
            )
            assert ("not reached" in caplog.text) == (budget_s == 0)
            assert os.environ["TRITON_CACHE_DIR"] == "/cache/vllm/triton"
            assert (
                "kernels compiled by the warm-up or loaded from the cache, per rank: 0"
                in caplog.text
            )
        finally:
            await engine.aclose()
