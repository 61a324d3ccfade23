"""How long to wait between tries. Pure; it does not sleep."""

from __future__ import annotations

import random


class Backoff:
    """Delays that double from `first_s` to `cap_s`, each shortened at random by up to a half, so that many do not
    come back at the same moment."""

    def __init__(self, *, first_s: float = 0.05, cap_s: float = 1.0, rng: random.Random | None = None) -> None:
        self._first_s = first_s
        self._cap_s = cap_s
        self._rng = rng or random.Random()
        self._full_s = first_s

    def next_s(self) -> float:
        """The next delay in seconds."""
        delay = self._full_s * self._rng.uniform(0.5, 1.0)
        self._full_s = min(2 * self._full_s, self._cap_s)
        return delay

    def reset(self) -> None:
        """After a success: start again with the first delay."""
        self._full_s = self._first_s
