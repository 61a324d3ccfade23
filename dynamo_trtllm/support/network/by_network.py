"""Group what clients take by their network, and find the network that takes the most."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar


class HasNetwork(Hashable, Protocol):
    """An item of a client."""

    @property
    def network(self) -> str:
        """The client's network, see `addresses.network_of`."""


T = TypeVar("T", bound=HasNetwork)


class ByNetwork(Generic[T]):
    """Items of clients, in order, by the networks of the clients.

    The time that a method takes does not depend on the number of items and networks.
    """

    def __init__(self) -> None:
        self._by_network: dict[str, dict[T, None]] = {}  # the oldest item first
        self._by_count: dict[int, dict[str, None]] = {}  # networks with this number of items
        self._most = 0  # the largest number of items that one network has
        self._total = 0  # items of all networks

    def __len__(self) -> int:
        return self._total

    def __contains__(self, item: T) -> bool:
        return item in self._by_network.get(item.network, ())

    def count(self, network: str) -> int:
        """Return the number of items of a network."""
        return len(self._by_network.get(network, ()))

    def counts(self) -> dict[str, int]:
        """Return the number of items of each network that has some."""
        return {network: len(items) for network, items in self._by_network.items()}

    def add(self, item: T) -> None:
        """Add an item, or make it the newest one of its network."""
        items = self._by_network.setdefault(item.network, {})
        if item in items:
            del items[item]
            items[item] = None
            return
        items[item] = None
        self._total += 1
        self._recount(item.network, len(items) - 1, len(items))

    def discard(self, item: T) -> None:
        """Remove an item, if it is here."""
        items = self._by_network.get(item.network)
        if items is None or item not in items:
            return
        del items[item]
        self._total -= 1
        self._recount(item.network, len(items) + 1, len(items))
        if not items:
            del self._by_network[item.network]

    def largest(self) -> str | None:
        """Return a network with the most items; None if there is no item."""
        if not self._total:
            return None
        return next(iter(self._by_count[self._most]))

    def oldest(self, network: str) -> T:
        """Return the oldest item of a network, which must have one."""
        return next(iter(self._by_network[network]))

    def newest(self, network: str) -> T:
        """Return the newest item of a network, which must have one."""
        return next(reversed(self._by_network[network]))

    def _recount(self, network: str, before: int, now: int) -> None:
        """Move a network in `_by_count` when its number of items has changed by one."""
        if before:
            others = self._by_count[before]
            del others[network]
            if not others:
                del self._by_count[before]
        if now:
            self._by_count.setdefault(now, {})[network] = None
        # If no network has the largest number any more, it was that of this network, and is one
        # less now.
        if now > self._most or self._most not in self._by_count:
            self._most = now
