"""Implement discovery on etcd: instance records on leases, and a watch that lists all records after each interruption.

A new list, instead of a resume at a revision, is correct in every case (compaction, data loss, another etcd member). It
takes one range read per watcher and reconnect. New instances of a list are reported at once. An instance that is
missing in it has left, or etcd lost its data; etcd does not show which. So missing instances get the time of a lease to
register again before they are removed. Meanwhile a request to an instance that has left is retried on another worker.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import TypeVar

from dynamo_trtllm.background import BackgroundTasks
from dynamo_trtllm.config.base import ConnectionConfig
from dynamo_trtllm.discovery.base import Event, Synced
from dynamo_trtllm.discovery.etcd_store import Change, EtcdStore, Lease, Snapshot, TlsFiles
from dynamo_trtllm.discovery.instance_cache import InstanceCache
from dynamo_trtllm.discovery.keys import namespace_prefix
from dynamo_trtllm.discovery.records import written
from dynamo_trtllm.errors import Unreachable
from dynamo_trtllm.messages import Instance


class Backoff:
    """Delays that double from `first_s` to `cap_s`, with jitter of up to half so that clients don't retry together."""

    def __init__(self, *, first_s: float = 0.05, cap_s: float = 1.0, rng: random.Random | None = None) -> None:
        self._first_s = first_s
        self._cap_s = cap_s
        self._rng = rng or random.Random()
        self._full_s = first_s

    def next_s(self) -> float:
        """Return the next delay in seconds."""
        delay = self._full_s * self._rng.uniform(0.5, 1.0)
        self._full_s = min(2 * self._full_s, self._cap_s)
        return delay

    def reset(self) -> None:
        """Start again with the first delay. Call it after a success."""
        self._full_s = self._first_s


logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
# Also for long leases: after etcd has lost its data, workers must register again before watchers remove them (10 s).
LONGEST_PAUSE_S = 3.0


class LeaseKeeper:
    """A `Registration` in etcd. It replaces a lost lease and writes the same key again."""

    def __init__(self, store: EtcdStore, key: str, record: bytes, *, ttl_s: float, tasks: BackgroundTasks) -> None:
        self._store = store
        self._tasks = tasks
        self._key = key
        self._record = record
        self._ttl_s = ttl_s
        self._lease: Lease | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Write the record and start to renew its lease. Raise Unreachable if etcd does not answer."""
        lease = await self._acquire()
        self._task = self._tasks.start(self._keep(lease), f"lease of {self._key}")

    async def _acquire(self) -> Lease:
        # This put detaches the key from an older lease that etcd may still have.
        lease = self._lease = await self._store.grant(self._ttl_s)
        await self._store.put(self._key, self._record, lease)
        return lease

    async def _keep(self, lease: Lease) -> None:
        while True:
            # A third of the TTL leaves time for two more attempts before the lease expires.
            await asyncio.sleep(min(lease.ttl_s / 3, LONGEST_PAUSE_S) * random.uniform(0.8, 1.0))
            try:
                if await self._store.keep_alive(lease):
                    continue
                reason = "the lease has expired"
            except Unreachable as exc:
                reason = exc.message
            logger.warning("lease renewal failed for %s, retrying: %s", self._key, reason)
            lease = await self._recover(lease)
            logger.info("registration %s is renewed", self._key)

    async def _recover(self, lease: Lease) -> Lease:
        """Retry until the old lease is renewed or the key is written with a new lease. Return the lease."""
        backoff = Backoff()
        while True:
            try:
                return lease if await self._store.keep_alive(lease) else await self._acquire()
            except Unreachable as exc:
                logger.debug("registration %s: %s", self._key, exc.message)
            await asyncio.sleep(backoff.next_s())

    async def aclose(self) -> None:
        task, self._task = self._task, None
        await self._tasks.cancel(task)
        lease, self._lease = self._lease, None
        if lease is None:
            return
        with suppress(Unreachable, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._store.delete(self._key)
                await self._store.revoke(lease)


START_TIMEOUT_S = 5.0  # enough for an etcd that starts at the same moment; a wrong address is reported soon
AWAY_TIMEOUT_S = 120.0  # if etcd has answered before: a restart of this worker would reload its model for minutes
LOG_EVERY_S = 5.0

T = TypeVar("T")


def tls_files(config: ConnectionConfig) -> TlsFiles:
    """Return the TLS files of a configuration."""
    return TlsFiles(ca=config.etcd_ca, cert=config.etcd_cert, key=config.etcd_key)


class EtcdDiscovery:
    """A `Discovery` in etcd. Create it on a running event loop.

    Args:
        endpoints: comma-separated addresses, HOST:PORT or http(s)://HOST:PORT.
        tls: certificate files for https:// endpoints.
        lease_ttl_s: seconds after which an instance that does not renew its lease is removed.
        start_timeout_s: seconds to wait for an etcd that has not answered yet.
        tasks: owner of the background tasks.

    Raises:
        ConfigError: the endpoints or certificate files are invalid.
    """

    def __init__(
        self,
        endpoints: str,
        *,
        tls: TlsFiles = TlsFiles(),  # noqa: B008 - a value
        lease_ttl_s: float = 10.0,
        start_timeout_s: float = START_TIMEOUT_S,
        tasks: BackgroundTasks | None = None,
    ) -> None:
        self._tasks = tasks or BackgroundTasks()
        self._store = EtcdStore(endpoints, tls)
        self._lease_ttl_s = lease_ttl_s
        self._start_timeout_s = start_timeout_s
        self._registrations: list[LeaseKeeper] = []

    async def register(self, instance: Instance) -> LeaseKeeper:
        key, record = written(instance)
        registration = LeaseKeeper(self._store, key, record, ttl_s=self._lease_ttl_s, tasks=self._tasks)
        self._registrations.append(registration)  # before the call, because a cancel may arrive after the record is put
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
        backoff = Backoff()
        loop = asyncio.get_running_loop()
        limit_s = AWAY_TIMEOUT_S if self._store.answered else self._start_timeout_s
        begun_s, log_at_s = loop.time(), 0.0
        while True:
            try:
                return await call()
            except Unreachable as exc:
                delay_s, waited_s = backoff.next_s(), loop.time() - begun_s
                if self._store.closed or waited_s + delay_s >= limit_s:
                    raise
                if waited_s >= log_at_s:
                    log_at_s += LOG_EVERY_S
                    logger.warning("waiting for etcd for %.0f s (up to %.0f s): %s", waited_s, limit_s, exc.message)
                await asyncio.sleep(delay_s)

    async def watch(self, namespace: str) -> AsyncGenerator[Event, None]:
        """Yield events like `Discovery.watch`. End when this object is closed.

        Raises:
            Unreachable: etcd does not answer the first list.
        """
        prefix, cache, backoff = namespace_prefix(namespace), InstanceCache(grace_s=self._lease_ttl_s), Backoff()
        loop = asyncio.get_running_loop()
        snapshot = await self._retry_at_start(lambda: self._store.read_all(prefix))
        for event in cache.relist(snapshot.records):
            yield event
        yield Synced()
        while not self._store.closed:
            async with aclosing(self._changes(prefix, snapshot, cache, backoff)) as changes:
                async for key, record in changes:
                    for event in cache.delete(key) if record is None else cache.put(key, record):
                        yield event
            again = await self._list_again(prefix, cache, backoff)
            if again is None:
                return
            snapshot = again
            for event in cache.relist(snapshot.records, loop.time()):
                yield event
            if cache.next_list_s is not None:
                logger.warning(
                    "etcd no longer lists some workers; keeping them for %g s in case they register again",
                    self._lease_ttl_s,
                )

    async def _changes(
        self, prefix: str, snapshot: Snapshot, cache: InstanceCache, backoff: Backoff
    ) -> AsyncGenerator[Change, None]:
        """Yield the changes after a list until the watch is interrupted, or until missing instances need a new list."""
        try:
            async with aclosing(self._store.changes(prefix, snapshot.revision + 1)) as batches:
                while True:
                    async with asyncio.timeout_at(cache.next_list_s):
                        batch = await anext(batches, None)
                    if batch is None:
                        break
                    backoff.reset()
                    for change in batch:
                        yield change
            reason = "etcd ended the stream"
        except TimeoutError:
            return
        except Unreachable as exc:
            reason = exc.message
        if not self._store.closed:
            logger.warning("etcd watch of %s interrupted, keeping known instances: %s", prefix, reason)

    async def _list_again(self, prefix: str, cache: InstanceCache, backoff: Backoff) -> Snapshot | None:
        """Retry until the list is read. Return None if this object is closed first."""
        while not self._store.closed:
            await asyncio.sleep(backoff.next_s())
            try:
                snapshot = await self._store.read_all(prefix)
            except Unreachable as exc:
                logger.debug("etcd watch of %s: %s", prefix, exc.message)
                cache.restart_grace()
            else:
                logger.info("etcd watch of %s resumed", prefix)
                return snapshot
        return None

    async def aclose(self) -> None:
        await asyncio.gather(*(registration.aclose() for registration in self._registrations))
        self._registrations.clear()
        await self._store.aclose()
