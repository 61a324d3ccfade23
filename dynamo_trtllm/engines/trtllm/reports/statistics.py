"""Poll the executor's statistics on a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from dynamo_trtllm.engines.external.library import Counts
from dynamo_trtllm.engines.trtllm.reports.kv_cache import KvCacheSize, kv_cache_size
from dynamo_trtllm.engines.trtllm.reports.polling import Poller
from dynamo_trtllm.engines.trtllm.reports.steps import StepReader


class StatsPoller(Poller):
    """Polls the executor's statistics."""

    pause_s = 0.5
    timeout_s = 2.0

    def __init__(
        self, get_stats: Callable[..., Sequence[Mapping[str, Any]]], num_ranks: int = 1
    ) -> None:
        """Initialize without a thread.

        Args:
            get_stats: `LLM.get_stats`, see `TrtllmBindings.reader`.
            num_ranks: attention-DP ranks, each with its own KV blocks; 1 without attention DP.
        """
        super().__init__(
            "trtllm-stats",
            failure="no statistics from TensorRT-LLM; KV metrics stay at their last values",
        )
        self._get_stats = get_stats
        self._num_ranks = num_ranks
        self._rows: dict[int, Mapping[str, Any]] = {}  # the last row of each rank
        self._first: Future[None] = Future()  # done once there are rows
        self.step_reader: StepReader | None = None  # None if steps are not to be read
        self.counts = Counts()
        self.kv_cache = KvCacheSize()  # the sizes in the last row
        self.changed_at = time.monotonic()

    @property
    def has_reported(self) -> bool:
        """True once the executor has reported statistics.

        From then on, the executor is stalled if requests wait and no new statistics come.
        """
        return bool(self._rows)

    @property
    def last_rows(self) -> Sequence[Mapping[str, Any]]:
        """The last row of each rank that has reported."""
        return list(self._rows.values())

    def start(self) -> None:
        """Start the thread.

        Idempotent. Some releases have no statistics before their first request.
        """
        self._start(self._poll)

    async def first_kv_cache(self, timeout_s: float) -> KvCacheSize:
        """Return the size of the KV cache once statistics came; zeros if none came within
        `timeout_s` seconds.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(asyncio.wrap_future(self._first))
        return self.kv_cache

    def _poll(self) -> None:
        if rows := self._get_stats(timeout=self.timeout_s):
            self._rows |= {int(row.get("attentionDpRank") or 0): row for row in rows}
            self.counts = counts_of(list(self._rows.values()), self._num_ranks)
            self.kv_cache = kv_cache_size(rows[-1].get("kvCacheStats"))
            self.changed_at = time.monotonic()
            if not self._first.done():
                self._first.set_result(None)
            if self.step_reader is not None:
                self.step_reader.read(rows)


def counts_of(rows: Sequence[Mapping[str, Any]], num_ranks: int = 1) -> Counts:
    """Convert the statistics of one iteration. A missing value counts as 0.

    KV blocks are known of rank 0 only: before 1.3 only rank 0 reports, and since then the rows of
    the other ranks have copies of rank 0's KV statistics (_torch/pyexecutor/adp_iter_stats.py, main
    at 0cedd9a0). So with attention DP the number of used blocks is an estimate. Rank 0 reports the
    queued requests of all ranks.

    Args:
        rows: one row for each rank that reports.
        num_ranks: ranks that have KV blocks of their own.
    """
    pools = [row.get("kvCacheStats") or {} for row in rows]
    used = sum(int(pool.get("usedNumBlocks") or 0) for pool in pools)
    total = sum(int(pool.get("maxNumBlocks") or 0) for pool in pools)
    return Counts(
        waiting=sum(int(row.get("numQueuedRequests") or 0) for row in rows),
        kv_blocks_used=used * num_ranks // len(rows),
        kv_blocks_total=total * num_ranks // len(rows),
    )
