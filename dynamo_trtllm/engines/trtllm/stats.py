"""The engine's iteration statistics, polled on a thread of their own because the vendor's call blocks.

A reader of the last row and of when a new one came; judges nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynamo_trtllm.engines.external import Counts
from dynamo_trtllm.engines.trtllm.inflight import VENDOR_ERRORS

_log = logging.getLogger(__name__)
_TIMEOUT_S = 2.0
_PAUSE_S = 0.5


class StatsPoller:
    """Start it after the first request: before, some releases have no statistics to wait for."""

    def __init__(self, get_stats: Callable[..., Sequence[Mapping[str, Any]]]) -> None:
        self._get_stats = get_stats
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.counts = Counts()
        self.changed_at = time.monotonic()

    @property
    def is_polling(self) -> bool:
        """False before `start`, and once the vendor has failed to answer."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._poll, name="trtllm-stats", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Blocks until the thread has ended: at most as long as one call."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _TIMEOUT_S)

    def _poll(self) -> None:
        while not self._stop.wait(_PAUSE_S):
            try:
                rows = self._get_stats(timeout=_TIMEOUT_S)
            except VENDOR_ERRORS as exc:
                _log.warning("TensorRT-LLM's statistics ended: %s", exc)
                return
            if rows:
                self.counts = counts_of(rows[-1])
                self.changed_at = time.monotonic()


def counts_of(stats: Mapping[str, Any]) -> Counts:
    """Reads one iteration's statistics; what a release does not tell is 0."""
    kv = stats.get("kvCacheStats") or {}
    return Counts(
        waiting=int(stats.get("numQueuedRequests") or 0),
        kv_blocks_used=int(kv.get("usedNumBlocks") or 0),
        kv_blocks_total=int(kv.get("maxNumBlocks") or 0),
    )
