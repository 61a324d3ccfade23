"""The request-plane contract, held by the in-process twin and by NATS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest

from dynamo_trtllm.errors import (
    DeadlineExceeded,
    Draining,
    DynamoError,
    EngineRefused,
    InternalError,
    Overloaded,
    PayloadTooLarge,
    StreamIncomplete,
    TicketExpired,
    Unreachable,
)
from dynamo_trtllm.messages import (
    Chunk,
    Control,
    FileRequest,
    FinishReason,
    GenerateRequest,
    LegStats,
    Release,
    ReleaseOutcome,
    Sampling,
    token_ids,
)
from dynamo_trtllm.plane.base import Plane
from dynamo_trtllm.plane.inproc import InprocPlane
from dynamo_trtllm.plane.linked import PlaneLimits
from dynamo_trtllm.plane.nats import NatsPlane
from tests.instances import make_ticket

LIMITS = PlaneLimits(ack_timeout_s=1.0, ping_interval_s=0.3, max_pending_tokens=2000)
SUBJECT = "ns_prefill.generate-1f"
Script = Callable[[GenerateRequest], AsyncGenerator[Chunk, None]]


class ScriptedService:
    """Runs a script per request and counts what is open."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.open = 0
        self.started = asyncio.Event()
        self.closed = asyncio.Event()
        self.verbs: list[Control] = []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.open += 1
        self.started.set()
        try:
            async with aclosing(self.script(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self.open -= 1
            self.closed.set()

    async def control(self, verb: Control) -> bytes:
        self.verbs.append(verb)
        if isinstance(verb, Release):
            raise TicketExpired("too late", field="ticket_id")
        if verb.sha256 == "boom":
            raise RuntimeError("boom")
        return b"x" * (2_000_000 if verb.sha256 == "huge" else 1000)


class Bench:
    """The worker's plane and the caller's plane, of one kind."""

    def __init__(self, worker: Plane, caller: Plane) -> None:
        self.worker = worker
        self.caller = caller


@pytest.fixture(params=["inproc", "nats"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    tasks_before = asyncio.all_tasks()
    if request.param == "inproc":
        worker: Plane = InprocPlane(LIMITS)
        planes = Bench(worker, worker)
    else:
        url = request.getfixturevalue("nats_server")
        planes = Bench(await NatsPlane.connect(url, LIMITS), await NatsPlane.connect(url, LIMITS))
    yield planes
    await planes.caller.aclose()
    await planes.worker.aclose()
    await asyncio.sleep(0.01)
    here = {asyncio.current_task()}
    assert {task.get_name() for task in asyncio.all_tasks() - tasks_before - here} == set()


def make_request(*, name: str = "r", prompt: int = 4, seconds: float = 10.0, max_tokens: int = 5) -> GenerateRequest:
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
    yield Chunk(token_ids=last, finish_reason=FinishReason.LENGTH, stats=LegStats(queue_s=0.5))


async def one_then_wait(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
    yield Chunk(token_ids=token_ids([7]))
    await asyncio.Event().wait()


async def wait_for_ever(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
    await asyncio.Event().wait()
    yield Chunk()


async def collect(plane: Plane, request: GenerateRequest, subject: str = SUBJECT) -> list[Chunk]:
    async with aclosing(plane.generate(subject, request)) as chunks:
        return [chunk async for chunk in chunks]


async def check_fails(call: Awaitable[object], error: type[DynamoError]) -> DynamoError:
    with pytest.raises(error) as caught:
        await call
    assert type(caught.value) is error
    assert caught.value.code == error.code
    return caught.value


async def test_generate_when_worker_streams_then_chunks_come_in_order(bench: Bench) -> None:
    await bench.worker.serve(SUBJECT, ScriptedService(count_up))
    chunks = await collect(bench.caller, make_request(max_tokens=50))
    assert [t for chunk in chunks for t in chunk.token_ids] == list(range(50))
    assert [chunk.finish_reason for chunk in chunks] == [None] * 49 + [FinishReason.LENGTH]
    assert chunks[-1].stats == LegStats(queue_s=0.5)


async def test_generate_when_request_is_large_then_it_arrives_whole(bench: Bench) -> None:
    seen: list[GenerateRequest] = []

    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        seen.append(request)
        yield Chunk(finish_reason=FinishReason.STOP)

    await bench.worker.serve(SUBJECT, ScriptedService(script))
    request = make_request(prompt=131_072)
    await collect(bench.caller, request)
    assert seen == [request]


async def test_generate_when_request_exceeds_the_plane_then_payload_too_large(bench: Bench) -> None:
    await bench.worker.serve(SUBJECT, ScriptedService(count_up))
    await check_fails(collect(bench.caller, make_request(prompt=300_000)), PayloadTooLarge)
    assert len(await collect(bench.caller, make_request())) == 5  # the connection lives on


async def test_generate_when_a_chunk_exceeds_the_plane_then_payload_too_large(bench: Bench) -> None:
    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk(token_ids=token_ids(range(300_000)))
        await asyncio.Event().wait()

    service = ScriptedService(script)
    await bench.worker.serve(SUBJECT, service)
    await check_fails(collect(bench.caller, make_request()), PayloadTooLarge)
    await asyncio.wait_for(service.closed.wait(), 1)


async def test_generate_when_stream_ends_without_terminal_chunk_then_incomplete(bench: Bench) -> None:
    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk(token_ids=token_ids([1]))

    await bench.worker.serve(SUBJECT, ScriptedService(script))
    await check_fails(collect(bench.caller, make_request()), StreamIncomplete)


@pytest.mark.parametrize("after", [0, 2])
async def test_generate_when_worker_fails_then_same_class_after_the_chunks(bench: Bench, after: int) -> None:
    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        for n in range(after):
            yield Chunk(token_ids=token_ids([n]))
        raise EngineRefused("no such thing", field="sampling.top_k")

    await bench.worker.serve(SUBJECT, ScriptedService(script))
    got: list[Chunk] = []

    async def read() -> None:
        async with aclosing(bench.caller.generate(SUBJECT, make_request())) as chunks:
            async for chunk in chunks:
                got.append(chunk)  # noqa: PERF401

    error = await check_fails(read(), EngineRefused)
    assert (error.message, error.field) == ("no such thing", "sampling.top_k")
    assert len(got) == after


async def test_generate_when_service_raises_unexpectedly_then_internal_and_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk(token_ids=token_ids([1]))
        raise RuntimeError("boom")

    await bench.worker.serve(SUBJECT, ScriptedService(script))
    await check_fails(collect(bench.caller, make_request()), InternalError)
    assert sum("boom" in (r.exc_text or "") for r in caplog.records) == 1


async def test_cancel_when_caller_closes_midstream_then_service_stream_closes(bench: Bench) -> None:
    service = ScriptedService(one_then_wait)
    await bench.worker.serve(SUBJECT, service)
    async with aclosing(bench.caller.generate(SUBJECT, make_request())) as chunks:
        async for _ in chunks:
            break
    await asyncio.wait_for(service.closed.wait(), 1)
    assert service.open == 0


async def test_cancel_when_before_first_chunk_then_service_stream_closes(bench: Bench) -> None:
    service = ScriptedService(wait_for_ever)
    await bench.worker.serve(SUBJECT, service)
    reader = asyncio.create_task(collect(bench.caller, make_request()))
    await asyncio.wait_for(service.started.wait(), 1)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await asyncio.wait_for(service.closed.wait(), 1)


async def test_cancel_when_before_the_ack_then_no_stream_stays_open(bench: Bench) -> None:
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


async def test_generate_when_300_streams_run_then_all_complete(bench: Bench) -> None:
    await bench.worker.serve(SUBJECT, ScriptedService(count_up))
    requests = [make_request(name=f"r{n}", max_tokens=50) for n in range(300)]
    streams = await asyncio.gather(*(collect(bench.caller, request) for request in requests))
    assert [[t for c in chunks for t in c.token_ids] for chunks in streams] == [list(range(50))] * 300


async def test_deadline_when_it_passes_then_both_sides_end(bench: Bench) -> None:
    service = ScriptedService(one_then_wait)
    await bench.worker.serve(SUBJECT, service)
    started = time.monotonic()
    await check_fails(collect(bench.caller, make_request(seconds=0.3)), DeadlineExceeded)
    assert time.monotonic() - started < 1
    await asyncio.wait_for(service.closed.wait(), 1)


async def test_deadline_when_already_past_then_service_is_not_called(bench: Bench) -> None:
    service = ScriptedService(count_up)
    await bench.worker.serve(SUBJECT, service)
    await check_fails(collect(bench.caller, make_request(seconds=-1)), DeadlineExceeded)
    assert not service.started.is_set()


async def test_generate_when_nobody_serves_then_unreachable_at_once(bench: Bench) -> None:
    started = time.monotonic()
    await check_fails(collect(bench.caller, make_request(), "ns_x.generate-1"), Unreachable)
    assert time.monotonic() - started < 0.5


async def test_stop_accepting_when_called_then_running_streams_and_verbs_go_on(bench: Bench) -> None:
    go = asyncio.Event()

    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk(token_ids=token_ids([1]))
        await go.wait()
        yield Chunk(finish_reason=FinishReason.STOP)

    service = ScriptedService(script)
    serving = await bench.worker.serve(SUBJECT, service)
    running = asyncio.create_task(collect(bench.caller, make_request()))
    await asyncio.wait_for(service.started.wait(), 1)
    await serving.stop_accepting()
    await check_fails(collect(bench.caller, make_request()), Draining)
    assert len(await bench.caller.control(SUBJECT, FileRequest("a"))) == 1000
    go.set()
    assert len(await running) == 2


async def test_aclose_of_serving_when_streams_run_then_draining_and_gone(bench: Bench) -> None:
    service = ScriptedService(one_then_wait)
    serving = await bench.worker.serve(SUBJECT, service)
    running = asyncio.create_task(collect(bench.caller, make_request()))
    await asyncio.wait_for(service.started.wait(), 1)
    await serving.aclose()
    await serving.aclose()
    assert service.open == 0
    await check_fails(running, Draining)
    await check_fails(collect(bench.caller, make_request()), Unreachable)


async def test_control_when_verb_answers_or_fails_then_bytes_or_same_error(bench: Bench) -> None:
    service = ScriptedService(count_up)
    await bench.worker.serve(SUBJECT, service)
    assert await bench.caller.control(SUBJECT, FileRequest("abc", 5)) == b"x" * 1000
    error = await check_fails(bench.caller.control(SUBJECT, Release("t", ReleaseOutcome.REDEEMED)), TicketExpired)
    assert error.field == "ticket_id"
    assert service.verbs == [FileRequest("abc", 5), Release("t", ReleaseOutcome.REDEEMED)]
    await check_fails(bench.caller.control(SUBJECT, FileRequest("boom")), InternalError)
    await check_fails(bench.caller.control(SUBJECT, FileRequest("huge")), PayloadTooLarge)
    await check_fails(bench.caller.control("ns_x.generate-1", FileRequest("abc")), Unreachable)


async def test_slow_reader_when_it_falls_behind_then_only_its_stream_ends(bench: Bench) -> None:
    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        size = 500 if request.request_id == "slow" else 1
        for _ in range(20):
            yield Chunk(token_ids=token_ids(range(size)))
            await asyncio.sleep(0)
        yield Chunk(finish_reason=FinishReason.STOP)

    await bench.worker.serve(SUBJECT, ScriptedService(script))
    async with aclosing(bench.caller.generate(SUBJECT, make_request(name="slow"))) as slow:
        assert len((await anext(slow)).token_ids) == 500
        assert len(await collect(bench.caller, make_request(name="fast"))) == 21
        kept: list[Chunk] = []

        async def read_on() -> None:
            async for chunk in slow:
                kept.append(chunk)  # noqa: PERF401

        await check_fails(read_on(), Overloaded)
        assert len(kept) < 19


async def test_ping_when_both_sides_live_then_a_quiet_stream_goes_on(bench: Bench) -> None:
    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        await asyncio.sleep(LIMITS.ping_interval_s * 3)
        yield Chunk(finish_reason=FinishReason.STOP)

    await bench.worker.serve(SUBJECT, ScriptedService(script))
    assert len(await collect(bench.caller, make_request())) == 1


# --- tickets -------------------------------------------------------------------------------------------


async def hand_over(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
    yield Chunk(finish_reason=FinishReason.HANDOFF, ticket=make_ticket("t1"))


async def test_close_when_a_ticket_is_on_its_way_then_the_worker_is_told_to_refuse_it(bench: Bench) -> None:
    async def hand_over_too_late(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        async for chunk in hand_over(request):
            yield chunk
        taking.cancel()  # the chunk is sent and not there yet

    service = ScriptedService(hand_over_too_late)
    await bench.worker.serve(SUBJECT, service)
    taking = asyncio.create_task(collect(bench.caller, make_request()))
    with pytest.raises(asyncio.CancelledError):
        await taking
    await until(lambda: service.verbs == [Release("t1", ReleaseOutcome.REFUSED)])


async def test_close_when_a_ticket_was_taken_then_it_is_the_callers_to_release(bench: Bench) -> None:
    service = ScriptedService(hand_over)
    await bench.worker.serve(SUBJECT, service)
    async with aclosing(bench.caller.generate(SUBJECT, make_request())) as chunks:
        assert (await anext(chunks)).ticket is not None
    await asyncio.sleep(0.7)  # two pings: the caller is there
    assert service.verbs == []
    with pytest.raises(TicketExpired):
        await bench.caller.control(SUBJECT, Release("t1", ReleaseOutcome.REDEEMED))
    assert len(service.verbs) == 1


async def test_finished_when_a_stream_runs_then_it_is_waited_for(bench: Bench) -> None:
    gate = asyncio.Event()

    async def gated(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        await gate.wait()
        yield Chunk(finish_reason=FinishReason.STOP)

    service = ScriptedService(gated)
    serving = await bench.worker.serve(SUBJECT, service)
    await asyncio.wait_for(serving.finished(), 1)
    asking = asyncio.create_task(collect(bench.caller, make_request()))
    await asyncio.wait_for(service.started.wait(), 2)
    assert serving.running == 1
    await serving.stop_accepting()
    finished = asyncio.create_task(serving.finished())
    await asyncio.sleep(0.05)
    assert not finished.done()
    gate.set()
    await asyncio.wait_for(finished, 2)
    assert (serving.running, len(await asking)) == (0, 1)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(2):
        while not condition():  # noqa: ASYNC110  # a list tells nobody when it grows
            await asyncio.sleep(0.01)
