"""One instance's key on a lease, kept there through any outage of etcd. Knows no watches."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress

from dynamo_trtllm.background import BackgroundTasks
from dynamo_trtllm.discovery.backoff import Backoff
from dynamo_trtllm.discovery.etcd_store import EtcdStore, Lease
from dynamo_trtllm.errors import Unreachable

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
