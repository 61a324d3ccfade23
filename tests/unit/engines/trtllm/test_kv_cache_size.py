"""What the running engine reports about its KV cache, and when a worker must not serve with it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dynamo_trtllm.engines.trtllm.reports.kv_cache import KvCacheSize, kv_cache_size, size_change
from dynamo_trtllm.engines.trtllm.reports.statistics import StatsPoller


@pytest.mark.parametrize(
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
def test_size_when_a_value_is_missing_or_of_another_kind_then_it_is_not_reported(
    reported: dict[str, Any] | None, size: KvCacheSize
) -> None:
    assert kv_cache_size(reported) == size


@pytest.mark.parametrize(("reported", "changed"), [(0, False), (32, False), (64, True)])
def test_change_when_the_reported_size_differs_from_the_registered_one_then_both_are_named(
    reported: int, changed: bool
) -> None:
    text = size_change(32, KvCacheSize(block_tokens=reported))
    assert bool(text) is changed
    assert all(part in text for part in ("64 tokens", "32 tokens", "tokens_per_block: 64")) is changed


async def test_first_size_when_statistics_come_then_it_is_returned_and_without_them_after_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StatsPoller, "pause_s", 0.001)
    monkeypatch.setattr(StatsPoller, "timeout_s", 0.01)
    may_report = threading.Event()

    def get_stats(timeout: float) -> list[dict[str, Any]]:
        return [{"kvCacheStats": {"maxNumBlocks": 9, "tokensPerBlock": 64}}] if may_report.is_set() else []

    poller = StatsPoller(get_stats)
    poller.start()
    assert await poller.first_kv_cache(0.01) == KvCacheSize()
    may_report.set()
    assert await poller.first_kv_cache(10.0) == KvCacheSize(9, 64)
    assert await poller.first_kv_cache(0.0) == KvCacheSize(9, 64)  # the last row's, from now on
    poller.stop()
