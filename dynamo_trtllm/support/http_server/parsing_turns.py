"""Limit the time for which one iteration of the event loop parses what clients send."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Protocol

PARSING_S = 0.01  # time for parsing in one iteration
HANDLER_S = 0.0002  # time that the beginning of a handler takes
# Time that a turn takes in addition to parsing, because the connection stops and resumes reading.
_TURN_S = 0.00005


class ParsingConnection(Protocol):
    """A connection that parses what it has received."""

    @property
    def network(self) -> str:
        """The client's network, see `addresses.network_of`."""

    def take_turn(self) -> None:
        """Parse one part."""


class _WaitingGroups:
    """Connections in groups, which take turns."""

    def __init__(self) -> None:
        self._groups: OrderedDict[Hashable, deque[ParsingConnection]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, group: Hashable, connection: ParsingConnection) -> None:
        """Add a connection as the last one of its group."""
        self._groups.setdefault(group, deque()).append(connection)

    def take(self) -> ParsingConnection:
        """Remove and return the first connection of the next group."""
        group, waiting = next(iter(self._groups.items()))
        connection = waiting.popleft()
        if waiting:
            self._groups.move_to_end(group)
        else:
            del self._groups[group]
        return connection


class ParsingTurns:
    """The connections that wait until there is time to parse what they have received.

    While the iteration has time left, a connection parses at once what it receives. Otherwise the
    connection waits for its turn. Until then it receives nothing more, because libuv may read from
    up to 49,152 sockets in one iteration.

    In its turn, a connection parses one part. The networks of clients take turns. Within a network,
    connections with new data take turns with connections that have parts left from their last turn.
    So a client does not delay others if it sends much data, or small pieces that take long.

    Every second turn goes to a connection whose request begins. So a small request does not wait
    for the bodies of thousands of networks.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._used_s = 0.0  # time that was used in this iteration
        self._is_scheduled = False  # the next iteration calls `_begin_iteration`
        # The connections whose request begins, by network.
        self._beginning = _WaitingGroups()
        # The other connections, by network and by whether parts are left from the last turn.
        self._others = _WaitingGroups()
        self._is_turn_of_others = False

    @property
    def is_time_over(self) -> bool:
        """True if this iteration has no time left for parsing."""
        return self._used_s >= PARSING_S

    def run(self, act: Callable[[], None], more_s: float = 0.0) -> None:
        """Call `act`, and count the time that it takes, and `more_s` in addition."""
        self._schedule()
        begun_s = self._clock()
        act()
        self._used_s += self._clock() - begun_s + more_s

    def count_handler(self) -> None:
        """Count the time of a handler that begins."""
        self._schedule()
        self._used_s += HANDLER_S

    def wait(
        self, connection: ParsingConnection, *, has_rest: bool, begins_request: bool = False
    ) -> None:
        """Let a connection wait for its turn.

        Args:
            connection: the connection. Its `take_turn` is called once.
            has_rest: the connection has no new data. It has only requests that wait, or a part that
                is left from an earlier turn.
            begins_request: nothing of the connection's next request was parsed yet.
        """
        self._schedule()
        if begins_request:
            self._beginning.add(connection.network, connection)
        else:
            self._others.add((connection.network, has_rest), connection)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_iteration)

    def _begin_iteration(self) -> None:
        self._is_scheduled = False
        self._used_s = 0.0
        while (self._beginning or self._others) and not self.is_time_over:
            self.run(self._next().take_turn, _TURN_S)

    def _next(self) -> ParsingConnection:
        """Remove and return the connection whose turn it is. At least one must wait."""
        self._is_turn_of_others = not self._is_turn_of_others
        if self._others and (self._is_turn_of_others or not self._beginning):
            return self._others.take()
        return self._beginning.take()
