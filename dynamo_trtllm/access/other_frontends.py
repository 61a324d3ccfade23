"""Collect the reports of other frontends of a namespace on the usage of API keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from dynamo_trtllm.protocol.frontend_usage import KeyTotals

# Frontends report once a second while they have something to report. After this time without a
# report, it is assumed that a process has ended.
REPORT_AGE_S: Final = 3.0
_MINUTE_S: Final = 64.0  # usage per minute counts for this time, see `key_usage`
_NOTHING: Final = KeyTotals()


class OtherFrontends:
    """The usage of keys by the processes of other frontends.

    Args:
        clock: returns seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # The reported usage and the time of the report, by key and then by process.
        self._totals: dict[int, dict[int, tuple[KeyTotals, float]]] = {}
        self._seen_s: dict[int, float] = {}  # when each process has reported last

    def report(self, process: int, totals: Mapping[int, KeyTotals]) -> None:
        """Store the report of a process. The usage of keys that are not in it has not changed.

        Args:
            process: id of the process.
            totals: the usage at this process, by id of the key.
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
        """Return the usage of a key at all other frontends together."""
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
