"""The contract of the request plane, in process and over NATS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
import pytest

from dynamo_trtllm.cluster.request_plane.subjects import load_subject
from dynamo_trtllm.protocol.errors import (
    DeadlineExceeded,
    Draining,
    DynamoError,
    EngineFailed,
    InternalError,
    NoListener,
    PayloadTooLarge,
    RequestRejected,
    StreamIncomplete,
    TransferExpired,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    GetFile,
    LoadReport,
    PhaseTimings,
    ReleaseKv,
    ReleaseOutcome,
    encode,
    token_ids,
)
from tests.kit.generator_streams import call_stream
from tests.kit.request_planes import (
    LIMITS,
    SUBJECT,
    PlanePair,
    ScriptedService,
    check_fails,
    collect,
    count_up,
    make_request,
    one_then_wait,
    until,
    wait_for_ever,
)
from tests.kit.waiting import SOON_S


async def test_generate_when_worker_streams_then_chunks_come_in_order(bench: PlanePair) -> None:
    await bench.worker.serve(SUBJECT, ScriptedService(count_up))
    chunks = await collect(bench.caller, make_request(max_tokens=50))
    assert [t for chunk in chunks for t in chunk.token_ids] == list(range(50))
    assert [chunk.finish_reason for chunk in chunks] == [None] * 49 + [FinishReason.LENGTH]
    assert chunks[-1].stats == PhaseTimings(queue_s=0.5)


async def test_load_reports_are_few_and_one_follows_the_end(bench: PlanePair) -> None:
    service = ScriptedService(count_up)
    got = list[LoadReport]()

    def load() -> LoadReport:
        return LoadReport(7, 1, service.open, 0, 0, 0, 0, 0)

    await bench.worker.serve(SUBJECT, service, load)
    await collect(bench.caller, make_request(max_tokens=50))  # unwatched
    unsubscribe = await bench.caller.client.watch_loads("ns", got.append)
    assert len(await collect(bench.caller, make_request(max_tokens=50))) == 50
    await until(lambda: bool(got) and not got[-1].running)
    assert len(got) < 25
    count = len(got)
    assert bench.worker.try_publish(load_subject("ns"), b"not a report")
    assert bench.worker.try_publish(load_subject("ns"), encode(LoadReport(8, 1, 0, 0, 0, 0, 0, 0)))
    await until(lambda: got[-1].instance_id == 8)
    assert len(got) <= count + 2
    await unsubscribe()


async def test_unreadable_load_does_not_stop_streams(
    bench: PlanePair, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> LoadReport:
        raise RuntimeError("planted")

    got: list[LoadReport] = []
    await bench.worker.serve(SUBJECT, ScriptedService(count_up), load)
    unsubscribe = await bench.caller.client.watch_loads("ns", got.append)
    assert len(await collect(bench.caller, make_request(max_tokens=50))) == 50
    assert not got
    assert "load" in caplog.text
    await unsubscribe()


async def test_generate_when_request_is_large_then_it_arrives_whole(bench: PlanePair) -> None:
    seen: list[GenerateRequest] = []

    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        seen.append(request)
        yield Chunk(finish_reason=FinishReason.STOP)

    await bench.worker.serve(SUBJECT, ScriptedService(script))
    request = make_request(prompt=131_072)
    await collect(bench.caller, request)
    (arrived,) = seen
    assert arrived.deadline == pytest.approx(request.deadline, abs=SOON_S)  # by the worker's clock
    assert msgspec.structs.replace(arrived, deadline=request.deadline) == request


async def test_generate_when_request_is_too_large_then_payload_error(bench: PlanePair) -> None:
    await bench.worker.serve(SUBJECT, ScriptedService(count_up))
    await check_fails(collect(bench.caller, make_request(prompt=300_000)), PayloadTooLarge)
    assert len(await collect(bench.caller, make_request())) == 5  # the connection lives on


async def test_generate_when_chunk_is_too_large_then_payload_error(bench: PlanePair) -> None:
    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk(token_ids=token_ids(range(300_000)))
        await asyncio.Event().wait()

    service = ScriptedService(script)
    await bench.worker.serve(SUBJECT, service)
    await check_fails(collect(bench.caller, make_request()), PayloadTooLarge)
    await asyncio.wait_for(service.closed.wait(), SOON_S)


async def test_generate_without_terminal_chunk_is_incomplete(bench: PlanePair) -> None:
    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk(token_ids=token_ids([1]))

    await bench.worker.serve(SUBJECT, ScriptedService(script))
    await check_fails(collect(bench.caller, make_request()), StreamIncomplete)


@pytest.mark.parametrize("after", [0, 2])
async def test_generate_raises_worker_error_class_after_chunks(
    bench: PlanePair, after: int
) -> None:
    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        for n in range(after):
            yield Chunk(token_ids=token_ids([n]))
        raise RequestRejected("no such thing", field="sampling.top_k")

    await bench.worker.serve(SUBJECT, ScriptedService(script))
    got: list[Chunk] = []

    async def read() -> None:
        async with aclosing(call_stream(bench.caller, SUBJECT, make_request())) as chunks:
            async for chunk in chunks:
                got.append(chunk)  # noqa: PERF401

    error = await check_fails(read(), RequestRejected)
    assert (error.message, error.field) == ("no such thing", "sampling.top_k")
    assert len(got) == after


async def test_generate_when_service_raises_then_internal_and_logged(
    bench: PlanePair, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk(token_ids=token_ids([1]))
        raise RuntimeError("boom")

    await bench.worker.serve(SUBJECT, ScriptedService(script))
    await check_fails(collect(bench.caller, make_request()), InternalError)
    assert sum("boom" in (r.exc_text or "") for r in caplog.records) == 1


async def test_cancel_midstream_closes_the_service_stream(bench: PlanePair) -> None:
    service = ScriptedService(one_then_wait)
    await bench.worker.serve(SUBJECT, service)
    async with aclosing(call_stream(bench.caller, SUBJECT, make_request())) as chunks:
        async for _ in chunks:
            break
    await asyncio.wait_for(service.closed.wait(), SOON_S)
    assert service.open == 0


async def test_cancel_before_first_chunk_closes_the_service_stream(bench: PlanePair) -> None:
    service = ScriptedService(wait_for_ever)
    await bench.worker.serve(SUBJECT, service)
    reader = asyncio.create_task(collect(bench.caller, make_request()))
    await asyncio.wait_for(service.started.wait(), SOON_S)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await asyncio.wait_for(service.closed.wait(), SOON_S)


async def test_cancel_when_before_the_ack_then_no_stream_stays_open(bench: PlanePair) -> None:
    service = ScriptedService(wait_for_ever)
    await bench.worker.serve(SUBJECT, service)
    for turns in range(8):
        reader = asyncio.create_task(collect(bench.caller, make_request()))
        for _ in range(turns):
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    service.script = count_up
    await collect(bench.caller, make_request())  # comes after all cancels, in order
    assert service.open == 0


async def test_generate_when_300_streams_run_then_all_complete(bench: PlanePair) -> None:
    await bench.worker.serve(SUBJECT, ScriptedService(count_up))
    requests = [make_request(name=f"r{n}", max_tokens=50) for n in range(300)]
    streams = await asyncio.gather(*(collect(bench.caller, request) for request in requests))
    assert [[t for c in chunks for t in c.token_ids] for chunks in streams] == [
        list(range(50))
    ] * 300


async def test_deadline_when_it_passes_then_both_sides_end(bench: PlanePair) -> None:
    service = ScriptedService(one_then_wait)
    await bench.worker.serve(SUBJECT, service)
    async with asyncio.timeout(SOON_S):
        # one whose deadline passed before the worker took it says nothing
        while not service.started.is_set():
            error = await check_fails(
                collect(bench.caller, make_request(seconds=0.3)), DeadlineExceeded
            )
    assert "timeout" in error.message  # it says what a client can change
    await asyncio.wait_for(service.closed.wait(), SOON_S)


async def test_deadline_when_already_past_then_service_is_not_called(bench: PlanePair) -> None:
    service = ScriptedService(count_up)
    await bench.worker.serve(SUBJECT, service)
    await check_fails(collect(bench.caller, make_request(seconds=-1)), DeadlineExceeded)
    assert not service.started.is_set()


async def test_generate_without_server_is_unreachable_at_once(bench: PlanePair) -> None:
    started = time.monotonic()
    await check_fails(collect(bench.caller, make_request(), "ns_x.generate-1"), NoListener)
    assert time.monotonic() - started < LIMITS.ack_timeout_s  # it was not waited for


async def test_stop_accepting_keeps_streams_and_verbs_running(bench: PlanePair) -> None:
    go = asyncio.Event()

    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk(token_ids=token_ids([1]))
        await go.wait()
        yield Chunk(finish_reason=FinishReason.STOP)

    service = ScriptedService(script)
    serving = await bench.worker.serve(SUBJECT, service)
    running = asyncio.create_task(collect(bench.caller, make_request()))
    await asyncio.wait_for(service.started.wait(), SOON_S)
    serving.is_accepting = False
    await check_fails(collect(bench.caller, make_request()), Draining)
    assert len(await bench.caller.client.control(SUBJECT, GetFile("a"))) == 1000
    go.set()
    assert len(await running) == 2


@pytest.mark.parametrize(("failure", "expected"), [("", Draining), ("a bug", EngineFailed)])
async def test_aclose_ends_running_streams(
    bench: PlanePair, failure: str, expected: type[DynamoError]
) -> None:
    service = ScriptedService(one_then_wait)
    serving = await bench.worker.serve(SUBJECT, service)
    serving.failure = failure
    running = asyncio.create_task(collect(bench.caller, make_request()))
    await asyncio.wait_for(service.started.wait(), SOON_S)
    await serving.aclose()
    await serving.aclose()
    assert service.open == 0
    await check_fails(running, expected)
    await check_fails(collect(bench.caller, make_request()), NoListener)


async def test_control_returns_bytes_or_the_same_error(bench: PlanePair) -> None:
    service = ScriptedService(count_up)
    await bench.worker.serve(SUBJECT, service)
    assert await bench.caller.client.control(SUBJECT, GetFile("abc", 5)) == b"x" * 1000
    error = await check_fails(
        bench.caller.client.control(SUBJECT, ReleaseKv("t", ReleaseOutcome.FETCHED)),
        TransferExpired,
    )
    assert error.field == "transfer_id"
    assert service.verbs == [GetFile("abc", 5), ReleaseKv("t", ReleaseOutcome.FETCHED)]
    await check_fails(bench.caller.client.control(SUBJECT, GetFile("boom")), InternalError)
    await check_fails(bench.caller.client.control(SUBJECT, GetFile("huge")), PayloadTooLarge)
    await check_fails(bench.caller.client.control("ns_x.generate-1", GetFile("abc")), NoListener)


async def test_ping_when_both_sides_live_then_a_quiet_stream_goes_on(bench: PlanePair) -> None:
    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        await asyncio.sleep(LIMITS.ping_interval_s * 3)
        yield Chunk(finish_reason=FinishReason.STOP)

    await bench.worker.serve(SUBJECT, ScriptedService(script))
    assert len(await collect(bench.caller, make_request())) == 1
