"""Limit log lines of which one fault can cause thousands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class LineLimit:
    """Admit the first lines of a period, and report how many others there were.

    A period begins with its first line. Used within an event loop.

    Args:
        most: lines that a period admits.
        period_s: length of a period, in seconds.
        report: called at the end of a period with the number of lines that it did not admit, if
            there is one.
    """

    most: int
    period_s: float
    report: Callable[[int], None]
    _num_lines: int = 0
    _is_running: bool = False

    def admits(self) -> bool:
        """Count a line. Return whether to write it."""
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_later(self.period_s, self._end_period)
        self._num_lines += 1
        return self._num_lines <= self.most

    def _end_period(self) -> None:
        num_left_out = self._num_lines - self.most
        self._num_lines = 0
        self._is_running = False
        if num_left_out > 0:
            self.report(num_left_out)
