"""Limit the time for which one iteration of the event loop parses what clients send."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

from dynamo_trtllm.support.network.by_network import HasNetwork

PARSING_S = 0.01
HANDLER_S = 0.0002  # what a handler takes at its beginning
# what a turn takes in addition to parsing: the connection stops and resumes reading
_TURN_S = 0.00005


class ParsingConnection(HasNetwork, Protocol):
    """A connection that parses what it has received."""

    def take_turn(self) -> None:
        """Parse one part."""


class ParsingTurns:
    """The connections that wait until there is time to parse what they have received.

    A connection parses what it receives at once while the iteration has time left. Otherwise it
    waits, and receives nothing more: as long as 1,024 sockets have data, libuv reads from up to
    49,152 of them in one iteration.

    In its turn, a connection parses one part. The networks of clients take turns, and those of its
    connections that have just received something do with those that are behind. So others are not
    delayed by a client that sends much, or small pieces that take long.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._used_s = 0.0  # in this iteration
        self._is_scheduled = False  # the next iteration calls `_begin_iteration`
        self._groups: OrderedDict[tuple[str, bool], deque[ParsingConnection]] = OrderedDict()

    @property
    def is_over(self) -> bool:
        """True if this iteration has no time left for parsing."""
        return self._used_s >= PARSING_S

    def run(self, act: Callable[[], None], more_s: float = 0.0) -> None:
        """Call `act`, and count the time that it takes, and some more."""
        self._schedule()
        begun_s = self._clock()
        act()
        self._used_s += self._clock() - begun_s + more_s

    def count_handler(self) -> None:
        """Count the time of a handler that begins."""
        self._schedule()
        self._used_s += HANDLER_S

    def wait(self, connection: ParsingConnection, *, is_behind: bool) -> None:
        """Let a connection wait for its turn.

        Args:
            connection: its `take_turn` is called once.
            is_behind: it has not finished in its last turn.
        """
        self._schedule()
        self._groups.setdefault((connection.network, is_behind), deque()).append(connection)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_iteration)

    def _begin_iteration(self) -> None:
        self._is_scheduled = False
        self._used_s = 0.0
        while self._groups and not self.is_over:
            group, waiting = next(iter(self._groups.items()))
            connection = waiting.popleft()
            if waiting:
                self._groups.move_to_end(group)
            else:
                del self._groups[group]
            self.run(connection.take_turn, _TURN_S)
