"""The runner of library engines: cancels and deadlines in each state of a call."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from dynamo_trtllm.engines.external import runner as runner_module
from dynamo_trtllm.protocol.errors import (
    DeadlineExceeded,
    MigrationFailed,
    TransferTimeout,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    Phase,
)
from dynamo_trtllm.protocol.streams import StreamEvent
from tests.kit.scripted_library import ask, event, make, some_transfer_params, started
from tests.kit.waiting import SOON_S


async def test_cancel_when_nothing_was_submitted_then_the_library_is_not_called() -> None:
    runner, library = make()
    runner.generate(ask(), lambda event: None).cancel()
    await asyncio.wait_for(runner.drain(), SOON_S)
    await asyncio.sleep(0)
    assert library.calls == []


async def test_cancel_when_it_runs_then_aborted_and_counted_until_its_last_result() -> None:
    runner, _ = make()
    stream, events, call = await started(runner, ask())
    call.say(1)
    stream.cancel()
    stream.cancel()
    assert (call.aborts, runner.stats().waiting) == (1, 1)
    call.say(2)
    call.say(finish="abort")
    assert len(events) == 1
    await asyncio.wait_for(runner.drain(), SOON_S)


async def test_cancel_when_prefill_finishes_at_the_same_time_then_its_kv_is_freed() -> None:
    runner, _ = make()
    stream, events, call = await started(runner, ask(Phase.PREFILL))
    stream.cancel()
    call.say(7, finish="length")
    assert (events, call.releases) == ([], [False])
    await asyncio.wait_for(runner.drain(), SOON_S)


async def test_cancel_when_a_fetch_runs_that_can_not_be_aborted_then_the_abort_waits_for_the_first_result() -> (
    None
):
    runner, _ = make(can_abort_fetch=False)
    stream, _, call = await started(
        runner, ask(Phase.DECODE, kv_params=await some_transfer_params())
    )
    stream.cancel()
    assert call.aborts == 0
    call.say(7)
    assert call.aborts == 1
    call.say(8)
    assert call.aborts == 1
    call.say(finish="abort")
    await asyncio.wait_for(runner.drain(), SOON_S)


async def test_cancel_when_only_a_fetch_frees_the_kv_then_it_is_submitted_for_one_token_and_aborted_later() -> (
    None
):
    runner, library = make(can_abort_fetch=False, keeps_unfetched_kv=True)
    events: list[StreamEvent] = []
    runner.generate(
        ask(Phase.DECODE, kv_params=await some_transfer_params()), events.append
    ).cancel()
    assert library.calls == []
    await asyncio.sleep(0)
    (call,) = library.calls
    assert (call.request.sampling.max_tokens, call.aborts) == (2, 0)  # prefill has generated one
    call.say(7)
    assert call.aborts == 1
    call.say(finish="abort")
    await asyncio.wait_for(runner.drain(), SOON_S)
    assert events == []


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.AGGREGATED])
async def test_cancel_when_a_call_fetches_nothing_then_it_is_not_submitted_whatever_frees_kv(
    phase: Phase,
) -> None:
    runner, library = make(can_abort_fetch=False, keeps_unfetched_kv=True)
    runner.generate(ask(phase), lambda event: None).cancel()
    await asyncio.wait_for(runner.drain(), SOON_S)
    await asyncio.sleep(0)
    assert library.calls == []


async def test_cancel_when_the_call_for_the_fetch_is_rejected_then_drain_still_returns() -> None:
    runner, library = make(can_abort_fetch=False, keeps_unfetched_kv=True)
    kv_params = msgspec.structs.replace(await some_transfer_params(), expires_at=0.0)
    runner.generate(ask(Phase.DECODE, kv_params=kv_params), lambda event: None).cancel()
    await asyncio.wait_for(runner.drain(), SOON_S)
    assert library.calls == []


async def test_stop_when_prefill_finishes_at_the_same_time_then_its_kv_is_still_offered() -> None:
    runner, _ = make(keeps_unfetched_kv=True)
    stream, events, call = await started(runner, ask(Phase.PREFILL))
    assert stream.stop()
    assert call.aborts == 1
    call.say(7, finish="length")
    (chunk,) = events
    assert isinstance(chunk, Chunk)
    assert chunk.kv_params is not None
    assert (call.releases, runner.stats().pending_kv_transfers) == ([], 1)
    stream.cancel()
    assert runner.stats().pending_kv_transfers == 0


async def test_stop_when_prefill_was_aborted_in_time_then_the_stream_ends_with_an_error() -> None:
    runner, _ = make(keeps_unfetched_kv=True)
    stream, events, call = await started(runner, ask(Phase.PREFILL))
    assert stream.stop()
    call.say(finish="cancelled")
    assert [type(event) for event in events] == [MigrationFailed]
    assert not stream.stop()
    await asyncio.wait_for(runner.drain(), SOON_S)


async def test_stop_when_it_is_cancelled_after_it_then_it_is_aborted_once() -> None:
    runner, _ = make(keeps_unfetched_kv=True)
    stream, events, call = await started(runner, ask(Phase.PREFILL))
    assert stream.stop()
    stream.cancel()
    call.say(7, finish="length")
    assert (call.aborts, events, call.releases) == (1, [], [False])


async def test_stop_when_it_is_never_confirmed_then_the_stream_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "ANSWER_S", 0.01)
    runner, _ = make(keeps_unfetched_kv=True)
    stream, events, _ = await started(runner, ask(Phase.PREFILL))
    assert stream.stop()
    assert isinstance(await event(events), MigrationFailed)
    await asyncio.wait_for(runner.drain(), SOON_S)


@pytest.mark.parametrize(
    ("phase", "keeps"), [(Phase.PREFILL, False), (Phase.AGGREGATED, True), (Phase.DECODE, True)]
)
async def test_stop_when_a_cancel_leaves_no_kv_then_it_does_nothing(
    phase: Phase, keeps: bool
) -> None:
    runner, _ = make(keeps_unfetched_kv=keeps)
    kv_params = await some_transfer_params() if phase is Phase.DECODE else None
    stream, _, call = await started(runner, ask(phase, kv_params=kv_params))
    assert not stream.stop()
    assert call.aborts == 0


async def test_abort_when_it_is_never_confirmed_then_drain_still_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "KV_WAIT_S", 0.01)
    monkeypatch.setattr(runner_module, "ANSWER_S", 0.01)
    runner, _ = make(can_abort_fetch=False)
    for request in (ask(), ask(Phase.DECODE, kv_params=await some_transfer_params())):
        stream, _, call = await started(runner, request)
        stream.cancel()
        await asyncio.wait_for(runner.drain(), SOON_S)
        assert call.aborts == 1


async def test_deadline_when_it_passes_then_the_stream_ends_at_once_and_the_call_is_aborted() -> (
    None
):
    runner, _ = make()
    _, events, call = await started(runner, ask(within_s=0.02))
    call.say(1)
    events.clear()
    assert isinstance(await event(events), DeadlineExceeded)
    assert call.aborts == 1
    call.say(finish="abort")
    await asyncio.wait_for(runner.drain(), SOON_S)


async def test_deadline_when_the_kv_is_late_then_the_error_names_the_limit_and_after_it_only_the_requests_counts() -> (
    None
):
    runner, _ = make(kv_fetch_timeout_s=0.02)
    kv_params = await some_transfer_params()
    _, events, _ = await started(runner, ask(Phase.DECODE, kv_params=kv_params))
    error = await event(events)
    assert isinstance(error, TransferTimeout)
    assert error.message.endswith("--kv-fetch-timeout-s 0.02 passed; look there")
    _, events, call = await started(runner, ask(Phase.DECODE, kv_params=kv_params))
    call.say(7)
    await asyncio.sleep(0.05)
    call.say(8, finish="length")
    assert len(events) == 2


async def test_deadline_when_it_comes_before_the_kv_then_it_is_no_fault_of_the_transfer() -> None:
    runner, _ = make()
    _, events, _ = await started(
        runner, ask(Phase.DECODE, kv_params=await some_transfer_params(), within_s=0.02)
    )
    error = await event(events)
    assert isinstance(error, DeadlineExceeded)
    assert "did not finish before the request's deadline" in error.message
