"""The store for several frontends: a NATS JetStream key-value bucket. Beside `nats` the only file that knows nats-py.

A value is cut into pieces under NATS' message limit; its first piece, written last, says how many there are. A bucket
that is there is used as it is, so that its replicas and limits may be set with NATS' own tools.
"""

from __future__ import annotations

import hashlib
import logging
import re
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from nats import errors as nats_errors
from nats.aio.client import Client
from nats.js import errors as js_errors
from nats.js.api import DiscardPolicy, StorageType, StreamConfig
from nats.js.client import JetStreamContext
from nats.js.kv import KeyValue

from dynamo_trtllm.errors import Disconnected, Unreachable
from dynamo_trtllm.request_plane.nats import close_client, connect_or_abort
from dynamo_trtllm.request_plane.store import StoreLimits
from dynamo_trtllm.sanitize import mask_address

_log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 2.0  # of one call: an answer waits for it when JetStream is away
_HEADROOM_BYTES: Final = 4096  # of a message, for subject and headers
_COUNT: Final = struct.Struct("<I")  # before the bytes of the first piece: how many more there are
_NAME: Final = re.compile(r"[^A-Za-z0-9_-]")


def bucket_of(namespace: str) -> str:
    """The bucket of a deployment. NATS takes letters, digits, '_' and '-' only."""
    plain = _NAME.sub("-", namespace)
    if plain != namespace:
        plain += "-" + hashlib.sha256(namespace.encode()).hexdigest()[:8]
    return f"dynamo_trtllm_responses_{plain}"


class JetStreamStore:
    """Made by `connect`. A full bucket drops its oldest values: NATS does not distinguish owners."""

    def __init__(self, client: Client, bucket: KeyValue, limits: StoreLimits) -> None:
        self._client = client
        self._bucket = bucket
        self._limits = limits
        self._piece_bytes = client.max_payload - _HEADROOM_BYTES

    @classmethod
    async def connect(
        cls, url: str, namespace: str, limits: StoreLimits, *, connect_timeout_s: float = 5.0
    ) -> JetStreamStore:
        """Raises Unreachable when no server answers at `url`, or one without JetStream."""
        client = Client()
        with _reached(url, "start nats-server with -js, or choose --response-store memory, which takes one worker"):
            async with connect_or_abort(client, connect_timeout_s):
                await _connect(client, url)
                context = client.jetstream(timeout=_TIMEOUT_S)
                bucket = await _bucket(context, bucket_of(namespace), limits)
        return cls(client, bucket, limits)

    async def put(self, key: str, value: bytes, owner: str = "") -> None:
        self._limits.check(value)
        first = self._piece_bytes - _COUNT.size
        rest = [value[start : start + self._piece_bytes] for start in range(first, len(value), self._piece_bytes)]
        with self._connected("write"):
            for number, piece in enumerate(rest, start=1):
                await self._bucket.put(f"{key}.{number}", piece)
            await self._bucket.put(key, _COUNT.pack(len(rest)) + value[:first])

    async def get(self, key: str) -> bytes | None:
        head = await self._piece(key)
        if head is None:
            return None
        pieces = [head[_COUNT.size :]]
        for number in range(1, _COUNT.unpack_from(head)[0] + 1):
            piece = await self._piece(f"{key}.{number}")
            if piece is None:
                return None  # the oldest bytes go first, and this value's were
            pieces.append(piece)
        return b"".join(pieces)

    async def delete(self, key: str) -> None:
        head = await self._piece(key)
        if head is None:
            return
        with self._connected("write"):
            await self._bucket.purge(key)
            for number in range(1, _COUNT.unpack_from(head)[0] + 1):
                await self._bucket.purge(f"{key}.{number}")

    async def aclose(self) -> None:
        """Idempotent."""
        await close_client(self._client)

    async def _piece(self, key: str) -> bytes | None:
        with self._connected("read"):
            try:
                return (await self._bucket.get(key)).value
            except js_errors.NotFoundError:
                return None

    @contextmanager
    def _connected(self, what: str) -> Iterator[None]:
        """Fails at once without a connection, where the client would wait for one."""
        if not self._client.is_connected:
            raise Disconnected(f"JetStream can't {what} a response: there is no connection to NATS")
        try:
            yield
        except (js_errors.APIError, js_errors.NoStreamResponseError) as exc:
            raise Unreachable(f"JetStream could not {what} a response: {exc}") from exc
        except (nats_errors.Error, OSError, TimeoutError) as exc:
            raise Disconnected(f"JetStream could not {what} a response: {str(exc) or type(exc).__name__}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketInfo:
    """What a deployment's frontends have kept in JetStream."""

    bucket: str
    messages: int
    size_bytes: int


async def bucket_info(url: str, namespace: str, *, connect_timeout_s: float = 5.0) -> BucketInfo | None:
    """None when there is no such bucket, or no JetStream. Raises Unreachable when no server answers at `url`."""
    async with _jetstream(url, connect_timeout_s) as context:
        name = bucket_of(namespace)
        try:
            state = (await context.stream_info(f"KV_{name}")).state
        except (js_errors.NotFoundError, js_errors.ServiceUnavailableError, nats_errors.NoRespondersError):
            return None
        return BucketInfo(bucket=name, messages=state.messages, size_bytes=state.bytes)


async def delete_bucket(url: str, namespace: str, *, connect_timeout_s: float = 5.0) -> None:
    """Deletes the bucket; nothing happens when it is not there. Raises Unreachable."""
    async with _jetstream(url, connect_timeout_s) as context:
        with suppress(js_errors.NotFoundError):
            await context.delete_stream(f"KV_{bucket_of(namespace)}")


@asynccontextmanager
async def _jetstream(url: str, connect_timeout_s: float) -> AsyncIterator[JetStreamContext]:
    client = Client()
    with _reached(url, "check --nats-server and that NATS runs"):
        async with connect_or_abort(client, connect_timeout_s):
            await _connect(client, url)
            yield client.jetstream(timeout=_TIMEOUT_S)
        await close_client(client)


async def _connect(client: Client, url: str) -> None:
    await client.connect(
        url,
        error_cb=_on_error,
        reconnect_time_wait=0.1,  # type: ignore[arg-type]  # declared int, used as a float
        max_reconnect_attempts=-1,
        ping_interval=2,
        max_outstanding_pings=2,
        flush_timeout=2,  # else a publish to a frozen server waits, deaf to cancels
    )


@contextmanager
def _reached(url: str, cure: str) -> Iterator[None]:
    try:
        yield
    except (nats_errors.Error, OSError, TimeoutError) as exc:
        said = f"JetStream at {mask_address(url)} can't be used ({str(exc) or type(exc).__name__})"
        raise Unreachable(f"{said}; {cure}") from exc


async def _bucket(context: JetStreamContext, name: str, limits: StoreLimits) -> KeyValue:
    """The bucket, made when it is not there. Not by `create_key_value`: its buckets refuse new values when full."""
    try:
        return await context.key_value(name)
    except js_errors.BucketNotFoundError:
        pass
    config = StreamConfig(
        name=f"KV_{name}",
        subjects=[f"$KV.{name}.>"],
        allow_direct=False,  # with replicas, a direct read may miss what was just written
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
        _log.debug("the bucket %s was made by another frontend: %r", name, exc)
    return await context.key_value(name)


async def _on_error(error: Exception) -> None:
    _log.debug("NATS of the response store: %r", error)
