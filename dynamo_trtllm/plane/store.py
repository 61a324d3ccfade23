"""Small named values that outlive a request: the seam, and the bounded twin in this process's memory.

`jetstream` holds the same values for several processes; one contract suite holds both.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dynamo_trtllm.errors import PayloadTooLarge


class Store(Protocol):
    """Bytes by key. When a bound is reached the oldest values go; every value goes after a time."""

    async def put(self, key: str, value: bytes) -> None:
        """Readable by everyone once it returned. Raises PayloadTooLarge for one that is larger than the whole store,
        Disconnected or Unreachable when the store is away."""
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
    ttl_s: float


def too_large(size_bytes: int, max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"{size_bytes} bytes are more than the store of {max_bytes} bytes holds; give it more")


class _Entry(NamedTuple):
    value: bytes
    expires_s: float  # on the clock


class MemoryStore:
    """Values of this process, gone with it. `clock` gives seconds that only rise."""

    def __init__(self, limits: StoreLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the oldest first, which also expire first
        self.used_bytes = 0

    async def put(self, key: str, value: bytes) -> None:
        if len(value) > self._limits.max_bytes:
            raise too_large(len(value), self._limits.max_bytes)
        self._drop(key)
        self._entries[key] = _Entry(value, self._clock() + self._limits.ttl_s)
        self.used_bytes += len(value)
        while self.used_bytes > self._limits.max_bytes or len(self._entries) > self._limits.max_entries:
            self._drop(next(iter(self._entries)))
        self._expire()

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

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.used_bytes -= len(entry.value)
