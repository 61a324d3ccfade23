"""The request-plane contract for KV transfers whose way, or whose release, was disturbed: none is held
for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from dynamo_trtllm.cluster.request_plane.frames import PING, Batch, CancelStream, ClientMessage
from dynamo_trtllm.cluster.request_plane.receivers import StreamReceiver
from dynamo_trtllm.cluster.request_plane.server import PlaneServer
from dynamo_trtllm.protocol.errors import StreamIncomplete
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    ReleaseKv,
    ReleaseOutcome,
    decode,
)
from dynamo_trtllm.protocol.streams import StreamEvent
from tests.kit.instances import make_transfer_params
from tests.kit.request_planes import (
    LIMITS,
    SUBJECT,
    Network,
    PlanePair,
    Script,
    ScriptedService,
    check_fails,
    collect,
    make_request,
    until,
    wait_for_ever,
)
from tests.kit.waiting import SOON_S


async def hand_over(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
    yield Chunk(
        finish_reason=FinishReason.KV_TRANSFER, kv_params=make_transfer_params("t1", ttl_s=60.0)
    )


async def test_transfer_lost_on_its_way_returns_to_the_worker(
    network: Network, bench: PlanePair
) -> None:
    network.to_caller = lambda data: [] if data != PING and decode(data, Batch).frames else [data]
    service = ScriptedService(hand_over)
    await bench.worker.serve(SUBJECT, service)
    await check_fails(
        asyncio.wait_for(collect(bench.caller, make_request(seconds=60)), SOON_S), StreamIncomplete
    )
    await until(lambda: service.verbs == [ReleaseKv("t1", ReleaseOutcome.ABORTED)])


async def test_repeated_report_keeps_a_taken_transfer_valid(
    network: Network, bench: PlanePair
) -> None:
    reports: list[bytes] = []

    def keep(data: bytes) -> list[bytes]:
        if data != PING and decode(data, Batch).report is not None:
            reports.append(data)
        return [data]

    async def waiting(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        await gate.wait()
        async for chunk in hand_over(request):
            yield chunk

    gate = asyncio.Event()
    network.to_caller = keep
    service = ScriptedService(waiting)
    await bench.worker.serve(SUBJECT, service)
    asking = asyncio.create_task(collect(bench.caller, make_request(seconds=60)))
    await until(lambda: any(decode(data, Batch).report.streams for data in reports))  # type: ignore[union-attr]
    gate.set()
    (chunk,) = await asyncio.wait_for(asking, SOON_S)
    assert chunk.kv_params is not None
    inbox = bench.caller.client._inbox_subject  # type: ignore[attr-defined]
    for data in reports:
        bench.worker._transport.publish(inbox, data)  # type: ignore[attr-defined]
    await asyncio.sleep(3 * LIMITS.ping_interval_s)  # reports that list the transfer come, too
    assert service.verbs == []


async def test_transfer_when_caller_and_cancel_are_lost_then_reclaimed(
    network: Network, bench: PlanePair
) -> None:
    lost: list[bytes] = []

    def lose_cancels(data: bytes) -> list[bytes]:
        if (
            len(lost) < 2
            and data != PING
            and isinstance(decode(data, ClientMessage).body, CancelStream)
        ):
            lost.append(data)
            return []
        return [data]

    async def leave(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        async for chunk in hand_over(request):
            try:
                yield chunk
            finally:
                asking.cancel()  # the KV transfer parameters are sent and have not arrived

    network.to_worker = lose_cancels
    service = ScriptedService(leave)
    serving = await bench.worker.serve(SUBJECT, service)
    asking = asyncio.create_task(collect(bench.caller, make_request(seconds=60)))
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: service.verbs == [ReleaseKv("t1", ReleaseOutcome.ABORTED)])
    assert isinstance(serving, PlaneServer)
    await until(lambda: not serving._callers)
    assert len(lost) == 2


async def begun(
    bench: PlanePair, script: Script
) -> tuple[ScriptedService, StreamReceiver, list[StreamEvent]]:
    """Start a call and wait for its acknowledgment.

    Return its service, its stream and the events so far.
    """
    service = ScriptedService(script)
    events = list[StreamEvent]()
    await bench.worker.serve(SUBJECT, service)
    call = bench.caller.client.generate(SUBJECT, make_request(seconds=60), events.append)
    await until(lambda: call.last_ping_before_ack is not None)
    return service, call, events


async def test_stop_during_transfer_gives_it_to_the_caller(
    network: Network, bench: PlanePair
) -> None:
    gate = asyncio.Event()
    sent = list[bytes]()

    def hold_back(data: bytes) -> list[bytes]:
        if data != PING and decode(data, Batch).frames and not sent:
            sent.append(data)
            assert call.stop()
            return []
        return [data]

    async def waiting(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        await gate.wait()
        async for chunk in hand_over(request):
            yield chunk

    network.to_caller = hold_back
    service, call, events = await begun(bench, waiting)
    gate.set()
    await until(lambda: bool(sent))
    cancels = bench.caller.client._cancelled
    bench.worker._transport.publish(bench.caller.client._inbox_subject, sent[0])
    await until(lambda: bool(events))
    (chunk,) = events
    assert isinstance(chunk, Chunk)
    assert chunk.kv_params is not None
    assert (service.verbs, cancels) == ([], {})
    call.cancel()  # as a caller that does not collect it
    await until(lambda: service.verbs == [ReleaseKv("t1", ReleaseOutcome.ABORTED)])


async def test_stop_of_unstoppable_call_cancels_it(bench: PlanePair) -> None:
    service, call, events = await begun(bench, wait_for_ever)
    assert call.stop()
    await asyncio.wait_for(service.closed.wait(), SOON_S)
    await until(lambda: bool(events))
    assert isinstance(events[0], StreamIncomplete)
    assert not call.stop()


async def test_expired_transfer_ends_questions_to_its_caller(
    network: Network, bench: PlanePair
) -> None:
    async def brief(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk(
            finish_reason=FinishReason.KV_TRANSFER, kv_params=make_transfer_params("t1", ttl_s=0.2)
        )

    serving = await bench.worker.serve(SUBJECT, ScriptedService(brief))
    await collect(bench.caller, make_request())
    assert isinstance(serving, PlaneServer)
    assert serving._callers
    await until(lambda: not serving._callers)
