"""The request-plane contract where streams end: KV transfers on their way, waiting for what runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
import pytest

from dynamo_trtllm.cluster.request_plane.frames import PING, ClientMessage, OpenStream
from dynamo_trtllm.cluster.request_plane.subjects import control_subject
from dynamo_trtllm.protocol.errors import (
    TransferExpired,
)
from dynamo_trtllm.protocol.messages import (
    WIRE_VERSION,
    Chunk,
    FinishReason,
    GenerateRequest,
    ReleaseKv,
    ReleaseOutcome,
    encode,
)
from tests.kit.generator_streams import call_stream
from tests.kit.instances import make_transfer_params
from tests.kit.request_planes import (
    SUBJECT,
    PlanePair,
    ScriptedService,
    collect,
    make_request,
    until,
)
from tests.kit.waiting import SOON_S


async def hand_over(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
    yield Chunk(finish_reason=FinishReason.KV_TRANSFER, kv_params=make_transfer_params("t1"))


async def test_close_aborts_a_transfer_on_its_way(bench: PlanePair) -> None:
    async def hand_over_too_late(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        async for chunk in hand_over(request):
            try:
                yield chunk
            finally:
                taking.cancel()  # the chunk is sent and not there yet

    service = ScriptedService(hand_over_too_late)
    await bench.worker.serve(SUBJECT, service)
    taking = asyncio.create_task(collect(bench.caller, make_request()))
    with pytest.raises(asyncio.CancelledError):
        await taking
    await until(lambda: service.verbs == [ReleaseKv("t1", ReleaseOutcome.ABORTED)])


async def test_close_leaves_a_taken_transfer_to_the_caller(bench: PlanePair) -> None:
    service = ScriptedService(hand_over)
    await bench.worker.serve(SUBJECT, service)
    async with aclosing(call_stream(bench.caller, SUBJECT, make_request())) as chunks:
        assert (await anext(chunks)).kv_params is not None
    await asyncio.sleep(0.7)  # two pings: the caller is there
    assert service.verbs == []
    with pytest.raises(TransferExpired):
        await bench.caller.client.control(SUBJECT, ReleaseKv("t1", ReleaseOutcome.FETCHED))
    assert len(service.verbs) == 1


async def test_finished_when_a_stream_runs_then_it_is_waited_for(bench: PlanePair) -> None:
    gate = asyncio.Event()

    async def gated(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        await gate.wait()
        yield Chunk(finish_reason=FinishReason.STOP)

    service = ScriptedService(gated)
    serving = await bench.worker.serve(SUBJECT, service)
    await asyncio.wait_for(serving.until_finished(), SOON_S)
    asking = asyncio.create_task(collect(bench.caller, make_request()))
    await asyncio.wait_for(service.started.wait(), SOON_S)
    assert serving.num_running == 1
    serving.is_accepting = False
    finished = asyncio.create_task(serving.until_finished())
    await asyncio.sleep(0.05)
    assert not finished.done()
    gate.set()
    await asyncio.wait_for(finished, SOON_S)
    assert (serving.num_running, len(await asking)) == (0, 1)


async def test_message_of_unanswerable_sender_does_not_end_streams(bench: PlanePair) -> None:
    gate = asyncio.Event()

    async def gated(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk()
        await gate.wait()
        yield Chunk(finish_reason=FinishReason.STOP)

    service = ScriptedService(gated)
    await bench.worker.serve(SUBJECT, service)
    async with aclosing(call_stream(bench.caller, SUBJECT, make_request())) as chunks:
        await anext(chunks)
        transport = bench.caller._transport  # type: ignore[attr-defined]
        without_subject = encode(
            ClientMessage(OpenStream(1, "no subject", make_request(name="x"), 60.0, WIRE_VERSION))
        )
        for data in (PING, b"garbage", without_subject):
            transport.publish(SUBJECT, data)
            transport.publish(control_subject(SUBJECT), data)
            transport.publish(bench.caller.client._inbox_subject, PING)  # type: ignore[attr-defined]
        await until(lambda: service.open == 2)
        gate.set()
        assert [chunk.finish_reason async for chunk in chunks] == [FinishReason.STOP]
    await until(lambda: service.open == 0)


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
async def test_request_deadline_is_independent_of_clocks(bench: PlanePair, ahead_s: float) -> None:
    seen: list[float] = []

    async def noting(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        seen.append(request.deadline - time.time())
        yield Chunk(finish_reason=FinishReason.STOP)

    service = ScriptedService(noting)
    await bench.worker.serve(SUBJECT, service)
    caller = bench.caller
    await caller.client._subscribe()  # type: ignore[attr-defined]
    # by the caller's clock
    request = msgspec.structs.replace(make_request(), deadline=time.time() + ahead_s + 60)
    opening = OpenStream(7, caller.client._inbox_subject, request, 60.0, WIRE_VERSION)  # type: ignore[attr-defined]
    caller._transport.publish(SUBJECT, encode(ClientMessage(opening)))  # type: ignore[attr-defined]
    await until(lambda: bool(seen))
    assert seen[0] == pytest.approx(60, abs=SOON_S)
