"""The LLM is made with arguments in the form that each release takes, and never shuts down on the
event loop.
"""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.protocol.errors import ConfigError, EngineFailed
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.testing.engine_requests import prompt_of, started
from tests.kit.engines import answer, make
from tests.kit.fake_packages import RELEASES, fake_tensorrt_llm

PROMPT = prompt_of(70)
NGRAM = {"decoding_type": "NGram", "max_draft_len": 4}
SPARSE = {"algorithm": "dsa"}


@pytest.mark.parametrize("version", RELEASES)
async def test_start_uses_the_class_that_config_names(version: str, gpt_oss: Path) -> None:
    given: dict[str, Any] = {"speculative_config": NGRAM}
    if version >= "1.2":
        given["sparse_attention_config"] = SPARSE
    with fake_tensorrt_llm(version):
        engine = make("trtllm", gpt_oss, Role.AGGREGATED, **given)
        async with started(engine):
            found = engine._llm.args  # type: ignore[attr-defined]
            assert (found["speculative_config"].name, found["speculative_config"].values) == (
                "NGram",
                {"max_draft_len": 4},
            )
            assert version < "1.2" or found["sparse_attention_config"].name == "dsa"
    assert NGRAM == {"decoding_type": "NGram", "max_draft_len": 4}


@pytest.mark.parametrize("version", ["1.1.0", "1.2.1", "1.3.0rc29"])
async def test_start_when_config_class_is_unknown_then_config_error(
    version: str, gpt_oss: Path
) -> None:
    with fake_tensorrt_llm(version):
        engine = make(
            "trtllm", gpt_oss, Role.AGGREGATED, speculative_config={"decoding_type": "Oracle"}
        )
        with pytest.raises(ConfigError, match="Oracle"):
            await engine.start()


@pytest.mark.parametrize("version", RELEASES)
async def test_shutdown_after_executor_error_is_off_the_event_loop(
    version: str, gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for all ranks, so /live would not answer, and the worker would not restart."""
    threads = []
    with fake_tensorrt_llm(version) as package:
        executor = importlib.import_module("tensorrt_llm.executor").GenerationExecutor
        shutdown = executor.shutdown

        def recorded(self: Any) -> None:
            threads.append(threading.current_thread().name)
            shutdown(self)

        monkeypatch.setattr(executor, "shutdown", recorded)
        engine = make("trtllm", gpt_oss, Role.AGGREGATED)
        async with started(engine):
            with package.standin.traps.turned("executor_dies"), pytest.raises(EngineFailed):
                await answer(engine, PROMPT)
        await engine.aclose()
    assert set(threads) == {"trtllm-error-shutdown", "trtllm-shutdown"}


@pytest.mark.parametrize("version", RELEASES)
async def test_start_keeps_defaults_of_the_model_class(version: str, gpt_oss: Path) -> None:
    with fake_tensorrt_llm(version) as package, package.standin.traps.turned("model_defaults"):
        engine = make("trtllm", gpt_oss, Role.AGGREGATED)
        async with started(engine):
            assert engine._llm.args["attn_backend"] == "FLASHINFER"  # type: ignore[attr-defined]
            assert await answer(engine, PROMPT)
        own = make("trtllm", gpt_oss, Role.AGGREGATED, attn_backend="TRTLLM")  # the user's wish
        with pytest.raises(EngineFailed, match="Executor worker returned error"):
            await own.start()
        await own.aclose()


@pytest.mark.parametrize("place", ["environment", "env_overrides"])
def test_engine_with_unrepeatable_prefill_is_rejected(
    place: str, gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TRTLLM_ENABLE_CONTEXT_FIRST_NO_RETRY_KV_TRANSFER_RETIREMENT"
    given: dict[str, Any] = {"env_overrides": {name: "1"}} if place == "env_overrides" else {}
    if place == "environment":
        monkeypatch.setenv(name, "1")
    with fake_tensorrt_llm("1.3.0rc29"), pytest.raises(ConfigError, match=name):
        make("trtllm", gpt_oss, Role.PREFILL, **given)
