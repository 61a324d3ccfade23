"""The size of the running engine's KV blocks, which a model class of newer builds may choose, and
their number.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.engines.trtllm import library
from dynamo_trtllm.protocol.errors import ConfigError, EngineFailed
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.testing.engine_requests import ask, check_stats, collect, prompt_of
from tests.kit.engines import make, prefill_params, prefill_then_decode
from tests.kit.fake_packages import RELEASES, fake_tensorrt_llm, shorten_waits
from tests.kit.instances import CARD, make_instance
from tests.kit.kv_index import KvIndex
from tests.kit.waiting import SOON_S

PROMPT = prompt_of(70)
NEWEST = "1.4.0rc1"
NOT_CHECKED = "the size of KV blocks can't be checked"


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_waits(monkeypatch)


@pytest.mark.parametrize("version", [*RELEASES, NEWEST])
async def test_start_reports_block_size_that_the_model_chooses(version: str, gpt_oss: Path) -> None:
    with fake_tensorrt_llm(version) as package, package.standin.traps.turned("model_defaults"):
        prefill, decode = (
            make("trtllm", gpt_oss, role, kv_cache_blocks=40)
            for role in (Role.PREFILL, Role.DECODE)
        )
        try:
            for engine in (prefill, decode):
                info = await engine.start()
                # 40 blocks of 32 tokens
                assert (info.layout.block_tokens, info.limits.kv_blocks) == (64, 20)
                assert engine.stats().kv_blocks_total == 20  # known from registration on
            assert await prefill_then_decode(prefill, decode, PROMPT)
            params = await prefill_params(prefill, PROMPT)
            assert params.layout.block_tokens == 64
            await check_stats(
                prefill, pending_kv_transfers=1, pending_kv_blocks=2
            )  # not three of 32 tokens
        finally:
            await prefill.aclose()
            await decode.aclose()


@pytest.mark.parametrize("version", [*RELEASES, NEWEST])
async def test_start_reports_capacity_for_the_release_block_size(
    version: str, gpt_oss: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_tensorrt_llm(version):
        engine = make("trtllm", gpt_oss, Role.AGGREGATED, kv_cache_blocks=40)
        with caplog.at_level(logging.INFO):
            info = await engine.start()
        await engine.aclose()
    assert (info.layout.block_tokens, info.limits.kv_blocks) == (32, 40)
    assert "KV cache: 40 blocks of 32 tokens" in caplog.text
    assert NOT_CHECKED not in caplog.text


@pytest.mark.parametrize("version", ["1.2.1", NEWEST])
async def test_start_when_block_sizes_differ_then_config_error(version: str, gpt_oss: Path) -> None:
    with (
        fake_tensorrt_llm(version) as package,
        package.standin.traps.turned("model_defaults", "block_size_fixed"),
    ):
        engine = make("trtllm", gpt_oss, Role.AGGREGATED, kv_block_size=16)
        with pytest.raises(
            ConfigError, match=r"tokens_per_block is 16 \(--override-engine-args\), but .* 64"
        ) as caught:
            await engine.start()
        await engine.aclose()
    assert caught.value.field == "kv_cache_config.tokens_per_block"


@pytest.mark.parametrize(
    ("version", "traps", "args"),
    [
        ("1.3.0rc29", ("no_block_size",), {}),
        ("1.3.0rc29", (), {"enable_iter_perf_stats": False}),
        ("1.1.0", ("stats_fail",), {}),
    ],
)
async def test_start_when_block_size_is_unknown_then_logs_once(
    version: str,
    traps: tuple[str, ...],
    args: dict[str, Any],
    gpt_oss: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "REPORT_S", 0.2)
    with fake_tensorrt_llm(version) as package, package.standin.traps.turned(*traps):
        engine = make("trtllm", gpt_oss, Role.AGGREGATED, **args)
        with caplog.at_level(logging.INFO):
            info = await engine.start()
        assert info.layout.block_tokens == 32
        assert await collect(engine, ask(PROMPT))
        await engine.check()
        await engine.aclose()
    assert caplog.text.count(NOT_CHECKED) == 1
    assert "32 tokens are assumed" in caplog.text


async def test_start_uses_block_size_of_the_engine_call(gpt_oss: Path) -> None:
    with fake_tensorrt_llm(NEWEST) as package, package.standin.traps.turned("model_defaults"):
        for args in ({"enable_iter_perf_stats": False}, {}):
            with package.standin.traps.turned("no_block_size"):
                engine = make("trtllm", gpt_oss, Role.AGGREGATED, kv_cache_blocks=40, **args)
                info = await engine.start()
                await engine.aclose()
            assert (info.layout.block_tokens, info.limits.kv_blocks) == (64, 20)


async def test_check_when_late_block_size_differs_then_engine_failed(
    gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "REPORT_S", 0.1)
    with fake_tensorrt_llm() as package, package.standin.traps.turned("model_defaults"):
        engine: Any = make("trtllm", gpt_oss, Role.AGGREGATED)
        with package.standin.traps.turned("stats_fail"):
            assert (await engine.start()).layout.block_tokens == 32
        await engine.check()
        async with asyncio.timeout(SOON_S):
            while not engine.library._stats_poller.has_reported:  # noqa: ASYNC110 - a thread changes it
                await asyncio.sleep(0.005)
        with pytest.raises(EngineFailed, match=r"64 tokens, but .* 32 .*tokens_per_block: 64"):
            await engine.check()
        await engine.aclose()


async def test_events_use_block_size_that_the_model_chooses(gpt_oss: Path) -> None:
    index = KvIndex(block_tokens=64)
    prompt = prompt_of(170)  # of its last block, 42 tokens
    with fake_tensorrt_llm("1.3.0rc29") as package, package.standin.traps.turned("model_defaults"):
        engine = make(
            "trtllm", gpt_oss, Role.AGGREGATED, kv_cache_config={"event_buffer_max_size": 64}
        )
        try:
            await engine.start()
            engine.start_kv_events(index.on_events)
            await collect(engine, ask(prompt, max_tokens=2))
            await index.until(prompt, 128)
            assert {len(ids) for _, ids, _ in index.blocks.values()} == {64}
        finally:
            await engine.aclose()


async def test_preflight_accepts_block_size_of_a_live_peer(gpt_oss: Path) -> None:
    with fake_tensorrt_llm("1.3.0rc29") as package, package.standin.traps.turned("model_defaults"):
        prefill, decode = (make("trtllm", gpt_oss, role) for role in (Role.PREFILL, Role.DECODE))
        info = await decode.start()
        await decode.aclose()
        peer = msgspec.structs.replace(
            make_instance(2, role=Role.DECODE),
            engine="trtllm",
            layout=info.layout,
            kv_compat=info.kv_compat,
            card=msgspec.structs.replace(CARD, context_length=info.context_length),
        )
        assert [
            found.rule for found in prefill.preflight([peer]) if found.severity == "error"
        ] == []
        own = make("trtllm", gpt_oss, Role.PREFILL, kv_block_size=32)
        assert "peer-layout" in [found.rule for found in own.preflight([peer])]
