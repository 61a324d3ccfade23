"""Read, write and watch the keys of etcd, and renew the lease of a record.

Every gRPC failure is raised as `Unreachable`.

The clients of PyPI are not used for these reasons, measured on 2 CPU cores with etcd 3.5.1:

* After a disconnect, the watch of etcd3aio 0.3.0 resumes at the revision of the reply's header, so
  it skips pending events. After a compaction, the watch hangs. Its channels accept no host names,
  and a new client inherits the reconnect delay of the old channel.
* etcd3-py 0.1.6 uses HTTP. It makes 408 puts/s instead of 1741, its asynchronous watch delivered 17
  of 201 events, and its keep-alive thread ends after an outage of 4 s.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import grpc.aio

from dynamo_trtllm.cluster.discovery import etcd_api as api
from dynamo_trtllm.cluster.discovery.etcd_connection import CALL_TIMEOUT_S, EtcdConnection
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.protocol.errors import Unreachable
from dynamo_trtllm.support.background import BackgroundTasks

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
# Longest pause between renewals of a lease, even if the lease is long. If etcd has lost its data,
# watchers remove workers that have not registered again after 10 s.
MAX_PAUSE_S = 3.0
FIRST_DELAY_S = 0.05  # the first delay between attempts
MAX_DELAY_S = 1.0
Change: TypeAlias = tuple[str, bytes | None]  # a key and its new record; None: it was deleted


def key_text(key: bytes) -> str:
    """Decode a key so that `key_bytes` restores it.

    Never raises, because etcd accepts any bytes as a key.
    """
    return key.decode("utf-8", "surrogateescape")


def key_bytes(key: str) -> bytes:
    """Encode a key that `key_text` decoded."""
    return key.encode("utf-8", "surrogateescape")


def prefix_end(prefix: str) -> bytes:
    """Return the first key after all keys that begin with a prefix, which must not be empty."""
    key = prefix.encode()
    # The last byte has a successor, because UTF-8 has no byte 255.
    return key[:-1] + bytes([key[-1] + 1])


class Snapshot(NamedTuple):
    """All records under a prefix at one revision of etcd."""

    records: dict[str, bytes]  # the records by key, in the order in which they were last written
    revision: int


class StoredRecord(NamedTuple):
    """A record, and the revision of etcd with which its key was last written."""

    record: bytes
    revision: int


class Lease(NamedTuple):
    """A lease of etcd."""

    id: int
    # The time that etcd has granted, which may be more than the requested time. In the leases that
    # `leases` returns, it is the remaining time.
    ttl_s: int


class EtcdStore:
    """The records and leases of one etcd cluster."""

    def __init__(self, config: ConnectionConfig) -> None:
        """Create the connection. Raises the errors of `EtcdConnection`."""
        self.connection = EtcdConnection(config)

    @property
    def closed(self) -> bool:
        """Return True after `aclose`."""
        return self.connection.closed

    @property
    def answered(self) -> bool:
        """Return True after the first successful call."""
        return self.connection.answered

    async def read_all(self, prefix: str) -> Snapshot:
        """Return all records under a prefix."""
        reply = await self._range(prefix)
        written = sorted(reply.kvs, key=attrgetter("mod_revision"))
        records = {key_text(pair.key): pair.value for pair in written}
        return Snapshot(records=records, revision=reply.header.revision)

    async def leases(self, prefix: str) -> dict[str, Lease | None]:
        """Return the lease of every key under a prefix, with its remaining time.

        None: the key has no lease, or its lease has expired.
        """
        reply = await self._range(prefix)
        return {key_text(pair.key): await self._left(pair.lease) for pair in reply.kvs}

    async def _range(self, prefix: str) -> Any:
        request = api.RangeRequest(key=prefix.encode(), range_end=prefix_end(prefix))
        return await self.connection.call("range", request)

    async def _left(self, lease_id: int) -> Lease | None:
        """Return a lease with its remaining time. None: the lease has expired, or its id is 0."""
        if not lease_id:
            return None
        request = api.LeaseTimeToLiveRequest(ID=lease_id)
        reply = await self.connection.call("lease_time_to_live", request)
        # -1: the lease has expired. 0: less than a second is left.
        return Lease(id=lease_id, ttl_s=reply.TTL) if reply.TTL >= 0 else None

    async def put(self, key: str, record: bytes, lease: Lease) -> int:
        """Write a record that expires with the lease.

        Returns:
            The revision of etcd with which the record was written.
        """
        request = api.PutRequest(key=key_bytes(key), value=record, lease=lease.id)
        reply = await self.connection.call("put", request)
        return int(reply.header.revision)

    async def read(self, key: str) -> StoredRecord | None:
        """Return the record of a key, or None if the key does not exist."""
        reply = await self.connection.call("range", api.RangeRequest(key=key_bytes(key)))
        if not reply.kvs:
            return None
        return StoredRecord(reply.kvs[0].value, int(reply.kvs[0].mod_revision))

    async def put_if_unchanged(self, key: str, record: bytes, revision: int) -> bool:
        """Write a record without a lease, if its key was last written with this revision of etcd.

        Args:
            key: the key.
            record: the record.
            revision: see `StoredRecord`. 0: the key must not exist.

        Returns:
            False if the key has changed. Then nothing is written.
        """
        unchanged = api.Compare(target=api.Compare.MOD, key=key_bytes(key), mod_revision=revision)
        put = api.RequestOp(request_put=api.PutRequest(key=key_bytes(key), value=record))
        request = api.TxnRequest(compare=[unchanged], success=[put])
        reply = await self.connection.call("txn", request)
        return bool(reply.succeeded)

    async def create(self, key: str, record: bytes, lease: Lease) -> int | None:
        """Write a record that expires with the lease, if its key does not exist.

        Returns:
            The revision of etcd with which the record was written, or None if the key exists.
        """
        absent = api.Compare(target=api.Compare.MOD, key=key_bytes(key), mod_revision=0)
        put = api.PutRequest(key=key_bytes(key), value=record, lease=lease.id)
        request = api.TxnRequest(compare=[absent], success=[api.RequestOp(request_put=put)])
        reply = await self.connection.call("txn", request)
        return int(reply.header.revision) if reply.succeeded else None

    async def revision_of(self, key: str) -> int:
        """Return the revision of etcd with which a key was last written. 0: it does not exist."""
        request = api.RangeRequest(key=key_bytes(key), keys_only=True)
        reply = await self.connection.call("range", request)
        return int(reply.kvs[0].mod_revision) if reply.kvs else 0

    async def delete(self, key: str) -> None:
        """Delete a key if it exists."""
        request = api.DeleteRangeRequest(key=key_bytes(key))
        await self.connection.call("delete_range", request)

    async def grant(self, ttl_s: float) -> Lease:
        """Create a lease of at least `ttl_s` seconds."""
        request = api.LeaseGrantRequest(TTL=max(1, math.ceil(ttl_s)))
        reply = await self.connection.call("lease_grant", request)
        return Lease(id=reply.ID, ttl_s=reply.TTL)

    async def keep_alive(self, lease: Lease) -> bool:
        """Renew a lease. Return False if it has expired."""
        async with self.connection.attempt() as (etcd, metadata):
            call = etcd.lease_keep_alive(timeout=CALL_TIMEOUT_S, metadata=metadata)
            try:
                await call.write(api.LeaseKeepAliveRequest(ID=lease.id))
                reply = await call.read()
            finally:
                call.cancel()
        if reply is grpc.aio.EOF:
            raise self.connection.unreachable(index=None, reason="etcd ended the keep-alive stream")
        return bool(reply.TTL > 0)

    async def revoke(self, lease: Lease) -> None:
        """Revoke a lease, which deletes its keys. Ignore an unknown lease."""
        request = api.LeaseRevokeRequest(ID=lease.id)
        async with self.connection.attempt() as (etcd, metadata):
            try:
                await etcd.lease_revoke(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
            except grpc.aio.AioRpcError as exc:
                if exc.code() is not grpc.StatusCode.NOT_FOUND:
                    raise

    async def release(self, lease: Lease, *keys: str) -> None:
        """Delete keys and revoke their lease.

        After CLOSE_TIMEOUT_S, this gives up. The lease then expires by itself.
        """
        with suppress(Unreachable, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for key in keys:
                    await self.delete(key)
                await self.revoke(lease)

    async def changes(self, prefix: str, from_revision: int) -> AsyncGenerator[list[Change], None]:
        """Yield the changes from a revision on, in batches.

        The first batch is empty and shows that the watch runs.

        The generator ends if etcd cancels the watch, which happens after a compaction. It also ends
        if etcd has lost data.

        Args:
            prefix: the prefix of the keys.
            from_revision: the first revision that the caller has not read.

        Raises:
            Unreachable: the connection is lost.
        """
        create = api.WatchCreateRequest(
            key=prefix.encode(), range_end=prefix_end(prefix), start_revision=from_revision
        )
        async with self.connection.attempt() as (etcd, metadata):
            call = etcd.watch(metadata=metadata)
            try:
                await call.write(api.WatchRequest(create_request=create))
                while True:
                    reply = await call.read()
                    if reply is grpc.aio.EOF or reply.canceled:
                        break
                    # If the revision of etcd is older than the one that was read, etcd has lost
                    # data.
                    if reply.header.revision + 1 < from_revision:
                        break
                    yield [_change(event) for event in reply.events]
            finally:
                call.cancel()

    async def aclose(self) -> None:
        """Cancel running calls and close the connections. Idempotent."""
        await self.connection.aclose()


def _change(event: Any) -> Change:
    record = None if event.type == api.DELETE else event.kv.value
    return key_text(event.kv.key), record


def backoff() -> Iterator[float]:
    """Yield delays in seconds that double up to a limit.

    The delays are random to a part, so that clients don't retry at the same time.
    """
    full_s = FIRST_DELAY_S
    while True:
        yield full_s * random.uniform(0.5, 1.0)
        full_s = min(2 * full_s, MAX_DELAY_S)


class LeaseKeeper:
    """A `Registration` in etcd.

    A background task renews the lease. If the lease was lost, the task writes the key with a new
    lease. After each renewal, the task checks whether another client has deleted or overwritten the
    key, and then writes the key again.
    """

    def __init__(
        self, store: EtcdStore, key: str, record: bytes, *, ttl_s: float, tasks: BackgroundTasks
    ) -> None:
        self._store = store
        self._tasks = tasks
        self.key = key
        self._record = record
        self._revision = 0  # revision of etcd with which the record was last written
        self._ttl_s = ttl_s
        self._lease: Lease | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Write the record, and start to renew its lease.

        Raises:
            Unreachable: etcd does not answer.
        """
        lease = await self._acquire()
        self._task = self._tasks.start(self._keep(lease), f"lease of {self.key}")

    async def _acquire(self) -> Lease:
        """Write the record with a new lease, and return the lease."""
        lease = await self._store.grant(self._ttl_s)
        self._lease = lease
        # If etcd still has an older lease of the key, this separates the key from it.
        await self._put(lease)
        return lease

    async def _put(self, lease: Lease) -> None:
        self._revision = await self._store.put(self.key, self._record, lease)

    async def _restore(self, lease: Lease) -> None:
        """Write the record again if its key was deleted or overwritten."""
        if await self._store.revision_of(self.key) == self._revision:
            return
        log.warning("%s was deleted or overwritten in etcd; writing it again", self.key)
        await self._put(lease)

    async def _keep(self, lease: Lease) -> None:
        while True:
            # A third of the TTL leaves time for two more attempts before the lease expires.
            await asyncio.sleep(min(lease.ttl_s / 3, MAX_PAUSE_S) * random.uniform(0.8, 1.0))
            try:
                if await self._store.keep_alive(lease):
                    await self._restore(lease)
                    continue
                reason = "the lease has expired"
            except Unreachable as exc:
                reason = exc.message
            log.warning("lease renewal failed for %s, retrying: %s", self.key, reason)
            lease = await self._recover(lease)
            log.info("registration %s is renewed", self.key)

    async def _recover(self, lease: Lease) -> Lease:
        """Retry until the old lease is renewed, or the key is written with a new lease.

        Returns:
            The old or the new lease.
        """
        delays = backoff()
        while True:
            try:
                if await self._store.keep_alive(lease):
                    return lease
                return await self._acquire()
            except Unreachable as exc:
                log.debug("registration %s: %s", self.key, exc.message)
            await asyncio.sleep(next(delays))

    async def replace(self) -> None:
        """Stop, because another registration takes over the key. The lease here expires."""
        task = self._task
        self._task = None
        self._lease = None
        await self._tasks.cancel(task)

    async def aclose(self) -> None:
        task = self._task
        self._task = None
        await self._tasks.cancel(task)
        lease = self._lease
        self._lease = None
        if lease is not None:
            await self._store.release(lease, self.key)
