"""Implement discovery within one process (`--etcd-endpoints memory://`).

Several objects of `MemoryDiscovery` share one `InstanceRecords`, as processes share etcd. They may
run on event loops of several threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Final

from dynamo_trtllm.cluster.discovery.discovery_interface import Event, StoredShares, Synced
from dynamo_trtllm.cluster.discovery.instance_cache import InstanceCache
from dynamo_trtllm.cluster.discovery.records import namespace_prefix, written
from dynamo_trtllm.cluster.discovery.share_records import (
    planner_key,
    share_key,
    stored_shares,
    written_share_table,
)
from dynamo_trtllm.cluster.shared_by_address import SharedByAddress
from dynamo_trtllm.protocol.messages import Instance
from dynamo_trtllm.protocol.shares import ShareTable

_Change = tuple[str, bytes | None]  # a key and its new record; None: it was deleted
_NO_RECORD: Final = 0  # the version of a key that has no record


class _Watcher:
    """The changes under one prefix, for the event loop that created this object.

    The queue is unbounded, so its owner must read it or unsubscribe.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._loop = asyncio.get_running_loop()
        self.changes: asyncio.Queue[_Change | None] = asyncio.Queue()  # None: no change follows

    def notify(self, change: _Change) -> None:
        """Add a change to the queue if it is under the prefix. Callable from any thread."""
        key, _ = change
        if not key.startswith(self._prefix):
            return
        # RuntimeError: the event loop was closed before `MemoryDiscovery.aclose`.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.changes.put_nowait, change)


class InstanceRecords:
    """The instance records of one cluster within this process. Thread-safe."""

    def __init__(self) -> None:
        self._records: dict[str, bytes] = {}
        self._versions: dict[str, int] = {}  # how often each key was written
        self._watchers: list[_Watcher] = []
        # Watchers are notified while this lock is held. So they get the changes in the order of the
        # writes.
        self._changing = threading.Lock()

    def put(self, key: str, record: bytes) -> None:
        """Write a record and notify watchers."""
        with self._changing:
            self._put(key, record)

    def put_if_unchanged(self, key: str, record: bytes, version: int) -> bool:
        """Write a record like `put` if its key has this version. Otherwise return False.

        The version is _NO_RECORD if the key must not exist.
        """
        with self._changing:
            if self._version(key) != version:
                return False
            self._put(key, record)
            return True

    def read(self, key: str) -> tuple[bytes | None, int]:
        """Return a record and its version, or None and _NO_RECORD."""
        with self._changing:
            return self._records.get(key), self._version(key)

    def _version(self, key: str) -> int:
        """Return the version of a key.

        If a deleted key is written again, its versions continue: none occurs twice.
        """
        return self._versions[key] if key in self._records else _NO_RECORD

    def _put(self, key: str, record: bytes) -> None:
        self._records.pop(key, None)  # a record that is written again is listed last
        self._records[key] = record
        self._versions[key] = self._versions.get(key, 0) + 1
        self._notify(key, record)

    def delete(self, key: str) -> None:
        """Delete a key if it exists, and notify watchers."""
        with self._changing:
            if self._records.pop(key, None) is not None:
                self._notify(key, None)

    def expire(self, instance_id: int) -> None:
        """Delete the keys of an instance, as if its lease had expired."""
        with self._changing:
            keys = [key for key in self._records if key.endswith(f"/{instance_id:x}")]
        for key in keys:
            self.delete(key)

    def listed(self, prefix: str) -> dict[str, bytes]:
        """Return all records under a prefix."""
        with self._changing:
            return {key: data for key, data in self._records.items() if key.startswith(prefix)}

    def subscribe(self, prefix: str) -> _Watcher:
        """Return a watcher of later changes under a prefix."""
        watcher = _Watcher(prefix)
        with self._changing:
            self._watchers.append(watcher)
        return watcher

    def unsubscribe(self, watcher: _Watcher) -> None:
        """Stop notifying a watcher."""
        with self._changing:
            self._watchers.remove(watcher)

    def _notify(self, key: str, record: bytes | None) -> None:
        for watcher in self._watchers:
            watcher.notify((key, record))


RECORDS: Final = SharedByAddress(InstanceRecords)


class MemoryRegistration:
    """A `Registration` in `InstanceRecords`."""

    def __init__(self, records: InstanceRecords, key: str) -> None:
        self._records = records
        self._key: str | None = key

    def disown(self) -> None:
        """Do not delete the record in `aclose`: a later registration owns it."""
        self._key = None

    async def aclose(self) -> None:
        key = self._key
        self._key = None
        if key is not None:
            self._records.delete(key)


class MemoryLeadership:
    """A `Leadership` in `InstanceRecords`. It does not expire.

    The epoch is the number of times that the key of the planner was written.
    """

    def __init__(self, records: InstanceRecords, key: str, epoch: int) -> None:
        self._records = records
        self._key = key
        self.epoch = epoch

    async def renew(self) -> bool:
        """See `Leadership.renew`."""
        _, version = self._records.read(self._key)
        return version == self.epoch

    async def aclose(self) -> None:
        """See `Leadership.aclose`."""
        if await self.renew():
            self._records.delete(self._key)


class MemoryDiscovery:
    """A `Discovery` in `InstanceRecords`.

    Args:
        records: the records, which other members of the cluster share. None: new records.
    """

    def __init__(self, records: InstanceRecords | None = None) -> None:
        self._records = records or InstanceRecords()
        self._registrations: dict[str, MemoryRegistration] = {}  # the registrations, by key
        self._watchers: list[_Watcher] = []
        self._closed = False

    @property
    def problem(self) -> str:
        """See `Discovery.problem`."""
        return ""

    async def register(self, instance: Instance) -> MemoryRegistration:
        key, record = written(instance)
        earlier = self._registrations.get(key)
        if earlier is not None:
            earlier.disown()
        self._records.put(key, record)
        registration = MemoryRegistration(self._records, key)
        self._registrations[key] = registration
        return registration

    async def watch(self, namespace: str) -> AsyncGenerator[Event, None]:
        """Yield events like `Discovery.watch`. End when this object is closed."""
        prefix = namespace_prefix(namespace)
        cache = InstanceCache()
        watcher = self._records.subscribe(prefix)
        self._watchers.append(watcher)
        try:
            for event in cache.relist(self._records.listed(prefix)):
                yield event
            yield Synced()
            while not self._closed:
                change = await watcher.changes.get()
                if change is None:
                    return
                key, record = change
                events = cache.delete(key) if record is None else cache.put(key, record)
                for event in events:
                    yield event
                # The removal of an instance may have made rejected records valid.
                needs_list = cache.next_list_s is not None
                if needs_list:
                    for event in cache.relist(self._records.listed(prefix)):
                        yield event
        finally:
            self._records.unsubscribe(watcher)
            self._watchers.remove(watcher)

    async def read_shares(self, namespace: str) -> StoredShares:
        """See `Discovery.read_shares`."""
        return stored_shares(*self._records.read(share_key(namespace)))

    async def write_shares(self, namespace: str, table: ShareTable, version: int) -> bool:
        """See `Discovery.write_shares`."""
        record = written_share_table(table)
        return self._records.put_if_unchanged(share_key(namespace), record, version)

    async def try_to_lead(self, namespace: str, name: str) -> MemoryLeadership | None:
        """See `Discovery.try_to_lead`."""
        key = planner_key(namespace)
        if not self._records.put_if_unchanged(key, name.encode(), _NO_RECORD):
            return None
        _, epoch = self._records.read(key)
        return MemoryLeadership(self._records, key, epoch)

    async def aclose(self) -> None:
        self._closed = True
        for registration in self._registrations.values():
            await registration.aclose()
        self._registrations.clear()
        for watcher in self._watchers:
            watcher.changes.put_nowait(None)
