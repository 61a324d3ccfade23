"""Implement discovery on etcd, with instance records on leases.

After each interruption, a watch lists all records. A watch could also resume at a revision, but
only a list is correct in every case: after a compaction, after data loss, and with another etcd
member. A list takes one range read for each watcher and reconnect.

New instances of a list are reported at once. If an instance is missing in the list, the instance
has left, or etcd has lost data. etcd does not show which of the two has happened. So missing
instances get the time of a lease to register again before they are removed. Meanwhile, a request to
an instance that has left is retried on another worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from dynamo_trtllm.cluster.discovery.discovery_interface import Event, StoredShares, Synced
from dynamo_trtllm.cluster.discovery.etcd_store import (
    Change,
    EtcdStore,
    Lease,
    LeaseKeeper,
    Snapshot,
    backoff,
)
from dynamo_trtllm.cluster.discovery.instance_cache import InstanceCache
from dynamo_trtllm.cluster.discovery.records import namespace_prefix, written
from dynamo_trtllm.cluster.discovery.share_records import (
    planner_key,
    share_key,
    stored_shares,
    written_share_table,
)
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent
from dynamo_trtllm.protocol.errors import Unreachable
from dynamo_trtllm.protocol.messages import Instance
from dynamo_trtllm.protocol.shares import ShareTable
from dynamo_trtllm.support.background import BackgroundTasks

log = logging.getLogger(__name__)

# The longest wait for the first answer of etcd. It is long enough if etcd starts at the same
# moment, and short enough to report a wrong address soon.
START_TIMEOUT_S = 5.0
# The longest wait if etcd has answered before. If the worker gave up earlier, it would be restarted
# and load its model again, which takes minutes.
AWAY_TIMEOUT_S = 120.0
LOG_EVERY_S = 5.0  # time between two log lines while etcd does not answer
_ETCD = "etcd"  # name in the flight recorder

T = TypeVar("T")


class EtcdLeadership:
    """A `Leadership`: a key that expires with a lease.

    The revision of etcd with which the key was written is the epoch.
    """

    def __init__(self, store: EtcdStore, key: str, lease: Lease, epoch: int) -> None:
        self._store = store
        self._key = key
        self._lease: Lease | None = lease
        self.epoch = epoch

    async def renew(self) -> bool:
        """See `Leadership.renew`."""
        if self._lease is None or not await self._store.keep_alive(self._lease):
            return False
        return await self._store.revision_of(self._key) == self.epoch

    async def aclose(self) -> None:
        """See `Leadership.aclose`."""
        lease = self._lease
        self._lease = None
        if lease is not None:
            await self._store.release(lease)


@dataclass(eq=False)
class EtcdDiscovery:
    """A `Discovery` in etcd. Create it on a running event loop.

    Raises:
        ConfigError: the endpoints or certificate files are invalid.
    """

    config: ConnectionConfig  # has the addresses of etcd, and the files for TLS
    # If an instance does not renew its lease for this time, it is removed.
    lease_ttl_s: float = 10.0
    start_timeout_s: float = START_TIMEOUT_S  # longest wait for an etcd that has not answered yet
    tasks: BackgroundTasks = field(default_factory=BackgroundTasks)

    def __post_init__(self) -> None:
        self._store = EtcdStore(self.config)
        self._registrations: list[LeaseKeeper] = []
        self.problem = ""  # see `Discovery.problem`

    async def register(self, instance: Instance) -> LeaseKeeper:
        key, record = written(instance)
        replaced = [registration for registration in self._registrations if registration.key == key]
        for earlier in replaced:
            self._registrations.remove(earlier)
            await earlier.replace()
        registration = LeaseKeeper(
            self._store, key, record, ttl_s=self.lease_ttl_s, tasks=self.tasks
        )
        # The registration is stored before the call, because a cancel may arrive after the record
        # was written.
        self._registrations.append(registration)
        try:
            await self._retry_at_start(registration.start)
        except Unreachable:
            self._registrations.remove(registration)
            raise
        return registration

    async def _retry_at_start(self, call: Callable[[], Awaitable[T]]) -> T:
        """Retry `call` for `start_timeout_s`, or AWAY_TIMEOUT_S if etcd has answered before.

        Raises:
            Unreachable: the last error.
        """
        delays = backoff()
        loop = asyncio.get_running_loop()
        limit_s = AWAY_TIMEOUT_S if self._store.answered else self.start_timeout_s
        begun_s = loop.time()
        log_at_s = 0.0
        RECORDER.record_process(RecordedEvent.CONNECTION_AWAITED, _ETCD)
        while True:
            try:
                answer = await call()
            except Unreachable as exc:
                delay_s = next(delays)
                waited_s = loop.time() - begun_s
                if self._store.closed or waited_s + delay_s >= limit_s:
                    raise
                if waited_s >= log_at_s:
                    log_at_s += LOG_EVERY_S
                    text = "waiting for etcd for %.0f s (up to %.0f s): %s"
                    log.warning(text, waited_s, limit_s, exc.message)
                await asyncio.sleep(delay_s)
            else:
                RECORDER.record_process(RecordedEvent.CONNECTED, _ETCD)
                return answer

    async def watch(self, namespace: str) -> AsyncGenerator[Event, None]:
        """Yield events like `Discovery.watch`. End when this object is closed.

        Raises:
            Unreachable: etcd does not answer the first list.
        """
        prefix = namespace_prefix(namespace)
        cache = InstanceCache(grace_s=self.lease_ttl_s)
        delays = backoff()
        loop = asyncio.get_running_loop()
        snapshot = await self._retry_at_start(partial(self._store.read_all, prefix))
        for event in cache.relist(snapshot.records):
            yield event
        yield Synced()
        while not self._store.closed:
            async with aclosing(self._changes(prefix, snapshot, cache)) as batches:
                async for batch in batches:
                    delays = backoff()  # the watch runs, so the next delays begin short again
                    for key, record in batch:
                        events = cache.delete(key) if record is None else cache.put(key, record)
                        for event in events:
                            yield event
            again = await self._list_again(prefix, cache, delays)
            if again is None:
                return
            snapshot = again
            for event in cache.relist(snapshot.records, loop.time()):
                yield event
            # A time above 0 is the end of the grace time of missing instances. 0.0 would mean that
            # a list is needed for another reason.
            if cache.next_list_s:
                text = (
                    "etcd no longer lists some workers; keeping them for %g s in case they register"
                    " again"
                )
                log.warning(text, self.lease_ttl_s)

    async def _changes(
        self, prefix: str, snapshot: Snapshot, cache: InstanceCache
    ) -> AsyncGenerator[list[Change], None]:
        """Yield the changes after a list.

        The generator ends when the watch is interrupted or missing instances need a new list.
        """
        try:
            async with aclosing(self._store.changes(prefix, snapshot.revision + 1)) as batches:
                while True:
                    async with asyncio.timeout_at(cache.next_list_s):
                        batch = await anext(batches, None)
                    if batch is None:
                        break
                    yield batch
            reason = "etcd ended the stream"
        except TimeoutError:
            return  # missing instances need a new list
        except Unreachable as exc:
            reason = exc.message
        if not self._store.closed:
            self.problem = f"etcd is not reachable: {reason}"
            RECORDER.record_process(RecordedEvent.CONNECTION_LOST, _ETCD)
            log.warning("etcd watch of %s interrupted, keeping known instances: %s", prefix, reason)

    async def _list_again(
        self, prefix: str, cache: InstanceCache, delays: Iterator[float]
    ) -> Snapshot | None:
        """Retry until the list is read. Return None if this object is closed first."""
        while not self._store.closed:
            await asyncio.sleep(next(delays))
            try:
                snapshot = await self._store.read_all(prefix)
            except Unreachable as exc:
                log.debug("etcd watch of %s: %s", prefix, exc.message)
                cache.restart_grace()
            else:
                self.problem = ""
                RECORDER.record_process(RecordedEvent.CONNECTED, _ETCD)
                log.info("etcd watch of %s resumed", prefix)
                return snapshot
        return None

    async def read_shares(self, namespace: str) -> StoredShares:
        """See `Discovery.read_shares`."""
        stored = await self._retry_at_start(partial(self._store.read, share_key(namespace)))
        return stored_shares(None, 0) if stored is None else stored_shares(*stored)

    async def write_shares(self, namespace: str, table: ShareTable, version: int) -> bool:
        """See `Discovery.write_shares`."""
        record = written_share_table(table)
        return await self._store.put_if_unchanged(share_key(namespace), record, version)

    async def try_to_lead(self, namespace: str, name: str) -> EtcdLeadership | None:
        """See `Discovery.try_to_lead`."""
        key = planner_key(namespace)
        # While another planner leads, the planners that wait try this again and again. This check
        # avoids a new lease for each attempt.
        if await self._store.revision_of(key):
            return None
        lease = await self._store.grant(self.lease_ttl_s)
        epoch = await self._store.create(key, name.encode(), lease)
        if epoch is None:
            await self._store.revoke(lease)
            return None
        return EtcdLeadership(self._store, key, lease, epoch)

    async def aclose(self) -> None:
        await asyncio.gather(*(registration.aclose() for registration in self._registrations))
        self._registrations.clear()
        await self._store.aclose()
