"""What the running engine reports about its KV cache, and when a worker must not serve with it."""

from __future__ import annotations

import logging
import threading
from typing import Any
from unittest.mock import Mock

import pytest

from dynamo_trtllm.engines.trtllm.library import TrtllmLibrary
from dynamo_trtllm.engines.trtllm.reports.kv_cache import KvCacheSize, kv_cache_size, size_change
from dynamo_trtllm.engines.trtllm.reports.statistics import StatsPoller
from dynamo_trtllm.protocol.messages import Role
from tests.kit.cases import each_case
from tests.unit.engines.trtllm.fake_bindings import make


@each_case(
    ("reported", "size"),
    [
        ({"maxNumBlocks": 9, "tokensPerBlock": 64, "usedNumBlocks": 1}, KvCacheSize(9, 64)),
        ({"maxNumBlocks": 9, "tokensPerBlock": None}, KvCacheSize(9, 0)),
        ({"maxNumBlocks": 9}, KvCacheSize(9, 0)),
        ({"maxNumBlocks": -1, "tokensPerBlock": "64"}, KvCacheSize()),
        ({}, KvCacheSize()),
        (None, KvCacheSize()),
    ],
)
def test_size_of_missing_or_wrong_value_is_not_reported(
    reported: dict[str, Any] | None, size: KvCacheSize
) -> None:
    assert kv_cache_size(reported) == size


@pytest.mark.parametrize(("reported", "changed"), [(0, False), (32, False), (64, True)])
def test_changed_size_names_both_values(reported: int, changed: bool) -> None:
    text = size_change(32, KvCacheSize(block_tokens=reported))
    assert bool(text) is changed
    assert (
        all(part in text for part in ("64 tokens", "32 tokens", "tokens_per_block: 64")) is changed
    )


async def test_first_size_returns_with_statistics_or_at_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StatsPoller, "pause_s", 0.001)
    monkeypatch.setattr(StatsPoller, "timeout_s", 0.01)
    may_report = threading.Event()

    def get_stats(timeout: float) -> list[dict[str, Any]]:
        return (
            [{"kvCacheStats": {"maxNumBlocks": 9, "tokensPerBlock": 64}}]
            if may_report.is_set()
            else []
        )

    poller = StatsPoller(get_stats)
    poller.start()
    assert await poller.first_kv_cache(0.01) == KvCacheSize()
    may_report.set()
    assert await poller.first_kv_cache(10.0) == KvCacheSize(9, 64)
    assert await poller.first_kv_cache(0.0) == KvCacheSize(9, 64)  # the last row's, from now on
    poller.stop()


@pytest.mark.parametrize(
    ("answer", "size", "logged"),
    [
        ({"return_value": {"maxNumBlocks": 9, "tokensPerBlock": 64}}, KvCacheSize(9, 64), ""),
        ({"return_value": {}}, KvCacheSize(), ""),
        (
            {"side_effect": RuntimeError("no rank answers")},
            KvCacheSize(),
            "RuntimeError: no rank answers",
        ),
    ],
)
async def test_size_without_statistics_asks_the_engine(
    answer: dict[str, Any],
    size: KvCacheSize,
    logged: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, llm = make(Role.AGGREGATED)
    library = engine.library
    assert isinstance(library, TrtllmLibrary)
    assert await library.kv_cache_size() == KvCacheSize()  # a release without this call
    monkeypatch.setattr(llm, "get_kv_cache_capacity", Mock(**answer), raising=False)
    monkeypatch.setattr(library.bindings, "has_kv_cache_capacity", True)
    with caplog.at_level(logging.WARNING):
        assert await library.kv_cache_size() == size
    assert ("no KV cache capacity from TensorRT-LLM" in caplog.text) is bool(logged)
    assert logged in caplog.text
    await engine.aclose()
