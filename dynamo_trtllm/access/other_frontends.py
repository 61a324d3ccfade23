"""Hold what API keys use at the other frontends of a namespace, as these have reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from dynamo_trtllm.protocol.frontend_usage import KeyTotals

# Frontends report once a second while they have something to report. After this time without a
# report, a process has ended.
REPORT_AGE_S: Final = 3.0
_MINUTE_S: Final = 64.0  # usage per minute counts for this long, see `key_usage`
_NOTHING: Final = KeyTotals()


class OtherFrontends:
    """The usage of keys by the processes of other frontends.

    Args:
        clock: returns seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By key, then by process: its totals, and when it reported them.
        self._totals: dict[int, dict[int, tuple[KeyTotals, float]]] = {}
        self._seen_s: dict[int, float] = {}  # when a process has reported last

    def report(self, process: int, totals: Mapping[int, KeyTotals]) -> None:
        """Note what keys use at a process. The usage of other keys has not changed.

        Args:
            process: id of the process.
            totals: by id of the key.
        """
        now_s = self._clock()
        self._seen_s[process] = now_s
        for key_id, of_key in totals.items():
            by_process = self._totals.setdefault(key_id, {})
            by_process[process] = (of_key, now_s)
            if of_key == _NOTHING:
                del by_process[process]
                if not by_process:
                    del self._totals[key_id]

    def total(self, key_id: int) -> KeyTotals:
        """Return what a key uses at all other frontends."""
        by_process = self._totals.get(key_id)
        if by_process is None:
            return _NOTHING
        now_s = self._clock()
        num_running = 0
        num_requests = 0
        num_tokens = 0
        for process, (of_key, reported_s) in list(by_process.items()):
            if now_s - reported_s >= _MINUTE_S:
                del by_process[process]
                continue
            if now_s - self._seen_s[process] < REPORT_AGE_S:
                num_running += of_key.running
            num_requests += of_key.requests
            num_tokens += of_key.tokens
        return KeyTotals(num_running, num_requests, num_tokens)
