"""Know the addresses that prefill workers have registered for readers of their KV."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from dynamo_trtllm.protocol.messages import Instance, Role

# A prefill worker may have registered a moment ago: its call can come before its record.
WAIT_S: Final = 2.0


class PrefillAddresses:
    """The registered addresses of prefill workers, by instance id.

    The addresses of a worker that has left stay valid for a while, because a draining worker leaves
    discovery first, and its KV is still fetched. Runs on the event loop.

    Args:
        stay_s: how long the addresses of a worker that has left stay valid.
        wait_s: longest wait for an instance that is not registered yet.
        clock: returns seconds, monotonic.
    """

    def __init__(
        self,
        *,
        stay_s: float,
        wait_s: float = WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stay_s = stay_s
        self._wait_s = wait_s
        self._clock = clock
        self._addresses: dict[int, tuple[str, ...]] = {}
        # Instance id -> when its addresses are removed. Instances that left first come first.
        self._left: dict[int, float] = {}
        self._changed = asyncio.Event()

    def add(self, instance: Instance) -> None:
        """Note a registered instance. Only those that hold KV for others matter."""
        if instance.role not in (Role.PREFILL, Role.ELASTIC):
            return
        self._remove_expired()
        self._left.pop(instance.id, None)
        self._addresses[instance.id] = instance.kv_addresses
        self._changed.set()
        self._changed = asyncio.Event()

    def remove(self, instance_id: int) -> None:
        """Note that an instance has left."""
        self._remove_expired()
        # If it has left already, its first departure counts.
        if instance_id in self._addresses and instance_id not in self._left:
            self._left[instance_id] = self._clock() + self._stay_s

    async def addresses_of(self, instance_id: int) -> tuple[str, ...] | None:
        """Return the addresses of an instance; wait a moment if it is not registered.

        None: it is not registered.
        """
        self._remove_expired()
        try:
            async with asyncio.timeout(self._wait_s):
                while instance_id not in self._addresses:
                    await self._changed.wait()
        except TimeoutError:
            return None
        return self._addresses[instance_id]

    def _remove_expired(self) -> None:
        now = self._clock()
        while self._left:
            first = next(iter(self._left))
            if self._left[first] > now:
                break
            del self._left[first]
            del self._addresses[first]
