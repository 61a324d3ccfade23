"""Group what clients take, and find the group that takes the most."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class ByGroup(Generic[T]):
    """Items in order, by their groups, such as the connections of networks.

    The time that a method takes does not depend on the number of items and groups.

    Args:
        group_of: returns the name of the group of an item. It never changes.
    """

    def __init__(self, group_of: Callable[[T], str]) -> None:
        self._group_of = group_of
        self._by_group: dict[str, dict[T, None]] = {}  # the oldest item first
        self._by_count: dict[int, dict[str, None]] = {}  # groups with this number of items
        self._most = 0  # the largest number of items that one group has
        self._total = 0  # items of all groups

    def __len__(self) -> int:
        return self._total

    def __contains__(self, item: T) -> bool:
        return item in self._by_group.get(self._group_of(item), ())

    def count(self, group: str) -> int:
        """Return the number of items of a group."""
        return len(self._by_group.get(group, ()))

    def counts(self) -> dict[str, int]:
        """Return the number of items of each group that has some."""
        return {group: len(items) for group, items in self._by_group.items()}

    def add(self, item: T) -> None:
        """Add an item, or make it the newest one of its group."""
        group = self._group_of(item)
        items = self._by_group.setdefault(group, {})
        if item in items:
            del items[item]
            items[item] = None
            return
        items[item] = None
        self._total += 1
        self._recount(group, len(items) - 1, len(items))

    def discard(self, item: T) -> None:
        """Remove an item, if it is here."""
        group = self._group_of(item)
        items = self._by_group.get(group)
        if items is None or item not in items:
            return
        del items[item]
        self._total -= 1
        self._recount(group, len(items) + 1, len(items))
        if not items:
            del self._by_group[group]

    def largest(self) -> str | None:
        """Return a group with the most items; None if there is no item."""
        if not self._total:
            return None
        return next(iter(self._by_count[self._most]))

    def oldest(self, group: str) -> T:
        """Return the oldest item of a group, which must have one."""
        return next(iter(self._by_group[group]))

    def newest(self, group: str) -> T:
        """Return the newest item of a group, which must have one."""
        return next(reversed(self._by_group[group]))

    def _recount(self, group: str, before: int, now: int) -> None:
        """Move a group in `_by_count` when its number of items has changed by one."""
        if before:
            others = self._by_count[before]
            del others[group]
            if not others:
                del self._by_count[before]
        if now:
            self._by_count.setdefault(now, {})[group] = None
        # If no group has the largest number any more, this group had it. Its new number, which is
        # one less, is the largest now.
        if now > self._most or self._most not in self._by_count:
            self._most = now
