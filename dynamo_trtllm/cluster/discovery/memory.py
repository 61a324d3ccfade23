"""Implement discovery in one process: several `MemoryDiscovery` share a `InstanceRecords`, as processes
share etcd.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from dynamo_trtllm.cluster.discovery.discovery_interface import Event, Synced
from dynamo_trtllm.cluster.discovery.instance_cache import InstanceCache
from dynamo_trtllm.cluster.discovery.records import namespace_prefix, written
from dynamo_trtllm.protocol.messages import Instance

_Change = tuple[str, bytes | None]  # key, record; None: deleted


class InstanceRecords:
    """Shared instance records of one process. Use it from one event loop."""

    def __init__(self) -> None:
        self._records: dict[str, bytes] = {}
        self._watchers: list[tuple[str, asyncio.Queue[_Change | None]]] = []

    def put(self, key: str, record: bytes) -> None:
        """Write a record and notify watchers."""
        self._records.pop(key, None)  # a record that is written again is listed last
        self._records[key] = record
        self._notify(key, record)

    def delete(self, key: str) -> None:
        """Delete a key if it exists, and notify watchers."""
        if self._records.pop(key, None) is not None:
            self._notify(key, None)

    def expire(self, instance_id: int) -> None:
        """Delete the keys of an instance, as if its lease had expired."""
        for key in [key for key in self._records if key.endswith(f"/{instance_id:x}")]:
            self.delete(key)

    def listed(self, prefix: str) -> dict[str, bytes]:
        """Return all records under a prefix."""
        return {key: record for key, record in self._records.items() if key.startswith(prefix)}

    def subscribe(self, prefix: str) -> asyncio.Queue[_Change | None]:
        """Return a queue of later changes under a prefix.

        It is unbounded, so its owner must read it or unsubscribe.
        """
        queue: asyncio.Queue[_Change | None] = asyncio.Queue()
        self._watchers.append((prefix, queue))
        return queue

    def unsubscribe(self, queue: asyncio.Queue[_Change | None]) -> None:
        """Stop adding changes to a queue."""
        self._watchers = [entry for entry in self._watchers if entry[1] is not queue]

    def _notify(self, key: str, record: bytes | None) -> None:
        for prefix, queue in self._watchers:
            if key.startswith(prefix):
                queue.put_nowait((key, record))


class MemoryRegistration:
    """A `Registration` in a `InstanceRecords`."""

    def __init__(self, store: InstanceRecords, key: str) -> None:
        self._store = store
        self._key: str | None = key

    async def aclose(self) -> None:
        key = self._key
        self._key = None
        if key is not None:
            self._store.delete(key)


class MemoryDiscovery:
    """A `Discovery` in a `InstanceRecords`, which several may share. Default: a store of its own."""

    def __init__(self, store: InstanceRecords | None = None) -> None:
        self._store = store or InstanceRecords()
        self._registrations: list[MemoryRegistration] = []
        self._queues: list[asyncio.Queue[_Change | None]] = []

    async def register(self, instance: Instance) -> MemoryRegistration:
        key, record = written(instance)
        self._store.put(key, record)
        registration = MemoryRegistration(self._store, key)
        self._registrations.append(registration)
        return registration

    async def watch(self, namespace: str) -> AsyncGenerator[Event, None]:
        """Yield events like `Discovery.watch`. End when this object is closed."""
        prefix = namespace_prefix(namespace)
        cache = InstanceCache()
        queue = self._store.subscribe(prefix)
        self._queues.append(queue)
        try:
            for event in cache.relist(self._store.listed(prefix)):
                yield event
            yield Synced()
            while (change := await queue.get()) is not None:
                key, record = change
                for event in cache.delete(key) if record is None else cache.put(key, record):
                    yield event
                if cache.next_list_s is not None:
                    for event in cache.relist(self._store.listed(prefix)):
                        yield event
        finally:
            self._store.unsubscribe(queue)
            self._queues.remove(queue)

    async def aclose(self) -> None:
        for registration in self._registrations:
            await registration.aclose()
        self._registrations.clear()
        for queue in self._queues:
            queue.put_nowait(None)
