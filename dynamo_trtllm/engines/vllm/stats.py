"""The engine's own counters, as its steps tell them: nothing is polled. Pure."""

from __future__ import annotations

from typing import Protocol

from dynamo_trtllm.engines.external import Counts


class SchedulerStats(Protocol):
    """What is read of the vendor's class of that name."""

    num_waiting_reqs: int
    num_skipped_waiting_reqs: int  # waiting for KV to come, or for a form to be compiled
    kv_cache_usage: float


class StepStats:
    """Keeps the last step of each rank. Called and read on the event loop."""

    def __init__(self) -> None:
        self._last: dict[int, SchedulerStats] = {}
        self.blocks_per_rank = 0  # settled once the engine is built

    def record(self, rank: int, stats: SchedulerStats) -> None:
        self._last[rank] = stats

    def counts(self, ranks: int = 1) -> Counts:
        """Of all data-parallel ranks together."""
        usable = max(0, self.blocks_per_rank - 1)  # one is the null block, which no request gets
        return Counts(
            waiting=sum(each.num_waiting_reqs + each.num_skipped_waiting_reqs for each in self._last.values()),
            kv_blocks_used=sum(round(each.kv_cache_usage * usable) for each in self._last.values()),
            kv_blocks_total=usable * ranks,
        )
