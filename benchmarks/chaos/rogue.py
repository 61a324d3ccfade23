"""A prefill worker that passes requests on to a good one and spoils its tickets. For chaos runs only."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import msgspec

from benchmarks.chaos.deployment import Deployment, NotServing
from dynamo_trtllm.discovery import keys
from dynamo_trtllm.discovery.etcd import EtcdDiscovery
from dynamo_trtllm.messages import Chunk, Control, GenerateRequest, HandoffTicket, Instance, Restart, Role
from dynamo_trtllm.plane.base import Plane
from dynamo_trtllm.plane.nats import NatsPlane
from dynamo_trtllm.worker.loading import live_peers

Spoil = Callable[[HandoffTicket], HandoffTicket]
_LEASE_TTL_S = 2.0
_AN_HOUR_S = 3600.0


class Relay:
    """`plane.base.Service`: the good worker's, but for the tickets."""

    def __init__(self, plane: Plane, good: Instance, spoil: Spoil) -> None:
        self._plane, self._good, self._spoil = plane, good, spoil
        self.spoiled = 0  # tickets

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        async with aclosing(self._plane.generate(self._good.subject, request)) as chunks:
            async for chunk in chunks:
                if chunk.ticket is not None:
                    self.spoiled += 1
                    chunk = msgspec.structs.replace(chunk, ticket=self._spoil(chunk.ticket))
                yield chunk

    async def control(self, verb: Control) -> bytes:
        if isinstance(verb, Restart):  # meant for us, not for the good one
            return b""
        return await self._plane.control(self._good.subject, verb)


@asynccontextmanager
async def registered(deployment: Deployment, spoil: Spoil) -> AsyncIterator[None]:
    """It is a worker of the deployment while entered. Raises NotServing when it never was asked for anything."""
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
        relay = Relay(plane, good, spoil)
        serving = await plane.serve(subject, relay)
        stack.push_async_callback(serving.aclose)
        registration = await discovery.register(msgspec.structs.replace(good, id=number, subject=subject))
        stack.push_async_callback(registration.aclose)
        yield
        if not relay.spoiled:
            raise NotServing("the bad prefill worker was never used: give it more --seconds")


def late(ticket: HandoffTicket) -> HandoffTicket:
    """As of a worker whose clock is behind."""
    return msgspec.structs.replace(ticket, expires_at=ticket.expires_at - _AN_HOUR_S)


@asynccontextmanager
async def black_hole() -> AsyncIterator[Spoil]:
    """Tickets of the tcp carrier whose KV is at a port that takes connections and never says a word."""
    taken: list[asyncio.StreamWriter] = []

    def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append(writer)

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    def spoil(ticket: HandoffTicket) -> HandoffTicket:
        offer = msgspec.msgpack.decode(ticket.opaque) | {"host": "127.0.0.1", "port": port}
        return msgspec.structs.replace(ticket, opaque=msgspec.msgpack.encode(offer))

    try:
        yield spoil
    finally:
        server.close()
        for writer in taken:
            writer.transport.abort()
