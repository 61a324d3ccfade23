"""Call etcd over gRPC, with failover between endpoints, and keep a record on a lease.

Every gRPC failure is raised as `Unreachable`.

Why not a client from PyPI: the watch of etcd3aio 0.3.0 resumes from the reply header's revision, so
it skips pending events after a disconnect, and it hangs after a compaction. Its channels accept no
host names, and a new client inherits the old channel's reconnect delay. The HTTP-based etcd3-py
0.1.6 makes 408 puts/s instead of 1741, its asynchronous watch delivered 17 of 201 events, and its
keep-alive thread ends after an outage of 4 s. (Measured on 2 CPU cores with etcd 3.5.1.)
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import grpc.aio

from dynamo_trtllm.cluster.discovery import etcd_api as api
from dynamo_trtllm.cluster.discovery.etcd_api import EtcdCalls
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.protocol.errors import ConfigError, Unreachable
from dynamo_trtllm.support.background import BackgroundTasks

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 3.0
CLOSE_TIMEOUT_S = 2.0
# Also for long leases: after etcd has lost its data, workers must register again before watchers
# remove them (10 s).
MAX_PAUSE_S = 3.0
FIRST_DELAY_S = 0.05  # between attempts
MAX_DELAY_S = 1.0
Change: TypeAlias = tuple[str, bytes | None]  # key, record; None: deleted
_PORT = re.compile(r":\d+$")
_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),  # share no back-off with other channels of the process
    ("grpc.keepalive_time_ms", 10_000),  # detects a frozen peer; etcd rejects less than 5 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", -1),
]


def parse_endpoints(text: str) -> list[str]:
    """Return `host:port` of each comma-separated endpoint of a `ConnectionConfig`.

    The default port is 2379.
    """
    endpoints = []
    for part in text.split(","):
        host = part.strip().rpartition("//")[2].rstrip("/")
        endpoints.append(host if _PORT.search(host) else f"{host}:2379")
    return endpoints


def channel_credentials(config: ConnectionConfig) -> grpc.ChannelCredentials | None:
    """Return TLS credentials for https:// endpoints, or None for http:// ones.

    Raises:
        ConfigError: only some endpoints are https://, or the files are incomplete, unreadable or
            not needed.
    """
    schemes = {part.strip().startswith("https://") for part in config.etcd_endpoints.split(",")}
    if len(schemes) > 1:
        raise ConfigError(
            f"the etcd endpoints {config.etcd_endpoints} mix https:// and http://; use https:// for"
            " all of them or for none",
            field="etcd_endpoints",
        )
    if schemes != {True}:
        if config.etcd_ca or config.etcd_cert or config.etcd_key:
            raise ConfigError(
                "--etcd-ca, --etcd-cert or --etcd-key is set, but the endpoints are http://; use"
                " https:// endpoints or unset ETCD_AUTH_CA, ETCD_AUTH_CLIENT_CERT and"
                " ETCD_AUTH_CLIENT_KEY",
                field="etcd_endpoints",
            )
        return None
    if (config.etcd_cert is None) != (config.etcd_key is None):
        raise ConfigError(
            "only one of --etcd-cert and --etcd-key is set; set both", field="etcd_cert"
        )
    return grpc.ssl_channel_credentials(
        root_certificates=_pem(config, "etcd_ca"),
        private_key=_pem(config, "etcd_key"),
        certificate_chain=_pem(config, "etcd_cert"),
    )


def _pem(config: ConnectionConfig, field: str) -> bytes | None:
    """Read a PEM file at the start.

    Without --etcd-ca, the certificate authorities of the system are used.
    """
    path: Path | None = getattr(config, field)
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as exc:
        flag = "--" + field.replace("_", "-")
        raise ConfigError(
            f"{flag} {path} can't be read: {exc.strerror or exc}", field=field
        ) from exc


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

    records: dict[str, bytes]  # by key, in the order in which they were last written
    revision: int


class Lease(NamedTuple):
    """A lease of etcd."""

    id: int
    # as granted, which may be more than requested; in the result of `leases`, the remaining seconds
    ttl_s: int


class EtcdStore:
    """Client of one etcd cluster. After a failed call, the next call uses the next endpoint.

    Create it on a running event loop. Raises ConfigError if endpoints and certificate files don't
    fit together.
    """

    def __init__(self, config: ConnectionConfig) -> None:
        self.addresses = parse_endpoints(config.etcd_endpoints)
        credentials = channel_credentials(config)
        self.closed = False
        self.answered = False  # True after the first successful call
        self._current = 0
        connect = grpc.aio.insecure_channel
        if credentials is not None:
            connect = partial(grpc.aio.secure_channel, credentials=credentials)
        self._channels = [
            connect(f"dns:///{address}", options=_OPTIONS) for address in self.addresses
        ]

        self._calls = [EtcdCalls(channel) for channel in self._channels]

    @property
    def _etcd(self) -> EtcdCalls:
        """The calls to the current endpoint."""
        return self._calls[self._current]

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise failures as Unreachable.

        grpc.aio 1.85 raises InvalidStateError for a write to a broken call, and CancelledError or
        UsageError for a call that `aclose` ended.
        """
        used = self._current
        try:
            yield
            self.answered = True
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as exc:
            # Another call may have changed to the next endpoint already.
            if used == self._current:
                self._current = (used + 1) % len(self._channels)
            reason = str(exc)
            if isinstance(exc, grpc.aio.AioRpcError):
                reason = f"{exc.code().name}: {exc.details()}"
            raise self._unreachable(used, reason) from exc
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if self.closed and task is not None and not task.cancelling():
                raise self._unreachable(used, "closed") from exc
            raise

    def _unreachable(self, index: int, reason: str) -> Unreachable:
        text = (
            f"etcd at {self.addresses[index]} did not answer ({reason}); check --etcd-endpoints and"
            " that etcd runs"
        )
        return Unreachable(text, field="etcd_endpoints")

    async def read_all(self, prefix: str) -> Snapshot:
        """Return all records under a prefix."""
        reply = await self._range(prefix)
        written = sorted(reply.kvs, key=attrgetter("mod_revision"))
        records = {key_text(pair.key): pair.value for pair in written}
        return Snapshot(records=records, revision=reply.header.revision)

    async def leases(self, prefix: str) -> dict[str, Lease | None]:
        """Return the lease of every key under a prefix, with its remaining time.

        None: no lease, or an expired one.
        """
        reply = await self._range(prefix)
        return {key_text(pair.key): await self._left(pair.lease) for pair in reply.kvs}

    async def _range(self, prefix: str) -> Any:
        request = api.RangeRequest(key=prefix.encode(), range_end=prefix_end(prefix))
        with self._translated():
            return await self._etcd.range(request, timeout=CALL_TIMEOUT_S)

    async def _left(self, lease_id: int) -> Lease | None:
        if not lease_id:
            return None
        request = api.LeaseTimeToLiveRequest(ID=lease_id)
        with self._translated():
            reply = await self._etcd.lease_time_to_live(request, timeout=CALL_TIMEOUT_S)
        # -1: it has expired; 0: less than a second is left.
        return Lease(id=lease_id, ttl_s=reply.TTL) if reply.TTL >= 0 else None

    async def put(self, key: str, record: bytes, lease: Lease) -> int:
        """Write a record that expires with the lease.

        Return the revision of etcd with which it was written.
        """
        request = api.PutRequest(key=key_bytes(key), value=record, lease=lease.id)
        with self._translated():
            reply = await self._etcd.put(request, timeout=CALL_TIMEOUT_S)
        return int(reply.header.revision)

    async def revision_of(self, key: str) -> int:
        """Return the revision of etcd with which a key was last written; 0 if it does not exist."""
        request = api.RangeRequest(key=key_bytes(key), keys_only=True)
        with self._translated():
            reply = await self._etcd.range(request, timeout=CALL_TIMEOUT_S)
        return int(reply.kvs[0].mod_revision) if reply.kvs else 0

    async def delete(self, key: str) -> None:
        """Delete a key if it exists."""
        request = api.DeleteRangeRequest(key=key_bytes(key))
        with self._translated():
            await self._etcd.delete_range(request, timeout=CALL_TIMEOUT_S)

    async def grant(self, ttl_s: float) -> Lease:
        """Create a lease of at least `ttl_s` seconds."""
        request = api.LeaseGrantRequest(TTL=max(1, math.ceil(ttl_s)))
        with self._translated():
            reply = await self._etcd.lease_grant(request, timeout=CALL_TIMEOUT_S)
        return Lease(id=reply.ID, ttl_s=reply.TTL)

    async def keep_alive(self, lease: Lease) -> bool:
        """Renew a lease. Return False if it has expired."""
        with self._translated():
            call = self._etcd.lease_keep_alive(timeout=CALL_TIMEOUT_S)
            try:
                await call.write(api.LeaseKeepAliveRequest(ID=lease.id))
                reply = await call.read()
            finally:
                call.cancel()
        if reply is grpc.aio.EOF:
            raise self._unreachable(self._current, "etcd ended the keep-alive stream")
        return bool(reply.TTL > 0)

    async def revoke(self, lease: Lease) -> None:
        """Revoke a lease, which deletes its keys. Ignore an unknown lease."""
        request = api.LeaseRevokeRequest(ID=lease.id)
        with self._translated():
            try:
                await self._etcd.lease_revoke(request, timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as exc:
                if exc.code() is not grpc.StatusCode.NOT_FOUND:
                    raise

    async def changes(self, prefix: str, from_revision: int) -> AsyncGenerator[list[Change], None]:
        """Yield the changes from a revision on, in batches.

        The first batch is empty and shows that the watch runs.

        The generator ends if etcd cancels the watch, as after a compaction, or if etcd's revision
        is older than expected, as after data loss.

        Raises:
            Unreachable: the connection is lost.
        """
        create = api.WatchCreateRequest(
            key=prefix.encode(), range_end=prefix_end(prefix), start_revision=from_revision
        )
        with self._translated():
            call = self._etcd.watch()
            try:
                await call.write(api.WatchRequest(create_request=create))
                while True:
                    reply = await call.read()
                    if reply is grpc.aio.EOF or reply.canceled:
                        break
                    # etcd has lost data: it does not know the revision of the list.
                    if reply.header.revision + 1 < from_revision:
                        break
                    yield [_change(event) for event in reply.events]
            finally:
                call.cancel()

    async def aclose(self) -> None:
        """Cancel running calls and close the connections. Idempotent."""
        self.closed = True
        for channel in self._channels:
            await channel.close()


def _change(event: Any) -> Change:
    record = None if event.type == api.DELETE else event.kv.value
    return key_text(event.kv.key), record


def backoff() -> Iterator[float]:
    """Yield delays in seconds that double up to a limit.

    They have jitter, so that clients don't retry together.
    """
    full_s = FIRST_DELAY_S
    while True:
        yield full_s * random.uniform(0.5, 1.0)
        full_s = min(2 * full_s, MAX_DELAY_S)


class LeaseKeeper:
    """A `Registration` in etcd.

    It replaces a lost lease and writes the same key again. Whenever it renews the lease, it also
    checks the key, and writes it again if another client has deleted or overwritten it.
    """

    def __init__(
        self, store: EtcdStore, key: str, record: bytes, *, ttl_s: float, tasks: BackgroundTasks
    ) -> None:
        self._store = store
        self._tasks = tasks
        self.key = key
        self._record = record
        self._revision = 0  # of etcd, with which the record was last written
        self._ttl_s = ttl_s
        self._lease: Lease | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Write the record and start to renew its lease.

        Raise Unreachable if etcd does not answer.
        """
        lease = await self._acquire()
        self._task = self._tasks.start(self._keep(lease), f"lease of {self.key}")

    async def _acquire(self) -> Lease:
        # This put detaches the key from an older lease that etcd may still have.
        lease = await self._store.grant(self._ttl_s)
        self._lease = lease
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
        """Retry until the old lease is renewed or the key is written with a new lease.

        Return the lease.
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
        """Stop, because another registration takes over the key. The lease of this one expires."""
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
        if lease is None:
            return
        with suppress(Unreachable, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._store.delete(self.key)
                await self._store.revoke(lease)
