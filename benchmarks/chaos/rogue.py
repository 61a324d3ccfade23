"""Prefill workers that spoil what they send: last chunks of a good worker, or their own KV. For chaos runs only."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import secrets
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.chaos.deployment import ENGINE_ARGS, Deployment, NotServing
from benchmarks.chaos.relay import ChangingRelay
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.demo_models.resolve import resolve
from dynamo_trtllm.discovery import keys
from dynamo_trtllm.discovery.etcd import EtcdDiscovery
from dynamo_trtllm.messages import WIRE_VERSION, Chunk, Control, GenerateRequest, Instance, Restart, Role
from dynamo_trtllm.observability.metrics import WorkerMetrics
from dynamo_trtllm.request_plane.base import Plane, Service
from dynamo_trtllm.request_plane.nats import NatsPlane
from dynamo_trtllm.worker.admission import Admission, AdmissionLimits
from dynamo_trtllm.worker.service import WorkerService
from dynamo_trtllm.worker.startup import live_peers

Spoil = Callable[[Chunk], Chunk]  # of a last chunk, which has a ticket

if TYPE_CHECKING:
    from dynamo_trtllm.engines.torch.engine import TorchEngine

_LEASE_TTL_S = 2.0
_AN_HOUR_S = 3600.0
_KV_BYTES = 128  # a request for KV has fewer


class Relay:
    """A `plane.base.Service` that forwards to a good worker and changes its last chunks."""

    def __init__(self, plane: Plane, good: Instance, spoil: Spoil) -> None:
        self._plane, self._good, self._spoil = plane, good, spoil
        self.spoiled = 0  # chunks

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        async with aclosing(self._plane.generate(self._good.subject, request)) as chunks:
            async for chunk in chunks:
                if chunk.ticket is not None:
                    self.spoiled += 1
                    chunk = self._spoil(chunk)
                yield chunk

    async def control(self, verb: Control) -> bytes:
        if isinstance(verb, Restart):  # meant for us, not for the good one
            return b""
        return await self._plane.control(self._good.subject, verb)


@asynccontextmanager
async def registered(deployment: Deployment, spoil: Spoil, wire: int = WIRE_VERSION) -> AsyncIterator[None]:
    """Register a relay to a good worker with this wire version for the context.

    Raise NotServing when no request reached it.
    """
    relays: list[Relay] = []

    async def relay(plane: Plane, good: Instance, own: Instance) -> Service:
        relays.append(Relay(plane, good, spoil))
        return relays[0]

    async with _joined(deployment, relay, wire):
        yield
    if not relays[0].spoiled:
        raise NotServing("the bad prefill worker was never used: give it more --seconds")


@asynccontextmanager
async def poisoned(deployment: Deployment) -> AsyncIterator[None]:
    """Register a prefill worker of the torch engine whose KV has a NaN before it is copied anywhere."""
    async with AsyncExitStack() as stack:

        async def serve(plane: Plane, good: Instance, own: Instance) -> Service:
            from dynamo_trtllm.engines.torch.engine import TorchEngine  # imports torch: seconds

            config = WorkerConfig(
                model_path=str(await asyncio.to_thread(resolve, own.card.name)),
                served_model_name=own.card.name,
                disaggregation_mode=Role.PREFILL,
                override_engine_args=ENGINE_ARGS["torch"],
                ticket_ttl_s=deployment.options.ticket_ttl_s,
            )
            engine = TorchEngine(config, instance_id=own.id)
            stack.push_async_callback(engine.aclose)
            await engine.start()
            _poison(engine)
            admission = Admission(AdmissionLimits(active=None, max_pending_transfer_fraction=1.0), time.time)
            return WorkerService(engine, own, admission, files={}, metrics=WorkerMetrics())

        async with _joined(deployment, serve, WIRE_VERSION):
            yield


def _poison(engine: TorchEngine) -> None:
    """From now on each prompt's KV has one NaN in the engine's own memory when it is copied from there."""
    assert engine._memory is not None
    pool, staging = engine._memory
    assert staging is not None
    gather = staging.gather

    def spoiled(parcel: Any, rows: Any) -> Any:
        pool.all_rows.view(pool.dtype)[int(rows[-1]), 0] = math.nan
        return gather(parcel, rows)

    setattr(staging, "gather", spoiled)  # noqa: B010  # a method that is replaced


@asynccontextmanager
async def _joined(
    deployment: Deployment, serve: Callable[[Plane, Instance, Instance], Awaitable[Service]], wire: int
) -> AsyncIterator[None]:
    """Register one more prefill worker. `serve` gets a good worker's record and the new one's."""
    servers = deployment.servers
    async with AsyncExitStack() as stack:
        plane = await NatsPlane.connect(servers["nats"].address)
        stack.push_async_callback(plane.aclose)
        discovery = EtcdDiscovery(servers["etcd"].address, lease_ttl_s=_LEASE_TTL_S)
        stack.push_async_callback(discovery.aclose)
        good, *_ = await live_peers(
            discovery, deployment.namespace, model=deployment.options.model, role=Role.DECODE
        )  # those of the other role: prefill workers
        number = secrets.randbits(63)
        subject = keys.subject(keys.endpoint_of(good), number)
        own = msgspec.structs.replace(good, id=number, subject=subject, wire=wire)
        serving = await plane.serve(subject, await serve(plane, good, own))
        stack.push_async_callback(serving.aclose)
        registration = await discovery.register(own)
        stack.push_async_callback(registration.aclose)
        yield


def late(chunk: Chunk) -> Chunk:
    """As of a worker whose clock is behind."""
    assert chunk.ticket is not None
    ticket = msgspec.structs.replace(chunk.ticket, expires_at=chunk.ticket.expires_at - _AN_HOUR_S)
    return msgspec.structs.replace(chunk, ticket=ticket)


def newer(chunk: Chunk) -> Chunk:
    """Return the chunk with a finish reason that only a later version knows."""
    return msgspec.structs.replace(chunk, finish_reason="a reason of a later version")


def _offer(chunk: Chunk) -> dict[str, Any]:
    """Return the tcp offer of the chunk's ticket, which is all of `engine_state` or its `offer`."""
    assert chunk.ticket is not None
    engine_state: dict[str, Any] = msgspec.msgpack.decode(chunk.ticket.engine_state)
    return msgspec.msgpack.decode(engine_state["offer"]) if "offer" in engine_state else engine_state


def _offering(chunk: Chunk, changes: dict[str, Any]) -> Chunk:
    """Return the chunk with other values in the tcp offer of its ticket."""
    assert chunk.ticket is not None
    engine_state = msgspec.msgpack.decode(chunk.ticket.engine_state)
    offer = _offer(chunk) | changes
    engine_state = engine_state | {"offer": msgspec.msgpack.encode(offer)} if "offer" in engine_state else offer
    ticket = msgspec.structs.replace(chunk.ticket, engine_state=msgspec.msgpack.encode(engine_state))
    return msgspec.structs.replace(chunk, ticket=ticket)


@contextmanager
def unreadable() -> Iterator[Spoil]:
    """Yield a function that makes every other ticket name a dead port, and the others an offer that was withdrawn."""
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))  # never listens: connections are refused, and the port stays taken
        reasons = itertools.cycle(
            [
                {"host": "127.0.0.1", "port": dead.getsockname()[1]},
                {"token": secrets.token_bytes(32)},  # the holder knows no such offer
            ]
        )
        yield lambda chunk: _offering(chunk, next(reasons))


@asynccontextmanager
async def black_hole() -> AsyncIterator[Spoil]:
    """Yield a change of tickets of the tcp backend: their KV is at a port that never sends data."""
    taken: list[asyncio.StreamWriter] = []

    def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append(writer)

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    try:
        yield lambda chunk: _offering(chunk, {"host": "127.0.0.1", "port": port})
    finally:
        server.close()
        for writer in taken:
            writer.transport.abort()


def flipped(data: bytes) -> bytes:
    """Return KV with one bit changed; what is too short for KV as it is."""
    if len(data) < _KV_BYTES:
        return data
    changed = bytearray(data)
    changed[random.randrange(len(data) // 2, len(data))] ^= 1 << random.randrange(8)
    return bytes(changed)


@asynccontextmanager
async def corrupting() -> AsyncIterator[Spoil]:
    """Yield a change of tickets of the tcp backend: their KV comes through a relay that flips bits of it."""
    relay = await ChangingRelay.start("127.0.0.1:0")
    relay.change = flipped
    port = int(relay.address.rpartition(":")[2])

    def spoil(chunk: Chunk) -> Chunk:
        offer = _offer(chunk)
        relay.point_at(offer["host"], offer["port"])
        return _offering(chunk, {"host": "127.0.0.1", "port": port})

    try:
        yield spoil
    finally:
        await relay.cut()
