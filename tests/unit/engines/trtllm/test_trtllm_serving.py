"""Prefill and decode calls, their deadlines and aborts, over a scripted library."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_trtllm.engines.external.engine import ExternalEngine
from dynamo_trtllm.engines.trtllm.transfer_params import unpack
from dynamo_trtllm.protocol.errors import RequestRejected
from dynamo_trtllm.protocol.messages import Chunk, FinishReason, Phase, ReleaseOutcome, Role
from dynamo_trtllm.protocol.streams import StreamEvent, as_stream
from dynamo_trtllm.testing.engine_requests import check_stats
from tests.unit.engines.trtllm.fake_bindings import (
    PARAMS,
    Llm,
    ask,
    check_idle,
    make,
    some_transfer_params,
    started,
)

pytestmark = pytest.mark.usefixtures("quick")


async def test_cached_tokens_are_in_the_first_chunk() -> None:
    at, llm = make(Role.AGGREGATED)
    events: list[StreamEvent] = []
    handle = at.generate(ask(), events.append)
    await asyncio.sleep(0)
    result = llm.results[0]
    result.cached_tokens = 64
    result.say(7)
    while not events:  # noqa: ASYNC110
        await asyncio.sleep(0)
    handle.cancel()
    result.say(finish="cancelled")
    await check_idle(at)
    (first,) = events
    assert isinstance(first, Chunk)
    assert first.stats is not None
    assert first.stats.cached_tokens == 64


# --- ends of a prefill call -----------------------------------------------------------------------


@pytest.mark.parametrize(("finish", "held"), [("stop", 0), ("length", 1)])
async def test_prefill_stopped_at_first_token_holds_kv_until_timeout(
    finish: str, held: int
) -> None:
    at, llm = make(Role.PREFILL, kv_timeout_s=0.2)
    task, result = await started(at, llm, ask(Phase.PREFILL))
    result.say(99, finish=finish)
    (chunk,) = await task
    assert (list(chunk.token_ids), chunk.finish_reason, chunk.kv_params) == (
        [99],
        FinishReason.STOP,
        None,
    )
    assert (at.stats().pending_kv_transfers, at.stats().pending_kv_blocks, result.aborts) == (
        held,
        held,
        0,
    )
    await check_idle(at)
    assert at.stats().pending_kv_transfers == 0


async def test_prefill_cancelled_as_it_finishes_holds_kv() -> None:
    at, llm = make(Role.PREFILL, kv_timeout_s=0.2)
    task, result = await started(at, llm, ask(Phase.PREFILL))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert result.aborts == 1
    result.say(7, finish="length")
    await check_stats(at, running=0, pending_kv_transfers=1)
    await check_idle(at)
    assert at.stats().pending_kv_transfers == 0


@pytest.mark.parametrize("outcome", [ReleaseOutcome.ABORTED, None])
async def test_transfer_never_freed_by_vendor_is_leaked(outcome: ReleaseOutcome | None) -> None:
    at, llm = make(Role.PREFILL, ttl_s=0.05)
    task, result = await started(at, llm, ask(Phase.PREFILL))
    result.say(7, finish="length")
    (chunk,) = await task
    assert chunk.kv_params is not None
    assert at.stats().leaked_kv_blocks == 0
    if outcome is not None:  # else it expires
        at.release(chunk.kv_params.transfer_id, outcome)
    await check_idle(at)
    assert (at.stats().pending_kv_transfers, at.stats().leaked_kv_blocks, result.aborts) == (
        0,
        1,
        0,
    )


async def test_transfer_when_its_kv_was_fetched_then_nothing_is_held() -> None:
    at, llm = make(Role.PREFILL)
    task, result = await started(at, llm, ask(Phase.PREFILL))
    result.say(7, finish="length")
    (chunk,) = await task
    assert chunk.kv_params is not None
    at.release(chunk.kv_params.transfer_id, ReleaseOutcome.FETCHED)
    assert (at.stats().pending_kv_transfers, at.stats().leaked_kv_blocks) == (0, 0)


async def test_transfer_without_request_id_uses_that_of_the_call() -> None:
    at, llm = make(Role.PREFILL, "disagg_request_id")
    task, result = await started(at, llm, ask(Phase.PREFILL))
    result.say(7, finish="length")
    (chunk,) = await task
    assert chunk.kv_params is not None
    sent = llm.calls[0]["disaggregated_params"]["disagg_request_id"]
    received = unpack(
        chunk.kv_params, known={*PARAMS, "disagg_request_id"}, logprob=None, vocab_size=100
    )
    assert received["disagg_request_id"] == sent > 0


# --- decode ---------------------------------------------------------------------------------------


async def test_decode_cancelled_before_kv_delays_the_abort(
    decode: tuple[ExternalEngine, Llm],
) -> None:
    at, llm = decode
    task, result = await started(at, llm, ask(Phase.DECODE, kv_params=await some_transfer_params()))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)
    assert result.aborts == 0
    result.say(7)
    await asyncio.sleep(0.01)
    assert result.aborts == 1
    result.say(finish="cancelled")
    await check_idle(at)


async def test_decode_of_nothing_is_rejected_before_the_vendor(
    decode: tuple[ExternalEngine, Llm],
) -> None:
    at, llm = decode
    kv_params = await some_transfer_params()
    with pytest.raises(RequestRejected, match="nothing is left"):
        await anext(as_stream(at, ask(Phase.DECODE, kv_params=kv_params, max_tokens=1)))
    assert llm.results == []


async def test_abort_when_the_executor_is_gone_then_it_is_survived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at, llm = make(Role.AGGREGATED)
    task, result = await started(at, llm, ask())

    def gone() -> None:
        raise AssertionError("the executor is gone")

    monkeypatch.setattr(result, "abort", gone)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await check_idle(at)
