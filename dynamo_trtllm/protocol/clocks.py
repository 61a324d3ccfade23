"""Read the time. A simulation passes clocks of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple


class Clocks(NamedTuple):
    """The two clocks that a process reads, each in seconds."""

    monotonic: Callable[[], float] = time.monotonic  # measures how long something takes
    epoch: Callable[[], float] = time.time  # deadlines and expiries, which processes exchange


SYSTEM_CLOCKS: Final = Clocks()
