"""An event loop whose time jumps to the next timer, so that waiting takes no time.

asyncio keeps timers in a heap and callbacks in a queue. Both orders depend on nothing but the
program, so two runs of a program that reads no other clock are equal.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from dynamo_trtllm.protocol.clocks import Clocks
from dynamo_trtllm.protocol.errors import InternalError

T = TypeVar("T")

# The time since the epoch at which a simulation begins. Any number does: it must only be the same
# in all runs.
_EPOCH_S: Final = 1_700_000_000.0


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for sockets, it sets the clock to the end of the wait.

    Within a simulation, there are no sockets but one of asyncio's own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise InternalError("the simulation waits for something that never happens")
        if timeout > 0:
            self.now_s += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own, which begins at 0."""

    def __init__(self) -> None:
        self._virtual = _JumpingSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._virtual.now_s

    def epoch(self) -> float:
        """Return the virtual time since the epoch, in seconds."""
        return _EPOCH_S + self._virtual.now_s


def virtual_clocks() -> Clocks:
    """Return the clocks of the running loop, which is a `VirtualTimeLoop`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return Clocks(loop.time, loop.epoch)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time until it has ended, and return its result.

    Raises:
        InternalError: it waits for something that no timer or callback will bring.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
