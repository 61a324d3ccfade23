"""Choose which connection is closed to accept another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_trtllm.http_server.connection import HttpConnection


class IdleConnections:
    """The connections that run no request, by the network of their clients.

    A connection that is still receiving a request is idle, too. The time that a method takes does not depend on the
    number of connections and clients.
    """

    def __init__(self) -> None:
        self._by_network: dict[str, dict[HttpConnection, None]] = {}  # the idlest first
        self._by_count: dict[int, dict[str, None]] = {}  # networks with this number of idle connections
        self._most = 0  # the largest number of idle connections that one network has
        self._total = 0  # idle connections of all networks

    def __len__(self) -> int:
        return self._total

    def __contains__(self, connection: HttpConnection) -> bool:
        return connection in self._by_network.get(connection.network, ())

    def add(self, connection: HttpConnection) -> None:
        """Add a connection, or make it the least idle one of its network."""
        idle = self._by_network.setdefault(connection.network, {})
        if connection in idle:
            del idle[connection]
            idle[connection] = None
            return
        idle[connection] = None
        self._total += 1
        self._recount(connection.network, len(idle) - 1, len(idle))

    def discard(self, connection: HttpConnection) -> None:
        """Remove a connection, if it is here."""
        idle = self._by_network.get(connection.network)
        if idle is None or connection not in idle:
            return
        del idle[connection]
        self._total -= 1
        self._recount(connection.network, len(idle) + 1, len(idle))
        if not idle:
            del self._by_network[connection.network]

    def idlest(self) -> HttpConnection | None:
        """Return the idlest connection of the network with the most of them; None if there is no idle connection."""
        if not self._total:
            return None
        network = next(iter(self._by_count[self._most]))
        return next(iter(self._by_network[network]))

    def _recount(self, network: str, before: int, now: int) -> None:
        """Move a network in `_by_count` when its number of idle connections has changed by one."""
        if before:
            others = self._by_count[before]
            del others[network]
            if not others:
                del self._by_count[before]
        if now:
            self._by_count.setdefault(now, {})[network] = None
        # If no network has the largest number any more, it was that of this network, and is one less now.
        if now > self._most or self._most not in self._by_count:
            self._most = now
