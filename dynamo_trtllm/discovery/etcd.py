"""Discovery on etcd: keys on leases, and a watch that lists again whenever its stream broke.

Listing again, instead of resuming at a revision, is right in every case (compaction, data lost, another member) and
costs one range read per watcher and reconnect. New instances of a list are reported at once. An instance that the list
lacks left while the watch was cut, or etcd lost its data. Nothing in etcd distinguishes these cases: after writes past
the old revision it looks as before, its ids too. So missing instances get the time of a lease to register again before
they are removed. One that did leave costs little meanwhile: a request to it goes to another worker at once.
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
    """Delays that double from `first_s` to `cap_s`, each shortened at random by up to a half, so that many do not
    come back at the same moment."""

    def __init__(self, *, first_s: float = 0.05, cap_s: float = 1.0, rng: random.Random | None = None) -> None:
        self._first_s = first_s
        self._cap_s = cap_s
        self._rng = rng or random.Random()
        self._full_s = first_s

    def next_s(self) -> float:
        """The next delay in seconds."""
        delay = self._full_s * self._rng.uniform(0.5, 1.0)
        self._full_s = min(2 * self._full_s, self._cap_s)
        return delay

    def reset(self) -> None:
        """After a success: start again with the first delay."""
        self._full_s = self._first_s


logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
# A worker with a long lease looks as often, so that it is back soon where etcd has lost its data: watchers wait 10 s.
LONGEST_PAUSE_S = 3.0


class LeaseKeeper:
    """See `base.Registration`. A lost lease is replaced and the same key put again, for ever."""

    def __init__(self, store: EtcdStore, key: str, record: bytes, *, ttl_s: float, tasks: BackgroundTasks) -> None:
        self._store = store
        self._tasks = tasks
        self._key = key
        self._record = record
        self._ttl_s = ttl_s
        self._lease: Lease | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Puts the key and starts to keep it. Raises Unreachable."""
        lease = await self._acquire()
        self._task = self._tasks.start(self._keep(lease), f"lease of {self._key}")

    async def _acquire(self) -> Lease:
        # An older lease, if etcd still has it, no longer holds the key after this put: the key is never there twice.
        lease = self._lease = await self._store.grant(self._ttl_s)
        await self._store.put(self._key, self._record, lease)
        return lease

    async def _keep(self, lease: Lease) -> None:
        while True:
            # A third of the TTL leaves two more tries before the lease runs out.
            await asyncio.sleep(min(lease.ttl_s / 3, LONGEST_PAUSE_S) * random.uniform(0.8, 1.0))
            try:
                if await self._store.keep_alive(lease):
                    continue
                reason = "etcd forgot its lease"
            except Unreachable as exc:
                reason = exc.message
            logger.warning("registration %s is not renewed, trying on: %s", self._key, reason)
            lease = await self._recover(lease)
            logger.info("registration %s is renewed", self._key)

    async def _recover(self, lease: Lease) -> Lease:
        """The lease that holds the key, the old one or a new one; however long it takes."""
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


START_TIMEOUT_S = 5.0  # etcd may start at the same moment as we do; a wrong address is reported soon
AWAY_TIMEOUT_S = 120.0  # for one that has answered before: what was loaded in minutes is not given up for less
LOG_EVERY_S = 5.0

T = TypeVar("T")


def tls_files(config: ConnectionConfig) -> TlsFiles:
    return TlsFiles(ca=config.etcd_ca, cert=config.etcd_cert, key=config.etcd_key)


class EtcdDiscovery:
    """See `base.Discovery`. `endpoints` is comma-separated, `tasks` owns what runs in the background.

    Made on a running event loop. Raises ConfigError.
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
        self._registrations.append(registration)  # first: a cancel may come when the record is there already
        try:
            await self._retry_at_start(registration.start)
        except Unreachable:
            self._registrations.remove(registration)
            raise
        return registration

    async def _retry_at_start(self, call: Callable[[], Awaitable[T]]) -> T:
        """Tries for `start_timeout_s`, or longer where etcd has answered before; then raises the last Unreachable."""
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
                    logger.warning("waiting for etcd since %.0f s, up to %.0f s: %s", waited_s, limit_s, exc.message)
                await asyncio.sleep(delay_s)

    async def watch(self, namespace: str) -> AsyncGenerator[Event, None]:
        """See `base.Discovery.watch`; ends when this object is closed. Raises Unreachable if etcd can't be reached
        for its first list."""
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
                logger.warning("instances that etcd lists no more are kept for up to %g s", self._lease_ttl_s)

    async def _changes(
        self, prefix: str, snapshot: Snapshot, cache: InstanceCache, backoff: Backoff
    ) -> AsyncGenerator[Change, None]:
        """What follows the list, until the watch is cut or it is time to see whether the missing are there now."""
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
            reason = "etcd ended it"
        except TimeoutError:
            return
        except Unreachable as exc:
            reason = exc.message
        if not self._store.closed:
            logger.warning("the watch of %s is cut, what is known is kept: %s", prefix, reason)

    async def _list_again(self, prefix: str, cache: InstanceCache, backoff: Backoff) -> Snapshot | None:
        """However long it takes; None when this object is closed meanwhile."""
        while not self._store.closed:
            await asyncio.sleep(backoff.next_s())
            try:
                snapshot = await self._store.read_all(prefix)
            except Unreachable as exc:
                logger.debug("the watch of %s: %s", prefix, exc.message)
                cache.restart_grace()
            else:
                logger.info("the watch of %s is back", prefix)
                return snapshot
        return None

    async def aclose(self) -> None:
        await asyncio.gather(*(registration.aclose() for registration in self._registrations))
        self._registrations.clear()
        await self._store.aclose()
