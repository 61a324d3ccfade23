"""Runs a router with scripted workers on the in-process request plane."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from dynamo_trtllm.cluster.request_plane.inproc import InprocPlane
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import (
    Chunk,
    Control,
    FinishReason,
    GenerateRequest,
    Instance,
    KvTransferParams,
    PhaseTimings,
    ReissueKvParams,
    ReleaseKv,
    ReleaseSlot,
    ReserveSlot,
    Role,
    Sampling,
    TransferSignature,
    encode,
    token_ids,
)
from dynamo_trtllm.protocol.streams import OnEvent, StreamHandle
from tests.kit.generator_streams import ChunkSource, routed_stream
from tests.kit.instances import make_instance, make_transfer_params

PREFILL_STATS = PhaseTimings(prefill_s=0.25)
DECODE_STATS = PhaseTimings(kv_transfer_s=0.5, kv_bytes=7)

HANG = "hang"
Step = Chunk | DynamoError | asyncio.Event | str
FINISHED = [
    Chunk(token_ids=token_ids([10])),
    Chunk(token_ids=token_ids([11, 12])),
    Chunk(token_ids=token_ids([13]), finish_reason=FinishReason.STOP, stats=DECODE_STATS),
]


def kv_chunk(transfer_id: str) -> Chunk:
    return Chunk(
        finish_reason=FinishReason.KV_TRANSFER,
        kv_params=make_transfer_params(transfer_id),
        stats=PREFILL_STATS,
    )


def signed_for(receivers: tuple[int, ...], kv_params: KvTransferParams) -> KvTransferParams:
    """Return KV transfer parameters with a signature of no key."""
    signature = TransferSignature("key", "request", receivers, b"mac")
    return msgspec.structs.replace(kv_params, signature=signature)


def signed_kv_chunk(transfer_id: str, receiver: int) -> Chunk:
    chunk = kv_chunk(transfer_id)
    assert chunk.kv_params is not None
    return msgspec.structs.replace(chunk, kv_params=signed_for((receiver,), chunk.kv_params))


class StoppableStream:
    """A stream whose script goes on when it is stopped."""

    def __init__(self, stream: StreamHandle, stopped: asyncio.Event) -> None:
        self._stream = stream
        self._stopped = stopped

    def stop(self) -> bool:
        self._stopped.set()
        return True

    def cancel(self) -> None:
        self._stream.cancel()

    @property
    def holds_kv(self) -> bool:
        return self._stream.holds_kv


class ScriptedWorker(ChunkSource):
    """A worker that runs one script per call.

    It waits for events in the script, and forever at HANG.
    """

    def __init__(self, *scripts: Sequence[Step]) -> None:
        self._scripts = iter(scripts)
        self.stopped: asyncio.Event | None = None  # its calls can be stopped, which sets this
        self.requests: list[GenerateRequest] = []
        self.releases: list[ReleaseKv] = []
        self.reissues: list[ReissueKvParams] = []
        self.hanging = asyncio.Event()
        self.closed = asyncio.Event()  # set if it was closed while it waited
        self.reservations: list[ReserveSlot | ReleaseSlot] = []
        self.asked = asyncio.Event()  # set when a slot was requested
        self.stalls: asyncio.Event | None = None  # replies for slots wait for this
        # errors raised by type of control request
        self.faults: dict[type[Control], DynamoError] = {}

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
        for step in next(self._scripts):
            if isinstance(step, DynamoError):
                raise step
            if isinstance(step, Chunk):
                yield step
                continue
            try:
                self.hanging.set()
                await (step if isinstance(step, asyncio.Event) else asyncio.Event()).wait()
            except asyncio.CancelledError:
                self.closed.set()
                raise

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        stream = super().generate(request, on_event)
        return stream if self.stopped is None else StoppableStream(stream, self.stopped)

    async def control(self, verb: Control) -> bytes:
        answer = b""
        if isinstance(verb, ReleaseKv):
            self.releases.append(verb)
        elif isinstance(verb, ReissueKvParams):
            self.reissues.append(verb)
            answer = encode(signed_for(verb.receivers, verb.kv_params))
        else:
            assert isinstance(verb, ReserveSlot | ReleaseSlot)
            self.reservations.append(verb)
            self.asked.set()
            if self.stalls is not None:
                await self.stalls.wait()
        fault = self.faults.get(type(verb))
        if fault is not None:
            raise fault
        return answer


class Cluster:
    def __init__(self) -> None:
        self.plane = InprocPlane()
        self.view = ClusterView()
        self.router = RequestRouter(self.view, self.plane)

    async def add(
        self,
        instance_id: int,
        role: Role,
        *scripts: Sequence[Step],
        unsupported_features: tuple[str, ...] = (),
        can_aggregate: bool = False,
        strategy: str = "prefill_first",
        supported_features: tuple[str, ...] = (),
        keeps_unfetched_kv: bool = False,
    ) -> ScriptedWorker:
        made: Instance = make_instance(instance_id, role=role)
        card = msgspec.structs.replace(made.card, unsupported_features=unsupported_features)
        instance = msgspec.structs.replace(
            made,
            card=card,
            can_aggregate=can_aggregate,
            strategy=strategy,
            supported_features=supported_features,
            keeps_unfetched_kv=keeps_unfetched_kv,
        )
        return await self.add_instance(instance, *scripts)

    async def add_instance(self, instance: Instance, *scripts: Sequence[Step]) -> ScriptedWorker:
        service = ScriptedWorker(*scripts)
        await self.plane.serve(instance.subject, service)
        self.view.add(instance)
        return service

    async def tokens(self, trace: ChoiceTimeline | None = None, **sampling: Any) -> list[int]:
        """Return all tokens of a request. Only its last chunk may have a finish reason."""
        async with aclosing(
            routed_stream(self.router, request(**sampling), trace or ChoiceTimeline())
        ) as stream:
            chunks = [chunk async for chunk in stream]
        assert [chunk.finish_reason is not None for chunk in chunks] == [False] * (
            len(chunks) - 1
        ) + [True]
        return [token for chunk in chunks for token in chunk.token_ids]


def request(**sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r1",
        model="tiny",
        token_ids=token_ids([1, 2, 3]),
        sampling=Sampling(**{"max_tokens": 8, **sampling}),
        deadline=time.time() + 10,
    )
