"""The legs, their deadlines and aborts, over a vendor that does what it is told."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from dynamo_trtllm.engines.trtllm.session import TrtllmSession
from dynamo_trtllm.errors import (
    DeadlineExceeded,
    RequestRejected,
    TransferFailed,
    TransferTimeout,
)
from dynamo_trtllm.messages import (
    FinishReason,
    Phase,
    ReleaseOutcome,
    Role,
)
from tests.unit.engines.trtllm.fake_bindings import Llm, ask, check_idle, make, some_transfer_params, started

pytestmark = pytest.mark.usefixtures("quick")


# --- ends of a prefill leg -----------------------------------------------------------------------------


@pytest.mark.parametrize("finish", ["length", "not_finished"])
async def test_prefill_when_either_word_for_go_on_comes_then_a_transfer(finish: str) -> None:
    at, llm = make(Role.PREFILL)
    task, result = await started(at, llm, ask(Phase.PREFILL))
    result.say(7, finish=finish)
    (chunk,) = await task
    assert chunk.finish_reason is FinishReason.KV_TRANSFER
    assert chunk.kv_params is not None
    assert list(chunk.kv_params.first_token_ids) == [7]
    assert at.stats().tickets_held == 1
    at.release(chunk.kv_params.transfer_id, ReleaseOutcome.FETCHED)
    assert result.aborts == 0
    await check_idle(at)


@pytest.mark.parametrize(("finish", "aborts"), [("stop", 0), ("length", 1)])
async def test_prefill_when_the_first_token_stops_then_no_transfer_and_no_kv_is_left(finish: str, aborts: int) -> None:
    at, llm = make(Role.PREFILL)
    task, result = await started(at, llm, ask(Phase.PREFILL))
    result.say(99, finish=finish)
    (chunk,) = await task
    assert (list(chunk.token_ids), chunk.finish_reason, chunk.kv_params) == ([99], FinishReason.STOP, None)
    assert result.aborts == aborts
    await check_idle(at)


async def test_prefill_when_cancelled_just_as_it_finishes_then_its_kv_is_given_up() -> None:
    at, llm = make(Role.PREFILL)
    task, result = await started(at, llm, ask(Phase.PREFILL))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    result.say(7, finish="length")
    await check_idle(at)
    assert result.aborts == 2


async def test_transfer_when_it_expires_then_its_kv_is_given_up() -> None:
    at, llm = make(Role.PREFILL, ttl_s=0.02)
    task, result = await started(at, llm, ask(Phase.PREFILL))
    result.say(7, finish="length")
    await task
    await check_idle(at)
    assert result.aborts == 1


# --- decode --------------------------------------------------------------------------------------------


async def test_decode_when_cancelled_before_its_kv_came_then_the_abort_waits_for_the_first_result(
    decode: tuple[TrtllmSession, Llm],
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


async def test_decode_when_its_kv_never_comes_then_the_abort_does_not_wait_for_ever(
    decode: tuple[TrtllmSession, Llm],
) -> None:
    at, llm = decode
    task, result = await started(at, llm, ask(Phase.DECODE, kv_params=await some_transfer_params()))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await check_idle(at)
    assert result.aborts == 1


async def test_decode_when_the_transfer_ends_first_then_handoff_timeout(decode: tuple[TrtllmSession, Llm]) -> None:
    at, llm = decode
    kv_params = msgspec.structs.replace(await some_transfer_params(), expires_at=time.time() + 0.2)
    task, _ = await started(at, llm, ask(Phase.DECODE, kv_params=kv_params))
    with pytest.raises(TransferTimeout):
        await task
    await check_idle(at)


async def test_decode_when_the_kv_takes_too_long_then_handoff_timeout_names_the_bound() -> None:
    at, llm = make(Role.DECODE, handoff_timeout_s=0.1)
    task, _ = await started(at, llm, ask(Phase.DECODE, kv_params=await some_transfer_params()))
    with pytest.raises(TransferTimeout, match=r"before --handoff-timeout-s 0.1 passed"):
        await task
    await check_idle(at)


async def test_decode_when_the_deadline_comes_before_the_kv_then_it_is_no_fault_of_the_transfer() -> None:
    at, llm = make(Role.DECODE)
    near = msgspec.structs.replace(
        ask(Phase.DECODE, kv_params=await some_transfer_params()), deadline=time.time() + 0.1
    )
    task, _ = await started(at, llm, near)
    with pytest.raises(DeadlineExceeded, match="did not finish before the request's deadline"):
        await task
    await check_idle(at)


@pytest.mark.parametrize("finish", ["cancelled", "timeout"])
async def test_decode_when_the_vendor_gives_up_before_a_token_then_it_is_the_handoffs_error(
    finish: str, decode: tuple[TrtllmSession, Llm]
) -> None:
    at, llm = decode
    task, result = await started(at, llm, ask(Phase.DECODE, kv_params=await some_transfer_params()))
    result.say(finish=finish)
    with pytest.raises(TransferTimeout if finish == "timeout" else TransferFailed):
        await task


async def test_decode_when_nothing_is_left_to_decode_then_refused_before_the_vendor_is_called(
    decode: tuple[TrtllmSession, Llm],
) -> None:
    at, llm = decode
    kv_params = await some_transfer_params()
    with pytest.raises(RequestRejected, match="nothing is left"):
        await anext(at.generate(ask(Phase.DECODE, kv_params=kv_params, max_tokens=1)))
    assert llm.results == []


# --- deadlines and ends --------------------------------------------------------------------------------


async def test_request_when_its_deadline_passes_then_it_is_aborted_and_read_to_its_end() -> None:
    at, llm = make(Role.AGGREGATED)
    task, result = await started(at, llm, ask(within_s=0.02))
    with pytest.raises(DeadlineExceeded):
        await task
    await asyncio.sleep(0)
    assert result.aborts == 1
    assert at.stats().running == 1
    result.say(finish="cancelled")
    await check_idle(at)


async def test_abort_when_it_is_never_answered_then_drain_still_returns() -> None:
    at, llm = make(Role.AGGREGATED)
    task, result = await started(at, llm, ask())
    result.say(1)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await check_idle(at)
    assert result.aborts == 1


async def test_abort_when_the_executor_is_gone_then_it_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    at, llm = make(Role.AGGREGATED)
    task, result = await started(at, llm, ask())

    def gone() -> None:
        raise AssertionError("the executor is gone")

    monkeypatch.setattr(result, "abort", gone)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await check_idle(at)
