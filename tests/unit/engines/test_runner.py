"""The runner of library engines: chunks, times, counters and errors."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from dynamo_trtllm.engines.external.engine import ExternalEngine
from dynamo_trtllm.engines.external.runner import MAX_FAILED_REQUESTS
from dynamo_trtllm.protocol.errors import (
    DeadlineExceeded,
    DynamoError,
    EngineFailed,
    MigrationFailed,
    RequestRejected,
    TransferFailed,
    TransferMismatch,
    TransferTimeout,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    Phase,
    ReleaseOutcome,
    TokenLogprob,
)
from dynamo_trtllm.protocol.streams import StreamEvent
from tests.kit.scripted_library import (
    STOP_ID,
    Call,
    ask,
    event,
    make,
    some_transfer_params,
    started,
)
from tests.kit.waiting import SOON_S

# --- chunks ---------------------------------------------------------------------------------------


async def test_results_become_chunks_with_times_at_the_end() -> None:
    runner, _ = make()
    _, events, call = await started(runner, ask())
    assert runner.stats().running == 0  # the library says that 9 wait, so this one does
    call.say(1, 2)
    assert runner.stats().context_tokens == len(ask().token_ids) + 2
    call.say()
    call.say(3, finish="length")
    first, last = events
    assert isinstance(first, Chunk)
    assert isinstance(last, Chunk)
    assert (list(first.token_ids), first.finish_reason) == ([1, 2], None)
    assert first.stats is not None
    assert first.logprobs == (TokenLogprob(1, -1.0), TokenLogprob(2, -1.0))
    assert (list(last.token_ids), last.finish_reason) == ([3], FinishReason.LENGTH)
    assert last.stats is not None
    assert last.stats.cached_tokens == 3
    assert last.stats.prefill_s == first.stats.prefill_s > 0
    assert call.aborts == 0
    await asyncio.wait_for(runner.drain(), SOON_S)


@pytest.mark.parametrize("finish", ["length", "not_finished"])
async def test_prefill_for_decode_has_a_pending_transfer(finish: str) -> None:
    runner, _ = make()
    stream, events, call = await started(runner, ask(Phase.PREFILL))
    call.say(7, finish=finish)
    (chunk,) = events
    assert isinstance(chunk, Chunk)
    assert chunk.finish_reason is FinishReason.KV_TRANSFER
    assert chunk.kv_params is not None
    assert chunk.stats is not None
    assert (chunk.stats.kv_bytes, chunk.stats.transport) == (chunk.kv_params.kv_bytes, "a/b")
    stats = runner.stats()
    assert (stats.pending_kv_transfers, stats.pending_kv_blocks, stats.kv_blocks_used) == (1, 2, 5)
    assert stream.holds_kv
    runner.release(chunk.kv_params.transfer_id, ReleaseOutcome.FETCHED)
    assert not stream.holds_kv
    assert call.releases == []
    assert runner.stats().kv_blocks_used == 0
    await asyncio.wait_for(runner.drain(), SOON_S)


async def test_prefill_kv_is_freed_at_cancel_or_expiry() -> None:
    runner, _ = make()
    stream, _, call = await started(runner, ask(Phase.PREFILL))
    call.say(7, finish="length")
    stream.cancel()
    stream.cancel()
    assert call.releases == [False]
    runner, _ = make(ttl_s=0.01)
    _, _, call = await started(runner, ask(Phase.PREFILL))
    call.say(7, finish="length")
    await asyncio.wait_for(runner.drain(), SOON_S)
    assert call.releases == [True]


@pytest.mark.parametrize("finish", ["stop", "length"])
async def test_prefill_ended_by_first_token_holds_no_kv(finish: str) -> None:
    runner, _ = make()
    _, events, call = await started(runner, ask(Phase.PREFILL))
    call.say(STOP_ID, finish=finish)
    (chunk,) = events
    assert isinstance(chunk, Chunk)
    assert (chunk.finish_reason, chunk.kv_params, call.releases) == (
        FinishReason.STOP,
        None,
        [False],
    )
    await asyncio.wait_for(runner.drain(), SOON_S)


async def test_decode_last_chunk_has_transfer_times() -> None:
    runner, _ = make()
    kv_params = await some_transfer_params()
    _, events, call = await started(runner, ask(Phase.DECODE, kv_params=kv_params))
    call.say(7, finish="stop")
    (chunk,) = events
    assert isinstance(chunk, Chunk)
    assert chunk.stats is not None
    assert (chunk.stats.prefill_s, chunk.stats.kv_bytes, chunk.stats.transport) == (
        0.0,
        kv_params.kv_bytes,
        "a/b",
    )
    assert chunk.stats.kv_transfer_s > 0


# --- errors ---------------------------------------------------------------------------------------


async def test_request_when_rejected_then_one_error_and_nothing_runs() -> None:
    runner, _ = make()
    for request, kind in [
        (ask(max_tokens=13), RequestRejected),
        (ask(Phase.DECODE), RequestRejected),
        (
            ask(
                Phase.DECODE,
                kv_params=msgspec.structs.replace(await some_transfer_params(), model="n"),
            ),
            TransferMismatch,
        ),
    ]:
        events: list[StreamEvent] = []
        runner.generate(request, events.append)
        assert isinstance(await event(events), kind)
        await asyncio.wait_for(runner.drain(), SOON_S)


@pytest.mark.parametrize(
    ("phase", "finish", "kind"),
    [
        (Phase.AGGREGATED, "error", MigrationFailed),
        (Phase.AGGREGATED, "timeout", DeadlineExceeded),
        (Phase.AGGREGATED, "not_finished", MigrationFailed),
        (Phase.DECODE, "error", TransferFailed),
        (Phase.DECODE, "timeout", TransferTimeout),
    ],
)
async def test_result_ended_by_the_library_says_whose_fault(
    phase: Phase, finish: str, kind: type[DynamoError]
) -> None:
    runner, _ = make()
    kv_params = await some_transfer_params() if phase is Phase.DECODE else None
    _, events, call = await started(runner, ask(phase, kv_params=kv_params))
    call.say(finish=finish)
    (error,) = events
    assert type(error) is kind
    assert call.aborts == 0
    _, events, call = await started(runner, ask(phase, kv_params=kv_params))
    call.say(1, finish="error")
    assert type(events[-1]) is MigrationFailed  # its KV had come


async def test_unconvertible_result_aborts_the_call() -> None:
    runner, _ = make()
    for error, code in [
        (RequestRejected("no log-probability"), "engine_rejected"),
        (KeyError("a bug"), "internal"),
    ]:
        _, events, call = await started(runner, ask())
        call.say(1, error=error)
        (found,) = events
        assert isinstance(found, DynamoError)
        assert (found.code, call.aborts, runner.stats().waiting) == (code, 1, 1)
        call.say(finish="abort")
        assert len(events) == 1
        await asyncio.wait_for(runner.drain(), SOON_S)


async def test_result_with_failing_receiver_ends_only_its_stream() -> None:
    runner, library = make()
    good, events, call = await started(runner, ask())

    def fail(event: StreamEvent) -> None:
        raise KeyError("a bug of the receiver")

    bad = runner.generate(ask(), fail)
    await asyncio.sleep(0)
    library.calls[-1].say(1)
    assert (bad.has_ended, library.calls[-1].aborts) == (True, 1)
    runner.generate(ask(), fail)
    await asyncio.sleep(0)
    call.say(1)
    assert (good.has_ended, len(events)) == (False, 1)
    await runner.aclose()
    assert isinstance(events[-1], EngineFailed)
    assert library.is_closed


async def test_error_after_end_of_stream_spares_others() -> None:
    runner, library = make()
    _, events, _ = await started(runner, ask())
    for reason in ("", "the executor shut down"):
        stream, _, call = await started(runner, ask())
        stream.cancel()
        library.reason = reason
        call.receiver.on_error(EngineFailed("after the abort"))
        assert bool(events) is bool(reason)


async def fail_one(runner: ExternalEngine, request_id: str) -> tuple[list[StreamEvent], Call]:
    _, events, call = await started(runner, msgspec.structs.replace(ask(), request_id=request_id))
    call.receiver.on_error(EngineFailed(f"no result for {request_id}"))
    return events, call


async def test_error_of_healthy_library_ends_only_its_request() -> None:
    runner, _ = make()
    _, others, other = await started(runner, ask())
    # the same request, as a client or a frontend tries it again
    for _ in range(2 * MAX_FAILED_REQUESTS):
        events, call = await fail_one(runner, "poison")
        assert [type(event) for event in events] == [EngineFailed]
        assert call.aborts == 1
    await runner.check()
    assert others == []
    other.say(1, finish="length")
    await asyncio.wait_for(runner.drain(), SOON_S)


async def test_errors_of_all_choices_count_as_one_request() -> None:
    runner, _ = make()
    for choice in range(2 * MAX_FAILED_REQUESTS):
        await fail_one(runner, f"client-5-00112233aabbccdd-{choice}")
    await runner.check()


async def test_errors_of_consecutive_requests_fail_the_engine() -> None:
    runner, _ = make()
    _, others, other = await started(runner, ask())
    for number in range(MAX_FAILED_REQUESTS - 1):
        await fail_one(runner, f"a{number}")
    other.say(1)
    for number in range(MAX_FAILED_REQUESTS - 1):
        await fail_one(runner, f"b{number}")
    await runner.check()
    await fail_one(runner, "last")
    with pytest.raises(EngineFailed, match="no result for last"):
        await runner.check()
    assert isinstance(others[-1], EngineFailed)


async def test_cancelled_task_ends_its_stream_with_an_error() -> None:
    runner, _ = make()
    events: list[StreamEvent] = []
    runner.generate(ask(), events.append)
    for task in runner.calls.tasks:
        task.cancel()  # before it began
    assert isinstance(await event(events), EngineFailed)
    await asyncio.wait_for(runner.drain(), SOON_S)


async def test_failure_ends_all_calls_with_the_first_reason() -> None:
    runner, library = make()
    streams = [await started(runner, ask()) for _ in range(3)]
    library.reason = "its process is gone"
    streams[1][2].receiver.on_error(EngineFailed("the process died"))
    streams[2][2].receiver.on_error(EngineFailed("another word for it"))
    for _, events, call in streams:
        (error,) = events
        assert isinstance(error, EngineFailed)
        assert error.message == "the process died"
        call.say(1, finish="length")  # after the end
        assert len(events) == 1
    with pytest.raises(EngineFailed, match="the process died"):
        await runner.check()
    late: list[StreamEvent] = []
    runner.generate(ask(), late.append)
    assert isinstance(await event(late), EngineFailed)
    await runner.aclose()
    await runner.aclose()
    assert library.is_closed
    await asyncio.wait_for(runner.drain(), SOON_S)


async def test_check_with_library_failure_ends_streams() -> None:
    runner, library = make()
    await runner.check()
    assert library.waiting_since is None
    stream, events, _ = await started(runner, ask())
    await runner.check()
    assert library.waiting_since is not None
    assert library.waiting_since >= stream.created_at
    library.reason = "no iteration"
    with pytest.raises(EngineFailed, match="no iteration"):
        await runner.check()
    assert isinstance(events[0], EngineFailed)
