"""Estimate durations from recent ones, as TCP estimates round-trip times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# The weights of the newest duration, as in RFC 6298, section 2.
_MEAN_WEIGHT: Final = 1 / 8
_DEVIATION_WEIGHT: Final = 1 / 4


@dataclass(slots=True)
class RecentDurations:
    """The mean and the mean deviation of recent durations, in seconds.

    Create it with the first duration as the mean.
    """

    mean_s: float
    deviation_s: float = 0.0

    def note(self, seconds: float) -> None:
        """Note the newest duration."""
        difference_s = seconds - self.mean_s
        self.mean_s += _MEAN_WEIGHT * difference_s
        self.deviation_s += _DEVIATION_WEIGHT * (abs(difference_s) - self.deviation_s)

    def within_s(self, num_deviations: float) -> float:
        """Return the mean plus a number of mean deviations, which few durations exceed."""
        return self.mean_s + num_deviations * self.deviation_s
