"""Prefill workers that corrupt what they send: the last chunks of a healthy worker, or their own
KV.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import math
import random
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_trtllm.cluster.discovery import records
from dynamo_trtllm.cluster.discovery.etcd import EtcdDiscovery
from dynamo_trtllm.cluster.request_plane.nats import NatsPlane
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.cluster.request_plane.transport import Service
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.models import resolve
from dynamo_trtllm.observability.metrics import WorkerMetrics
from dynamo_trtllm.protocol.messages import (
    WIRE_VERSION,
    Chunk,
    Control,
    GenerateRequest,
    Instance,
    ReleaseKv,
    ReleaseOutcome,
    Role,
)
from dynamo_trtllm.protocol.streams import OnEvent, Stream, StreamEvent, StreamHandle
from dynamo_trtllm.worker.service import WorkerService
from dynamo_trtllm.worker.startup import live_peers
from dynamo_trtllm.worker.worker_admission import WorkerAdmission

from .deployment import ENGINE_ARGS, Deployment, NotReady
from .relay import ChangingRelay

ChunkChange = Callable[[Chunk], Chunk]  # applied to last chunks, which have KV transfer parameters

if TYPE_CHECKING:
    from dynamo_trtllm.engines.torch.engine import TorchEngine

_LEASE_TTL_S = 2.0
_FIRST_REQUEST_S = 20.0
_AN_HOUR_S = 3600.0
_KV_BYTES = 128  # requests for KV are shorter


class _ForwardedStream(Stream):
    """A stream whose events come from a call of another worker."""

    __slots__ = ("source",)

    source: StreamHandle

    def _close(self, last: StreamEvent | None) -> None:
        if last is None:
            self.source.cancel()


class CorruptingService:
    """A `request_plane.server.Service` that forwards to a healthy worker and changes its last
    chunks.
    """

    def __init__(
        self, plane: RequestPlane, healthy: Instance, own: Instance, change: ChunkChange
    ) -> None:
        self._plane = plane
        self._healthy = healthy
        self._own_id = own.id
        self._change = change
        self.has_changed = asyncio.Event()  # a chunk
        self._pending: set[str] = set()  # transfer ids
        self._releases: set[asyncio.Task[bytes]] = set()

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        stream = _ForwardedStream(on_event, self)

        def forward(event: StreamEvent) -> None:
            if isinstance(event, Chunk) and event.kv_params is not None:
                self._pending.add(event.kv_params.transfer_id)
                self.has_changed.set()
                event = self._change(event)
                # Readers connect to the healthy worker's registered addresses only, and to any of
                # this one, which has none.
                assert event.kv_params is not None
                kv_params = msgspec.structs.replace(
                    event.kv_params, prefill_instance_id=self._own_id
                )
                event = msgspec.structs.replace(event, kv_params=kv_params)
            stream.emit(event)

        stream.source = self._plane.client.generate(self._healthy.subject, request, forward)
        return stream

    def release(self, transfer_id: str, outcome: ReleaseOutcome) -> None:
        """Forward the end of a KV transfer to the healthy worker."""
        if transfer_id in self._pending:
            task = asyncio.get_running_loop().create_task(
                self.control(ReleaseKv(transfer_id, outcome))
            )
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    def is_pending(self, transfer_id: str) -> bool:
        return transfer_id in self._pending

    async def control(self, verb: Control) -> bytes:
        if isinstance(verb, ReleaseKv):
            self._pending.discard(verb.transfer_id)
        return await self._plane.client.control(self._healthy.subject, verb)


@asynccontextmanager
async def register(
    deployment: Deployment, change: ChunkChange, wire: int = WIRE_VERSION
) -> AsyncIterator[None]:
    """Register a corrupting worker with this wire version for the duration of the context.

    Its frontends probe the pairs of a new worker first, which takes long on a busy machine. So the
    context ends when a request has reached the worker, and raises NotReady if none does in time.
    """
    services: list[CorruptingService] = []

    async def make_service(plane: RequestPlane, healthy: Instance, own: Instance) -> Service:
        services.append(CorruptingService(plane, healthy, own, change))
        return services[0]

    async with _register(deployment, make_service, wire):
        yield
        try:
            async with asyncio.timeout(_FIRST_REQUEST_S):
                await services[0].has_changed.wait()
        except TimeoutError as exc:
            raise NotReady(
                f"the corrupting prefill worker got no request within {_FIRST_REQUEST_S:g} s"
            ) from exc


@asynccontextmanager
async def register_nan_worker(deployment: Deployment) -> AsyncIterator[None]:
    """Register a prefill worker with the torch engine whose KV has a NaN."""
    async with AsyncExitStack() as stack:

        async def make_service(plane: RequestPlane, healthy: Instance, own: Instance) -> Service:
            # In a thread, because it imports torch for many seconds on a busy machine. The clients
            # of the load run on this event loop, and would be silent meanwhile.
            torch_engine = await asyncio.to_thread(
                importlib.import_module, "dynamo_trtllm.engines.torch.engine"
            )
            config = WorkerConfig(
                model_path=str(await asyncio.to_thread(resolve, own.card.name)),
                served_model_name=own.card.name,
                disaggregation_mode=Role.PREFILL,
                override_engine_args=ENGINE_ARGS["torch"],
                kv_transfer_ttl_s=deployment.options.kv_transfer_ttl_s,
            )
            engine = torch_engine.TorchEngine(config, instance_id=own.id)
            stack.push_async_callback(engine.aclose)
            await engine.start()
            _inject_nan(engine)
            admission = WorkerAdmission(max_active=None, max_pending_kv_fraction=1.0)
            return WorkerService(engine, own, admission, files={}, metrics=WorkerMetrics())

        async with _register(deployment, make_service, WIRE_VERSION):
            yield


def _inject_nan(engine: TorchEngine) -> None:
    """Put one NaN into the KV of each further prompt before it is copied to the transfer buffer."""
    assert engine._scheduler is not None
    pool = engine._scheduler.pool
    transfer_buffer = engine._scheduler.transfer_buffer
    assert transfer_buffer is not None
    gather = transfer_buffer.gather

    def gather_with_nan(allocation: Any, rows: Any) -> Any:
        pool.all_rows.view(pool.dtype)[int(rows[-1]), 0] = math.nan
        return gather(allocation, rows)

    setattr(transfer_buffer, "gather", gather_with_nan)  # noqa: B010  # replaces a method


@asynccontextmanager
async def _register(
    deployment: Deployment,
    make_service: Callable[[RequestPlane, Instance, Instance], Awaitable[Service]],
    wire: int,
) -> AsyncIterator[None]:
    """Register another prefill worker.

    `make_service` gets the instances of a healthy worker and of the new one.
    """
    servers = deployment.servers
    async with AsyncExitStack() as stack:
        plane = await NatsPlane.connect(servers["nats"].address)
        stack.push_async_callback(plane.aclose)
        discovery = EtcdDiscovery(
            ConnectionConfig(etcd_endpoints=servers["etcd"].address), lease_ttl_s=_LEASE_TTL_S
        )
        stack.push_async_callback(discovery.aclose)
        healthy, *_ = await live_peers(
            discovery, deployment.namespace, model=deployment.options.model, role=Role.DECODE
        )  # live_peers returns workers of the other role
        number = secrets.randbits(63)
        subject = records.subject(records.endpoint_of(healthy), number)
        own = msgspec.structs.replace(
            healthy, id=number, subject=subject, wire=wire, kv_addresses=()
        )
        server = await plane.serve(subject, await make_service(plane, healthy, own))
        stack.push_async_callback(server.aclose)
        registration = await discovery.register(own)
        stack.push_async_callback(registration.aclose)
        yield


def expire_params(chunk: Chunk) -> Chunk:
    """Return the chunk with KV transfer parameters that expired an hour ago."""
    assert chunk.kv_params is not None
    kv_params = msgspec.structs.replace(
        chunk.kv_params, expires_at=chunk.kv_params.expires_at - _AN_HOUR_S
    )
    return msgspec.structs.replace(chunk, kv_params=kv_params)


def set_unknown_finish_reason(chunk: Chunk) -> Chunk:
    """Return the chunk with a finish reason that only a later version knows."""
    return msgspec.structs.replace(chunk, finish_reason="a reason of a later version")


def _offer(chunk: Chunk) -> dict[str, Any]:
    """Return the tcp offer in the chunk's KV transfer parameters, which is all of `engine_state` or
    its `offer`.
    """
    assert chunk.kv_params is not None
    engine_state: dict[str, Any] = msgspec.msgpack.decode(chunk.kv_params.engine_state)
    return (
        msgspec.msgpack.decode(engine_state["offer"]) if "offer" in engine_state else engine_state
    )


def _change_offer(chunk: Chunk, changes: dict[str, Any]) -> Chunk:
    """Return the chunk with these values changed in its tcp offer."""
    assert chunk.kv_params is not None
    engine_state = msgspec.msgpack.decode(chunk.kv_params.engine_state)
    offer = _offer(chunk) | changes
    engine_state = (
        engine_state | {"offer": msgspec.msgpack.encode(offer)}
        if "offer" in engine_state
        else offer
    )
    kv_params = msgspec.structs.replace(
        chunk.kv_params, engine_state=msgspec.msgpack.encode(engine_state)
    )
    return msgspec.structs.replace(chunk, kv_params=kv_params)


@contextmanager
def unreadable_offers() -> Iterator[ChunkChange]:
    """Yield a change that makes offers point in turn at a closed port and at a withdrawn offer."""
    with socket.socket() as closed:
        # bound but not listening, so connections fail and the port stays reserved
        closed.bind(("127.0.0.1", 0))
        changes = itertools.cycle(
            [
                {"host": "127.0.0.1", "port": closed.getsockname()[1]},
                {"token": secrets.token_bytes(32)},  # the prefill worker has no such offer
            ]
        )
        yield lambda chunk: _change_offer(chunk, next(changes))


@asynccontextmanager
async def black_hole() -> AsyncIterator[ChunkChange]:
    """Yield a change that makes tcp offers point at a port that accepts connections and never sends
    data.
    """
    writers: list[asyncio.StreamWriter] = []

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    try:
        yield lambda chunk: _change_offer(chunk, {"host": "127.0.0.1", "port": port})
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()


def flip_bit(data: bytes) -> bytes:
    """Return the data with one bit flipped. Data too short to be KV is unchanged."""
    if len(data) < _KV_BYTES:
        return data
    changed = bytearray(data)
    changed[random.randrange(len(data) // 2, len(data))] ^= 1 << random.randrange(8)
    return bytes(changed)


@asynccontextmanager
async def bit_flipping_relay() -> AsyncIterator[ChunkChange]:
    """Yield a change that sends KV of tcp offers through a relay that flips bits."""
    relay = await ChangingRelay.start("127.0.0.1:0")
    relay.change = flip_bit
    port = int(relay.address.rpartition(":")[2])

    def change(chunk: Chunk) -> Chunk:
        offer = _offer(chunk)
        relay.point_at(offer["host"], offer["port"])
        return _change_offer(chunk, {"host": "127.0.0.1", "port": port})

    try:
        yield change
    finally:
        await relay.cut()
