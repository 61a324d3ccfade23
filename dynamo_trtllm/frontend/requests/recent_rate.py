"""Measure the rate of recent events, and sum up the values of the last minute."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

# The rate is measured over about this time. A generation takes seconds, so too few would end in
# less time.
WINDOW_S: Final = 30.0
# The measured time counts as at least this long. Otherwise, the first events would give too high a
# rate.
_LEAST_S: Final = 1.0
# A minute is counted in 12 slots of 5 s, and in the newest slot, which is not over yet. So the sum
# is over up to 65 s.
_SLOT_S: Final = 5.0
_NUM_SLOTS: Final = 13


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
        """Return how long `count` events take at this rate; None: there were no events yet."""
        if not self._count:
            return None
        return count * max(self._clock() - self._since_s, _LEAST_S) / self._count


class LastMinute:
    """The sum of what was added in the last minute."""

    __slots__ = ("_newest", "_slots")

    def __init__(self) -> None:
        self._slots: list[int] = [0] * _NUM_SLOTS
        self._newest = 0  # number of the newest slot

    def add(self, value: int, now_s: float) -> None:
        """Add to the sum. `now_s`: a time, of the same clock in all calls."""
        self._advance(now_s)
        self._slots[self._newest % _NUM_SLOTS] += value

    def total(self, now_s: float) -> int:
        """Return the sum."""
        self._advance(now_s)
        return sum(self._slots)

    def _advance(self, now_s: float) -> None:
        """Clear the slots that passed since the last call."""
        slot = int(now_s / _SLOT_S)
        if slot <= self._newest:
            return
        first = max(self._newest + 1, slot - _NUM_SLOTS + 1)
        for passed in range(first, slot + 1):
            self._slots[passed % _NUM_SLOTS] = 0
        self._newest = slot
