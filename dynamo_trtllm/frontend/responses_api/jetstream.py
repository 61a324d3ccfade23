"""Store values for several frontends in a NATS JetStream key-value bucket.

The bucket can be inspected and deleted, too.

A value is split into chunks below NATS' message limit. The first chunk has the number of the other
chunks, and is written last. An existing bucket is used as it is, so that operators can set its
replicas and limits with NATS tools.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

from nats import errors as nats_errors
from nats.aio.client import Client
from nats.js import errors as js_errors
from nats.js.api import DiscardPolicy, StorageType, StreamConfig, StreamState
from nats.js.client import JetStreamContext
from nats.js.kv import KeyValue

from dynamo_trtllm.cluster.request_plane.nats_connection import (
    NO_CREDENTIALS,
    NatsAccess,
    NatsClient,
    abort_client,
    close_client,
    connect_client,
)
from dynamo_trtllm.cluster.roles import bucket_of
from dynamo_trtllm.frontend.responses_api.key_value_store import StoreLimits
from dynamo_trtllm.protocol.errors import Disconnected, Unreachable
from dynamo_trtllm.protocol.sanitize import mask_address

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 5.0
# Longest wait for one call. A response waits this long if JetStream is unavailable.
_TIMEOUT_S: Final = 2.0
_NO_STORAGE: Final = 10047  # code of nats-server's error: insufficient storage resources available
_HEADROOM_BYTES: Final = 4096  # part of a message for subject and headers
_COUNT: Final = struct.Struct("<I")  # header of the first chunk: the number of further chunks


class JetStreamStore:
    """A `KeyValueStore` in JetStream. Create it with `connect`.

    A full bucket drops its oldest values and ignores owners, which NATS does not know.
    """

    def __init__(self, client: Client, bucket: KeyValue, limits: StoreLimits) -> None:
        self._client = client
        self._bucket = bucket
        self._limits = limits
        self._chunk_bytes = client.max_payload - _HEADROOM_BYTES

    @classmethod
    async def connect(
        cls, url: str, namespace: str, limits: StoreLimits, access: NatsAccess = NO_CREDENTIALS
    ) -> JetStreamStore:
        """Connect to a NATS server and open the deployment's bucket, or create it.

        Args:
            url: address of the NATS server.
            namespace: namespace of the deployment.
            limits: limits of the values, and of the bucket if it is created.
            access: how this process proves who it is.

        Raises:
            ConfigError: a file of credentials or certificates can't be read.
            Unreachable: no server answers at `url`, or it has no JetStream.
        """
        fix = "start nats-server with -js, or use --response-store memory with --workers 1"
        async with _connected(url, access, fix, stays_open=True) as (client, context):
            bucket = await _bucket(context, bucket_of(namespace), limits)
        return cls(client, bucket, limits)

    async def put(self, key: str, value: bytes, owner: str = "") -> None:
        self._limits.check(value)
        size = self._chunk_bytes
        first_size = size - _COUNT.size  # the first chunk also has the header
        rest = [value[start : start + size] for start in range(first_size, len(value), size)]
        with self._translating_errors("write"):
            for number, chunk in enumerate(rest, start=1):
                await self._bucket.put(f"{key}.{number}", chunk)
            # The first chunk is written last: with it, the value is complete.
            await self._bucket.put(key, _COUNT.pack(len(rest)) + value[:first_size])

    async def get(self, key: str) -> bytes | None:
        head = await self._read_chunk(key)
        if head is None:
            return None
        chunks = [head[_COUNT.size :]]
        for number in _numbers_of_others(head):
            chunk = await self._read_chunk(f"{key}.{number}")
            if chunk is None:
                # The full bucket has dropped this chunk already: it drops the oldest first.
                return None
            chunks.append(chunk)
        return b"".join(chunks)

    async def delete(self, key: str) -> None:
        head = await self._read_chunk(key)
        if head is None:
            return
        with self._translating_errors("write"):
            await self._bucket.purge(key)
            for number in _numbers_of_others(head):
                await self._bucket.purge(f"{key}.{number}")

    async def aclose(self) -> None:
        """Close the connection. Idempotent."""
        await close_client(self._client)

    async def _read_chunk(self, key: str) -> bytes | None:
        with self._translating_errors("read"):
            try:
                entry = await self._bucket.get(key)
            except js_errors.NotFoundError:
                return None
            return entry.value

    @contextmanager
    def _translating_errors(self, what: str) -> Iterator[None]:
        """Translate the NATS errors of a block. `what` is a verb for what the block does.

        Without a connection, raise at once, because the client would wait for a connection.
        """
        if not self._client.is_connected:
            raise Disconnected(
                f"JetStream can't {what} a response: no connection to NATS; check that NATS runs"
            )
        try:
            yield
        except (js_errors.APIError, js_errors.NoStreamResponseError) as exc:
            raise Unreachable(f"JetStream could not {what} a response: {exc}") from exc
        except (nats_errors.Error, OSError, TimeoutError) as exc:
            reason = str(exc) or type(exc).__name__
            raise Disconnected(f"JetStream could not {what} a response: {reason}") from exc


def _numbers_of_others(first_chunk: bytes) -> range:
    """Return the numbers of a value's further chunks."""
    (count,) = _COUNT.unpack_from(first_chunk)
    return range(1, count + 1)


async def bucket_state(
    url: str, namespace: str, access: NatsAccess = NO_CREDENTIALS
) -> StreamState | None:
    """Return the state of a deployment's bucket, such as its size.

    It is None if there is no bucket or no JetStream.

    Raises:
        Unreachable: no server answers at `url`.
    """
    async with _connected(url, access) as (_, context):
        try:
            info = await context.stream_info(f"KV_{bucket_of(namespace)}")
        except (
            js_errors.NotFoundError,
            js_errors.ServiceUnavailableError,
            nats_errors.NoRespondersError,
        ):
            return None
        return info.state


async def delete_bucket(url: str, namespace: str, access: NatsAccess = NO_CREDENTIALS) -> None:
    """Delete a deployment's bucket if it exists.

    Raises:
        Unreachable: no server answers at `url`.
    """
    async with _connected(url, access) as (_, context):
        with suppress(js_errors.NotFoundError):
            await context.delete_stream(f"KV_{bucket_of(namespace)}")


@asynccontextmanager
async def _connected(
    url: str,
    access: NatsAccess,
    fix: str = "check --nats-server and that NATS runs",
    *,
    stays_open: bool = False,
) -> AsyncIterator[tuple[Client, JetStreamContext]]:
    """Connect a client, which is closed after the block, or if the block fails.

    Args:
        url: address of the NATS server.
        access: how this process proves who it is.
        fix: what the error tells the user to do.
        stays_open: the client stays open after the block, and the caller closes it.

    Raises:
        Unreachable: no server answers at `url`, or a call in the block failed.
    """
    client = NatsClient(access)
    try:
        await connect_client(client, url, CONNECT_TIMEOUT_S, error_cb=_on_error)
        try:
            yield client, client.jetstream(timeout=_TIMEOUT_S)
        except BaseException:
            # After an error or a cancel, the connection is closed without waiting for the server.
            abort_client(client)
            raise
        if not stays_open:
            await close_client(client)
    except (nats_errors.Error, OSError, TimeoutError) as exc:
        reason = str(exc) or type(exc).__name__
        if isinstance(exc, js_errors.APIError) and exc.err_code == _NO_STORAGE:
            # NATS reserves the bytes of a bucket when it is created.
            fix = (
                "free space in the store_dir of nats-server, raise its max_file_store, or lower"
                " --response-store-bytes"
            )
        raise Unreachable(
            f"JetStream at {mask_address(url)} can't be used ({reason}); {fix}"
        ) from exc


async def _bucket(context: JetStreamContext, name: str, limits: StoreLimits) -> KeyValue:
    """Open the bucket, or create it.

    A bucket of nats-py's `create_key_value` would reject new values when full.
    """
    try:
        return await context.key_value(name)
    except js_errors.BucketNotFoundError:
        pass
    config = StreamConfig(
        name=f"KV_{name}",
        subjects=[f"$KV.{name}.>"],
        # With replicas, a direct read may miss a value that was just written.
        allow_direct=False,
        allow_rollup_hdrs=True,
        deny_delete=True,
        discard=DiscardPolicy.OLD,
        duplicate_window=min(120.0, limits.ttl_s),
        max_age=limits.ttl_s,
        max_bytes=limits.max_bytes,
        max_msgs_per_subject=1,
        storage=StorageType.FILE,
    )
    try:
        await context.add_stream(config)
    except js_errors.BadRequestError as exc:
        log.debug("bucket %s exists already, created by another frontend: %r", name, exc)
    return await context.key_value(name)


async def _on_error(error: Exception) -> None:
    log.debug("response store: NATS error: %r", error)
