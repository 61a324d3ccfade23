"""Statistics on a thread: what is kept of a row, and a vendor that stops telling."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from dynamo_trtllm.engines.external.library import Counts
from dynamo_trtllm.engines.trtllm.reports.statistics import StatsPoller, counts_of


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatsPoller, "pause_s", 0.001)
    monkeypatch.setattr(StatsPoller, "timeout_s", 0.01)


def test_rows_when_release_tells_all_then_they_are_read() -> None:
    row = {"numQueuedRequests": 3, "kvCacheStats": {"usedNumBlocks": 5, "maxNumBlocks": 9}}
    assert counts_of([row]) == Counts(waiting=3, kv_blocks_used=5, kv_blocks_total=9)


def test_rows_of_rank_0_only_stand_for_each_rank() -> None:
    row = {"numQueuedRequests": 3, "kvCacheStats": {"usedNumBlocks": 5, "maxNumBlocks": 9}}
    assert counts_of([row], 4) == Counts(waiting=3, kv_blocks_used=20, kv_blocks_total=36)
    others = row | {"numQueuedRequests": 0}
    assert counts_of([row, others, others, others], 4) == Counts(
        waiting=3, kv_blocks_used=20, kv_blocks_total=36
    )


@pytest.mark.parametrize("row", [{}, {"kvCacheStats": None}, {"numQueuedRequests": None}])
def test_rows_when_a_value_is_missing_then_it_is_zero(row: dict[str, Any]) -> None:
    assert counts_of([row]) == Counts()


class Poller(StatsPoller):
    """A poller that gets the items of a script: rows, or an exception that is raised."""

    def __init__(self, *script: list[dict[str, Any]] | Exception, num_ranks: int = 1) -> None:
        self.script = list(script)
        self.is_done = threading.Event()
        super().__init__(self.next, num_ranks)

    def next(self, timeout: float) -> list[dict[str, Any]]:
        if not self.script:
            self.is_done.set()
            return []
        found = self.script.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def run(self) -> None:
        self.start()
        assert self.is_done.wait(5)
        self.stop()


def test_poller_when_rows_come_then_the_last_counts() -> None:
    poller = Poller([{"numQueuedRequests": 1}, {"numQueuedRequests": 2}])
    poller.start()  # idempotent
    poller.run()
    assert poller.counts.waiting == 2
    assert poller.has_reported


def test_poller_uses_the_last_row_of_each_rank() -> None:
    rows = [{"attentionDpRank": rank, "kvCacheStats": {"maxNumBlocks": 9}} for rank in range(4)]
    queue = [row | {"numQueuedRequests": 7 if row["attentionDpRank"] == 0 else 0} for row in rows]
    poller = Poller(rows, queue[:2], queue[2:], num_ranks=4)
    poller.run()
    assert poller.counts == Counts(waiting=7, kv_blocks_total=36)


class RemoteError(Exception):
    """As TensorRT-LLM's RPCError: a subclass of Exception alone."""


@pytest.mark.parametrize(
    "error", [RuntimeError("gone"), RemoteError("no answer"), TypeError("not NoneType")]
)
def test_poller_logs_a_vendor_failure_once(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        poller = Poller([{"numQueuedRequests": 1}], error, error, [{"numQueuedRequests": 2}], error)
        poller.run()
    assert poller.counts.waiting == 2
    assert caplog.text.count(str(error)) == 1


def test_poller_without_reports_knows_no_progress() -> None:
    poller = Poller(RuntimeError("no statistics"), [])
    poller.run()
    assert not poller.has_reported
    assert poller.counts == Counts()
