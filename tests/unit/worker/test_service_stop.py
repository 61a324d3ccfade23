"""The worker's side of a call that its frontend stops to collect its KV."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest

from dynamo_trtllm.engines.capabilities import TransfersKv
from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.observability.metrics import WorkerMetrics
from dynamo_trtllm.protocol.errors import MigrationFailed
from dynamo_trtllm.protocol.messages import (
    Chunk,
    GenerateRequest,
    Phase,
    Role,
    Sampling,
    token_ids,
)
from dynamo_trtllm.protocol.streams import OnEvent, Stream, StreamEvent
from dynamo_trtllm.worker.service import WorkerService
from dynamo_trtllm.worker.worker_admission import WorkerAdmission
from tests.kit.generator_streams import ChunkEngine
from tests.kit.instances import make_instance


class OneStreamEngine(ChunkEngine, TransfersKv):
    """An engine whose stream the test ends."""

    def __init__(self, *, can_stop: bool) -> None:
        self._class = StoppableStream if can_stop else Stream
        self.stream: Stream | None = None

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        raise AssertionError("the test ends the stream")
        yield Chunk()

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> Stream:
        self.stream = self._class(on_event)
        return self.stream

    def release(self, transfer_id: str, outcome: object) -> None: ...
    def is_pending(self, transfer_id: str) -> bool:
        return False


class StoppableStream(Stream):
    def stop(self) -> bool:
        return True


def service_of(engine: Engine, admission: WorkerAdmission) -> WorkerService:
    instance = make_instance(1, role=Role.PREFILL)
    return WorkerService(engine, instance, admission, files={}, metrics=WorkerMetrics())


def request() -> GenerateRequest:
    return GenerateRequest(
        request_id="r-42",
        model="tiny",
        token_ids=token_ids([5, 6]),
        sampling=Sampling(max_tokens=3),
        deadline=time.time() + 60,
        phase=Phase.PREFILL,
    )


async def test_stop_frees_the_place_and_counts_cancelled() -> None:
    engine = OneStreamEngine(can_stop=True)
    admission = WorkerAdmission(max_active=1)
    service = service_of(engine, admission)
    events: list[StreamEvent] = []
    stream = service.generate(request(), events.append)
    assert admission.active() == 1
    assert stream.stop()
    assert (admission.active(), events) == (0, [])
    assert engine.stream is not None
    engine.stream.emit(MigrationFailed("aborted"))
    assert [type(event) for event in events] == [MigrationFailed]
    text = service.metrics.render().decode()
    assert 'dynamo_trtllm_requests_total{code="cancelled",phase="prefill"} 1.0' in text


@pytest.mark.parametrize("max_active", [1, 0])
async def test_stop_unsupported_or_uncalled_is_false(max_active: int) -> None:
    stream = service_of(
        OneStreamEngine(can_stop=False), WorkerAdmission(max_active=max_active)
    ).generate(request(), lambda event: None)
    assert not stream.stop()
    await asyncio.sleep(0)
