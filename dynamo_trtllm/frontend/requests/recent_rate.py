"""Measure how often something happened just now."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

WINDOW_S: Final = 30.0  # a generation takes seconds, so a shorter window would count too few
_LEAST_S: Final = 1.0  # the first events alone would give too high a rate


class RecentRate:
    """The rate of events during about the last half minute.

    Args:
        clock: returns seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count = 0.0
        self._since_s = clock()

    @property
    def count(self) -> float:
        """The number of events that the rate is measured with."""
        return self._count

    def restart(self) -> None:
        """Forget all events, and measure from now on."""
        self._count = 0.0
        self._since_s = self._clock()

    def add(self, count: int) -> None:
        """Count events."""
        self._count += count
        counted_s = self._clock() - self._since_s
        # Shorten the time to the window. The rate stays the same, but the next events count more.
        if counted_s > 2 * WINDOW_S:
            self._count = self._count * WINDOW_S / counted_s
            self._since_s += counted_s - WINDOW_S

    def seconds_for(self, count: int) -> float | None:
        """Return how long so many events take at this rate; None: there were none yet."""
        if not self._count:
            return None
        return count * max(self._clock() - self._since_s, _LEAST_S) / self._count
