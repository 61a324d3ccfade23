"""Stores of small named values that outlive a request: the interface, and a bounded store in this process's memory.

`jetstream` stores the same values for several processes; both pass the same contract tests.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dynamo_trtllm.errors import PayloadTooLarge


class Store(Protocol):
    """Bytes by key. Old values are dropped when a limit is reached, and every value after a time."""

    async def put(self, key: str, value: bytes, owner: str = "") -> None:
        """Store a value; every reader of the store finds it once this has returned.

        `owner`: the value's owner; a full store may drop values of the owner with the most. Raises PayloadTooLarge
        for a value beyond the limits, Disconnected or Unreachable when the store is away.
        """
        ...

    async def get(self, key: str) -> bytes | None:
        """None: not there, or no longer. Raises Disconnected, Unreachable."""
        ...

    async def delete(self, key: str) -> None:
        """Nothing happens when it is not there. Raises as `get`."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """`max_entries` holds for the store in memory only: JetStream counts bytes."""

    max_entries: int
    max_bytes: int
    max_value_bytes: int  # of one value; not more than max_bytes
    ttl_s: float

    def check(self, value: bytes) -> None:
        """Raises PayloadTooLarge for a value that the store does not take."""
        if len(value) > self.max_value_bytes:
            raise PayloadTooLarge(
                f"{len(value)} bytes are more than the {self.max_value_bytes} that a stored value may have"
            )


class _Owner:
    """The values of one owner in the store."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.keys: dict[str, None] = {}  # the oldest first


class _Entry(NamedTuple):
    value: bytes
    owner: str
    expires_s: float  # on the clock


class MemoryResponseStore:
    """Values in the memory of this process. `clock` gives seconds that only rise.

    A full store drops the oldest value of the owner with the most values or bytes, so an owner can't push out the
    values of others that have fewer.
    """

    def __init__(self, limits: StoreLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the oldest first, which also expire first
        self._owners: dict[str, _Owner] = {}
        self.used_bytes = 0

    async def put(self, key: str, value: bytes, owner: str = "") -> None:
        limits = self._limits
        limits.check(value)
        self._drop(key)
        self._expire()
        while len(self._entries) >= limits.max_entries:
            self._drop_oldest(max(self._owners.values(), key=lambda each: len(each.keys)))
        while self.used_bytes + len(value) > limits.max_bytes:
            self._drop_oldest(max(self._owners.values(), key=lambda each: each.used_bytes))
        self._entries[key] = _Entry(value, owner, self._clock() + limits.ttl_s)
        owned = self._owners.setdefault(owner, _Owner())
        owned.keys[key] = None
        owned.used_bytes += len(value)
        self.used_bytes += len(value)

    async def get(self, key: str) -> bytes | None:
        self._expire()
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    async def delete(self, key: str) -> None:
        self._drop(key)

    async def aclose(self) -> None:
        """Nothing to close."""

    def _expire(self) -> None:
        now = self._clock()
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.expires_s > now:
                return
            self._drop(key)

    def _drop_oldest(self, owned: _Owner) -> None:
        self._drop(next(iter(owned.keys)))

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self.used_bytes -= len(entry.value)
        owned = self._owners[entry.owner]
        owned.used_bytes -= len(entry.value)
        del owned.keys[key]
        if not owned.keys:
            del self._owners[entry.owner]
