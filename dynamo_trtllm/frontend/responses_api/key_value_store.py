"""Define the key-value store that keeps the stored responses.

This module has its interface, its limits, and a store in memory.
The module `jetstream` has the store for several processes. Both stores pass the same contract
tests.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dynamo_trtllm.protocol.errors import PayloadTooLarge


class KeyValueStore(Protocol):
    """A store of bytes by key.

    It drops old values when it is full, and every value after a time.
    """

    async def put(self, key: str, value: bytes, owner: str = "") -> None:
        """Store a value. After the call, every reader of the store gets it.

        Args:
            key: key of the value.
            value: the value.
            owner: owner of the value; a full store may drop values of the owner that uses the most
                space.

        Raises:
            PayloadTooLarge: the value is larger than the limit.
            Disconnected: there is no connection to the store.
            Unreachable: the store does not answer.
        """

    async def get(self, key: str) -> bytes | None:
        """Return the value of a key, or None if the store does not have it.

        Raises:
            Disconnected: there is no connection to the store.
            Unreachable: the store does not answer.
        """

    async def delete(self, key: str) -> None:
        """Delete a key if the store has it. Raises the errors of `get`."""

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Limits of a store.

    `max_entries` applies to the store in memory only; JetStream limits bytes.
    """

    max_entries: int
    max_bytes: int
    max_value_bytes: int  # limit for one value; not more than max_bytes
    ttl_s: float

    def check(self, value: bytes) -> None:
        """Raise PayloadTooLarge if the value is larger than the limit."""
        if len(value) > self.max_value_bytes:
            raise PayloadTooLarge(
                f"a value of {len(value)} bytes can't be stored; the limit is"
                f" {self.max_value_bytes} bytes"
            )


class _OwnerUsage:
    """What one owner has in the store."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.keys: dict[str, None] = {}  # oldest first


def _num_values(usage: _OwnerUsage) -> int:
    return len(usage.keys)


def _used_bytes(usage: _OwnerUsage) -> int:
    return usage.used_bytes


class _Entry(NamedTuple):
    value: bytes
    owner: str
    expires_s: float  # a time of the clock


class MemoryStore:
    """A `KeyValueStore` in the memory of this process. `clock` returns monotonic seconds.

    A full store drops the oldest value of the owner with the most values or bytes, so that a heavy
    user does not displace the values of others.
    """

    def __init__(self, limits: StoreLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        # The oldest entry is the first, and expires first.
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._usages: dict[str, _OwnerUsage] = {}  # by owner
        self.used_bytes = 0

    async def put(self, key: str, value: bytes, owner: str = "") -> None:
        limits = self._limits
        limits.check(value)
        self._drop(key)
        self._expire()
        while len(self._entries) >= limits.max_entries:
            self._drop_oldest(max(self._usages.values(), key=_num_values))
        while self.used_bytes + len(value) > limits.max_bytes:
            self._drop_oldest(max(self._usages.values(), key=_used_bytes))
        self._entries[key] = _Entry(value, owner, self._clock() + limits.ttl_s)
        usage = self._usages.setdefault(owner, _OwnerUsage())
        usage.keys[key] = None
        usage.used_bytes += len(value)
        self.used_bytes += len(value)

    async def get(self, key: str) -> bytes | None:
        self._expire()
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    async def delete(self, key: str) -> None:
        self._drop(key)

    async def aclose(self) -> None:
        """Do nothing: there is no connection to close."""

    def _expire(self) -> None:
        now = self._clock()
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.expires_s > now:
                return
            self._drop(key)

    def _drop_oldest(self, usage: _OwnerUsage) -> None:
        self._drop(next(iter(usage.keys)))

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self.used_bytes -= len(entry.value)
        usage = self._usages[entry.owner]
        usage.used_bytes -= len(entry.value)
        del usage.keys[key]
        if not usage.keys:
            del self._usages[entry.owner]
