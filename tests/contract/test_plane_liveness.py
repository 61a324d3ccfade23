"""The request-plane contract when messages are lost or repeated: no stream waits for what will
never come.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import pytest

from dynamo_trtllm.cluster.request_plane.frames import (
    PING,
    Ack,
    Batch,
    CancelStream,
    ClientMessage,
    Frame,
    OpenStream,
    Ping,
    StreamReport,
)
from dynamo_trtllm.cluster.request_plane.server import PlaneServer
from dynamo_trtllm.protocol.errors import (
    BadFrame,
    DeadlineExceeded,
    Disconnected,
    DynamoError,
    StreamIncomplete,
    Unreachable,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    GetFile,
    decode,
    encode,
    token_ids,
)
from tests.kit.generator_streams import call_stream
from tests.kit.request_planes import (
    LIMITS,
    SUBJECT,
    Deliver,
    Network,
    PlanePair,
    ScriptedService,
    check_fails,
    collect,
    make_request,
    one_then_wait,
    until,
)
from tests.kit.waiting import SOON_S


def frames(change: Callable[[Frame], list[Frame]]) -> Deliver:
    """Changes frames one by one; reports and pings arrive as they are."""

    def deliver(data: bytes) -> list[bytes]:
        if data == PING:
            return [data]
        batch = decode(data, Batch)
        return [
            encode(
                Batch(
                    [changed for frame in batch.frames for changed in change(frame)], batch.report
                )
            )
        ]

    return deliver


def losing(number: int) -> Deliver:
    return frames(lambda frame: [] if frame.number == number else [frame])


async def three_steps(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
    """Three chunks, each in a message of its own."""
    for n in range(2):
        yield Chunk(token_ids=token_ids([n]))
        await asyncio.sleep(0.02)
    yield Chunk(token_ids=token_ids([2]), finish_reason=FinishReason.STOP)


@pytest.mark.parametrize("number", range(3), ids=["first", "middle", "last"])
async def test_stream_when_a_frame_is_lost_then_it_ends_as_incomplete(
    network: Network, bench: PlanePair, number: int
) -> None:
    network.to_caller = losing(number)
    service = ScriptedService(three_steps)
    await bench.worker.serve(SUBJECT, service)
    error = await check_fails(
        asyncio.wait_for(collect(bench.caller, make_request(seconds=60)), SOON_S), StreamIncomplete
    )
    assert error.retryable
    await until(lambda: service.open == 0)


async def test_lost_middle_frame_is_found_by_its_number(network: Network, bench: PlanePair) -> None:
    async def two_then_wait(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        async for chunk in three_steps(request):
            if chunk.finish_reason is None:
                yield chunk
        await asyncio.Event().wait()

    network.to_caller = losing(1)
    service = ScriptedService(two_then_wait)
    await bench.worker.serve(SUBJECT, service)
    error = await check_fails(
        asyncio.wait_for(collect(bench.caller, make_request(seconds=60)), SOON_S), StreamIncomplete
    )
    assert error.message == "the worker sent 2 frames and 1 arrived"
    await asyncio.wait_for(service.closed.wait(), SOON_S)


async def test_stream_when_all_messages_are_lost_then_ends_later(
    network: Network, bench: PlanePair
) -> None:
    """As of a caller that was frozen for longer than any time-out: the worker gave it up
    meanwhile.
    """
    service = ScriptedService(one_then_wait)
    await bench.worker.serve(SUBJECT, service)
    async with aclosing(call_stream(bench.caller, SUBJECT, make_request(seconds=60))) as chunks:
        await anext(chunks)
        network.to_caller = lambda data: []
        network.to_worker = lambda data: []
        reading = asyncio.create_task(anext(chunks))
        await asyncio.wait_for(service.closed.wait(), SOON_S)
        network.to_caller = network.to_worker = lambda data: [data]
        with pytest.raises(DynamoError) as caught:
            await asyncio.wait_for(reading, SOON_S)
        assert caught.value.retryable


async def test_worker_when_it_gives_a_caller_up_then_it_says_so(
    network: Network, bench: PlanePair
) -> None:
    service = ScriptedService(one_then_wait)
    serving = await bench.worker.serve(SUBJECT, service)
    assert isinstance(serving, PlaneServer)
    async with aclosing(call_stream(bench.caller, SUBJECT, make_request(seconds=60))) as chunks:
        await anext(chunks)
        serving._caller_lost(bench.caller.client._inbox_subject, StreamIncomplete("no answer"))  # type: ignore[attr-defined]
        with pytest.raises(StreamIncomplete, match="the worker ended this stream"):
            await asyncio.wait_for(anext(chunks), SOON_S)
    await asyncio.wait_for(service.closed.wait(), SOON_S)


async def test_lost_cancel_still_ends_the_worker_stream(network: Network, bench: PlanePair) -> None:
    lost: list[bytes] = []

    def lose_the_first(data: bytes) -> list[bytes]:
        if not lost and data != PING and isinstance(decode(data, ClientMessage).body, CancelStream):
            lost.append(data)
            return []
        return [data]

    network.to_worker = lose_the_first
    service = ScriptedService(one_then_wait)
    await bench.worker.serve(SUBJECT, service)
    async with aclosing(call_stream(bench.caller, SUBJECT, make_request(seconds=60))) as chunks:
        await anext(chunks)
    await asyncio.wait_for(service.closed.wait(), SOON_S)
    assert len(lost) == 1


async def test_repeated_messages_give_the_same_answer_once(
    network: Network, bench: PlanePair
) -> None:
    runs: list[GenerateRequest] = []

    async def counted(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        runs.append(request)
        async for chunk in three_steps(request):
            yield chunk

    network.to_caller = network.to_worker = lambda data: [data, data]
    service = ScriptedService(counted)
    serving = await bench.worker.serve(SUBJECT, service)
    chunks = await asyncio.wait_for(collect(bench.caller, make_request(seconds=60)), SOON_S)
    assert [token for chunk in chunks for token in chunk.token_ids] == [0, 1, 2]
    assert len(runs) == 1
    await until(lambda: serving.num_running == 0)


async def test_opening_repeated_after_its_end_does_not_run_again(
    network: Network, bench: PlanePair
) -> None:
    openings: list[bytes] = []

    def keep(data: bytes) -> list[bytes]:
        if data != PING and isinstance(decode(data, ClientMessage).body, OpenStream):
            openings.append(data)
        return [data]

    network.to_worker = keep
    service = ScriptedService(three_steps)
    serving = await bench.worker.serve(SUBJECT, service)
    await collect(bench.caller, make_request())
    await until(lambda: serving.num_running == 0)
    service.started.clear()
    bench.caller._transport.publish(SUBJECT, openings[0])  # type: ignore[attr-defined]
    await collect(bench.caller, make_request(name="next"))  # comes after it, in order
    assert len(openings) == 3
    await until(lambda: service.open == serving.num_running == 0)
    assert not service.verbs


async def test_stream_of_a_replaced_worker_is_incomplete(
    network: Network, bench: PlanePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ScriptedService(one_then_wait)
    serving = await bench.worker.serve(SUBJECT, first)
    async with aclosing(call_stream(bench.caller, SUBJECT, make_request(seconds=60))) as chunks:
        await anext(chunks)
        with monkeypatch.context() as silent:  # a process that is killed says nothing
            silent.setattr(bench.worker._transport, "publish", lambda subject, data: None)  # type: ignore[attr-defined]
            await serving.aclose()
        await bench.worker.serve(SUBJECT, ScriptedService(one_then_wait))
        with pytest.raises(DynamoError) as caught:
            await asyncio.wait_for(anext(chunks), SOON_S)
        assert caught.value.retryable


async def test_many_streams_when_nothing_is_lost_then_pings_end_none(
    network: Network, bench: PlanePair
) -> None:
    """Streams that begin, run and end while reports are on their way."""

    async def slowly(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        for n in range(request.sampling.max_tokens):
            yield Chunk(token_ids=token_ids([n]))
            await asyncio.sleep(0.01 if n % 3 else 0)
        yield Chunk(finish_reason=FinishReason.STOP)

    await bench.worker.serve(SUBJECT, ScriptedService(slowly))
    plane = bench.caller
    pings = plane.client._heartbeat  # type: ignore[attr-defined]

    async def ping_all_the_time() -> None:
        while True:
            await pings._ask(SUBJECT)

    pinging = asyncio.create_task(ping_all_the_time())
    try:
        requests = [
            make_request(name=f"r{n}", max_tokens=10 + n % 50, seconds=60) for n in range(200)
        ]
        answers = await asyncio.gather(*(collect(plane, request) for request in requests))
    finally:
        pinging.cancel()
        await asyncio.gather(pinging, return_exceptions=True)
    made = [[token for chunk in chunks for token in chunk.token_ids] for chunks in answers]
    assert made == [list(range(10 + n % 50)) for n in range(200)]


async def test_opening_with_too_long_inbox_is_rejected(network: Network, bench: PlanePair) -> None:
    """NATS ends the connection of a client that publishes to a subject of more than 4 KiB."""
    service = ScriptedService(three_steps)
    await bench.worker.serve(SUBJECT, service)
    opening = encode(ClientMessage(OpenStream(1, "x" * 5000, make_request(), 60.0)))
    reply = await bench.caller._transport.request(SUBJECT, opening, timeout_s=SOON_S)  # type: ignore[attr-defined]
    failure = decode(reply, Ack).failure
    assert failure is not None
    assert failure.code == BadFrame.code
    assert not service.started.is_set()
    assert len(await collect(bench.caller, make_request())) == 3


async def test_report_larger_than_a_message_does_not_stop_peers(
    network: Network, bench: PlanePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = ScriptedService(one_then_wait)
    await bench.worker.serve(SUBJECT, service)
    async with aclosing(call_stream(bench.caller, SUBJECT, make_request(seconds=60))) as chunks:
        await anext(chunks)
        transport = bench.worker._transport  # type: ignore[attr-defined]
        monkeypatch.setattr(type(transport), "max_message_bytes", 8)
        await asyncio.sleep(3 * LIMITS.ping_interval_s)
        assert service.open == 1
        monkeypatch.undo()
    await asyncio.wait_for(service.closed.wait(), SOON_S)


async def test_worker_streams_continue_while_pings_are_unanswered(
    network: Network, bench: PlanePair
) -> None:
    async def steadily(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        for n in range(40):
            yield Chunk(token_ids=token_ids([n]))
            await asyncio.sleep(LIMITS.ping_interval_s / 10)
        yield Chunk(finish_reason=FinishReason.STOP)

    network.to_worker = lambda data: (
        [] if data != PING and isinstance(decode(data, ClientMessage).body, Ping) else [data]
    )
    await bench.worker.serve(SUBJECT, ScriptedService(steadily))
    chunks = await asyncio.wait_for(collect(bench.caller, make_request(seconds=60)), 3 * SOON_S)
    assert sum(len(chunk.token_ids) for chunk in chunks) == 40


async def test_report_of_unrequested_subject_sends_nothing(
    network: Network, bench: PlanePair
) -> None:
    """A subject of more than 4 KiB would cost the connection."""
    await bench.worker.serve(SUBJECT, ScriptedService(one_then_wait))
    transport = bench.worker._transport  # type: ignore[attr-defined]
    async with aclosing(call_stream(bench.caller, SUBJECT, make_request(seconds=60))) as chunks:
        await anext(chunks)
        inbox = bench.caller.client._inbox_subject  # type: ignore[attr-defined]
        for subject in ("x" * 5000, "not a subject", "ns_x.generate-7"):
            transport.publish(
                inbox, encode(Batch([], StreamReport(subject, 1, [(n, 1) for n in range(5000)])))
            )
        transport.publish("y" * 5000, b"")
        with pytest.raises(Unreachable):
            await bench.caller.client.control("y" * 5000, GetFile("a"))
        # the connections live
        assert len(await bench.caller.client.control(SUBJECT, GetFile("a"))) == 1000


async def test_service_cleanup_survives_deadline_and_cancel(
    network: Network, bench: PlanePair
) -> None:
    cleaned = asyncio.Event()

    async def careful(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        try:
            yield Chunk(token_ids=token_ids([1]))
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)  # the caller's cancel comes meanwhile
            cleaned.set()

    await bench.worker.serve(SUBJECT, ScriptedService(careful))
    await check_fails(collect(bench.caller, make_request(seconds=0.5)), DeadlineExceeded)
    await asyncio.wait_for(cleaned.wait(), SOON_S)


async def test_generate_on_closed_plane_is_disconnected(bench: PlanePair) -> None:
    await bench.caller.aclose()
    tasks = asyncio.all_tasks()
    await check_fails(collect(bench.caller, make_request()), Disconnected)
    assert asyncio.all_tasks() == tasks
