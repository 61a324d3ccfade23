"""Statistics on a thread: what is kept of a row, and a vendor that stops telling."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dynamo_trtllm.engines.external.library import Counts
from dynamo_trtllm.engines.trtllm import library
from dynamo_trtllm.engines.trtllm.library import StatsPoller, counts_of


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_PAUSE_S", 0.001)
    monkeypatch.setattr(library, "_TIMEOUT_S", 0.01)


def test_row_when_release_tells_all_then_it_is_read() -> None:
    told = {"numQueuedRequests": 3, "kvCacheStats": {"usedNumBlocks": 5, "maxNumBlocks": 9}}
    assert counts_of(told) == Counts(waiting=3, kv_blocks_used=5, kv_blocks_total=9)


@pytest.mark.parametrize("told", [{}, {"kvCacheStats": None}, {"numQueuedRequests": None}])
def test_row_when_something_is_not_told_then_it_is_zero(told: dict[str, Any]) -> None:
    assert counts_of(told) == Counts()


def test_poller_when_rows_come_then_the_last_counts_and_stop_ends_the_thread() -> None:
    polled = threading.Event()

    def get_stats(timeout: float) -> list[dict[str, Any]]:
        polled.set()
        return [{"numQueuedRequests": 1}, {"numQueuedRequests": 2}]

    poller = StatsPoller(get_stats)
    assert not poller.is_polling
    poller.start()
    poller.start()
    assert polled.wait(5)
    poller.stop()
    assert poller.counts.waiting == 2
    assert not poller.is_polling


def test_poller_when_the_vendor_fails_then_it_no_longer_polls() -> None:
    polled = threading.Event()

    def get_stats(timeout: float) -> list[dict[str, Any]]:
        polled.set()
        raise RuntimeError("no statistics")

    poller = StatsPoller(get_stats)
    poller.start()
    assert polled.wait(5)
    poller.stop()
    assert not poller.is_polling
    assert poller.counts == Counts()
