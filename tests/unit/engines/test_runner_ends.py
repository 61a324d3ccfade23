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


async def test_cancel_before_submission_skips_the_library() -> None:
    runner, library = make()
    runner.generate(ask(), lambda event: None).cancel()
    await asyncio.wait_for(runner.drain(), SOON_S)
    await asyncio.sleep(0)
    assert library.calls == []


async def test_cancel_while_running_counts_until_the_last_result() -> None:
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


async def test_cancel_as_prefill_finishes_frees_its_kv() -> None:
    runner, _ = make()
    stream, events, call = await started(runner, ask(Phase.PREFILL))
    stream.cancel()
    call.say(7, finish="length")
    assert (events, call.releases) == ([], [False])
    await asyncio.wait_for(runner.drain(), SOON_S)


async def test_cancel_during_unabortable_fetch_delays_the_abort() -> None:
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


async def test_cancel_when_only_fetch_frees_kv_then_submits_one_token() -> None:
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
async def test_cancel_of_call_without_fetch_is_not_submitted(phase: Phase) -> None:
    runner, library = make(can_abort_fetch=False, keeps_unfetched_kv=True)
    runner.generate(ask(phase), lambda event: None).cancel()
    await asyncio.wait_for(runner.drain(), SOON_S)
    await asyncio.sleep(0)
    assert library.calls == []


async def test_cancel_with_rejected_fetch_call_still_drains() -> None:
    runner, library = make(can_abort_fetch=False, keeps_unfetched_kv=True)
    kv_params = msgspec.structs.replace(await some_transfer_params(), expires_at=0.0)
    runner.generate(ask(Phase.DECODE, kv_params=kv_params), lambda event: None).cancel()
    await asyncio.wait_for(runner.drain(), SOON_S)
    assert library.calls == []


async def test_stop_as_prefill_finishes_still_offers_kv() -> None:
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


async def test_stop_of_aborted_prefill_ends_with_an_error() -> None:
    runner, _ = make(keeps_unfetched_kv=True)
    stream, events, call = await started(runner, ask(Phase.PREFILL))
    assert stream.stop()
    call.say(finish="cancelled")
    assert [type(event) for event in events] == [MigrationFailed]
    assert not stream.stop()
    await asyncio.wait_for(runner.drain(), SOON_S)


async def test_stop_then_cancel_aborts_once() -> None:
    runner, _ = make(keeps_unfetched_kv=True)
    stream, events, call = await started(runner, ask(Phase.PREFILL))
    assert stream.stop()
    stream.cancel()
    call.say(7, finish="length")
    assert (call.aborts, events, call.releases) == (1, [], [False])


async def test_stop_never_confirmed_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_abort_never_confirmed_still_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "KV_WAIT_S", 0.01)
    monkeypatch.setattr(runner_module, "ANSWER_S", 0.01)
    runner, _ = make(can_abort_fetch=False)
    for request in (ask(), ask(Phase.DECODE, kv_params=await some_transfer_params())):
        stream, _, call = await started(runner, request)
        stream.cancel()
        await asyncio.wait_for(runner.drain(), SOON_S)
        assert call.aborts == 1


async def test_deadline_ends_stream_and_aborts_the_call() -> None:
    runner, _ = make()
    _, events, call = await started(runner, ask(within_s=0.02))
    call.say(1)
    events.clear()
    assert isinstance(await event(events), DeadlineExceeded)
    assert call.aborts == 1
    call.say(finish="abort")
    await asyncio.wait_for(runner.drain(), SOON_S)


async def test_deadline_of_late_kv_names_the_limit() -> None:
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


async def test_deadline_before_kv_is_no_transfer_fault() -> None:
    runner, _ = make()
    _, events, _ = await started(
        runner, ask(Phase.DECODE, kv_params=await some_transfer_params(), within_s=0.02)
    )
    error = await event(events)
    assert isinstance(error, DeadlineExceeded)
    assert "did not finish before the request's deadline" in error.message
