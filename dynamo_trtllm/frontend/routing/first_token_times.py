"""Measure how long choices take to their first token once they have begun."""

from __future__ import annotations


class FirstTokenTimes:
    """How long recent choices took from their beginning to their first token.

    The times are estimated as TCP estimates round-trip times: by a mean and a mean deviation.
    """

    def __init__(self) -> None:
        self._mean_s: float | None = None  # None: no choice was counted yet
        self._deviation_s = 0.0

    def note(self, seconds: float) -> None:
        """Count the time of a choice."""
        if self._mean_s is None:
            self._mean_s = seconds
            return
        difference_s = seconds - self._mean_s
        # The weights 1/8 and 1/4 of the newest time are those of TCP (RFC 6298, section 2).
        self._mean_s += difference_s / 8
        self._deviation_s += (abs(difference_s) - self._deviation_s) / 4

    @property
    def expected_s(self) -> float:
        """Return the time within which most choices have their first token."""
        return 0.0 if self._mean_s is None else self._mean_s + self._deviation_s
