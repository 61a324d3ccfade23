"""Request planes and scripted services for the request-plane contract tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import pytest

from dynamo_trtllm.cluster.request_plane.client import PlaneLimits
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.protocol.errors import (
    DynamoError,
    TransferExpired,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    Control,
    FinishReason,
    GenerateRequest,
    PhaseTimings,
    ReleaseKv,
    ReleaseOutcome,
    Sampling,
    token_ids,
)
from tests.kit.generator_streams import ChunkSource, call_stream
from tests.kit.waiting import SOON_S

LIMITS = PlaneLimits(ack_timeout_s=SOON_S, ping_interval_s=0.6)
SUBJECT = "ns_prefill.generate-1f"
Script = Callable[[GenerateRequest], AsyncGenerator[Chunk, None]]


class ScriptedService(ChunkSource):
    """A service that runs a script per request and counts the open requests."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.open = 0
        self.started = asyncio.Event()
        self.closed = asyncio.Event()
        self.verbs: list[Control] = []
        self.pending: dict[str, float] = {}  # transfer id -> expiry
        self.kv_holder = self

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.open += 1
        self.started.set()
        try:
            async with aclosing(self.script(request)) as chunks:
                async for chunk in chunks:
                    if chunk.kv_params is not None:
                        self.pending[chunk.kv_params.transfer_id] = chunk.kv_params.expires_at
                    yield chunk
        finally:
            self.open -= 1
            self.closed.set()

    def release(self, transfer_id: str, outcome: ReleaseOutcome) -> None:
        self.verbs.append(ReleaseKv(transfer_id, outcome))
        self.pending.pop(transfer_id, None)

    def is_pending(self, transfer_id: str) -> bool:
        return self.pending.get(transfer_id, 0) > time.time()

    async def control(self, verb: Control) -> bytes:
        self.verbs.append(verb)
        if isinstance(verb, ReleaseKv):
            self.pending.pop(verb.transfer_id, None)
            raise TransferExpired("too late", field="transfer_id")
        if verb.sha256 == "boom":
            raise RuntimeError("boom")
        return b"x" * (2_000_000 if verb.sha256 == "huge" else 1000)


class PlanePair:
    """The request planes of a worker and a caller."""

    def __init__(self, worker: RequestPlane, caller: RequestPlane) -> None:
        self.worker = worker
        self.caller = caller


def make_request(
    *, name: str = "r", prompt: int = 4, seconds: float = 10.0, max_tokens: int = 5
) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        model="m",
        token_ids=token_ids(range(prompt)),
        sampling=Sampling(max_tokens=max_tokens),
        deadline=time.time() + seconds,
    )


async def count_up(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
    for n in range(request.sampling.max_tokens - 1):
        yield Chunk(token_ids=token_ids([n]))
        await asyncio.sleep(0)
    last = token_ids([request.sampling.max_tokens - 1])
    yield Chunk(token_ids=last, finish_reason=FinishReason.LENGTH, stats=PhaseTimings(queue_s=0.5))


async def one_then_wait(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
    yield Chunk(token_ids=token_ids([7]))
    await asyncio.Event().wait()


async def wait_for_ever(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
    await asyncio.Event().wait()
    yield Chunk()


async def collect(
    plane: RequestPlane, request: GenerateRequest, subject: str = SUBJECT
) -> list[Chunk]:
    async with aclosing(call_stream(plane, subject, request)) as chunks:
        return [chunk async for chunk in chunks]


async def check_fails(call: Awaitable[object], error: type[DynamoError]) -> DynamoError:
    with pytest.raises(error) as caught:
        await call
    assert type(caught.value) is error
    assert caught.value.code == error.code
    return caught.value


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110  # lists have no event
            await asyncio.sleep(0.01)


# message → messages that arrive: none, the same, or the same twice
Deliver = Callable[[bytes], list[bytes]]


class Network:
    """Changes the delivery of messages to callers and workers.

    Replies to requests are not changed.
    """

    def __init__(self) -> None:
        self.to_caller: Deliver = lambda data: [data]
        self.to_worker: Deliver = lambda data: [data]
