"""Deadlines, aborts and the end of an executor, over a vendor of a few lines that does what it is told."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.engine.trtllm import serving as serving_module
from dynamo_trtllm.engine.trtllm.desk import Terms
from dynamo_trtllm.engine.trtllm.flight import Flight
from dynamo_trtllm.engine.trtllm.requests import PromptLimit, Rules
from dynamo_trtllm.engine.trtllm.serving import Serving, Times
from dynamo_trtllm.engine.trtllm.vendor import Capabilities, Vendor
from dynamo_trtllm.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineRefused,
    HandoffTimeout,
    NotMigratable,
    TransferFailed,
)
from dynamo_trtllm.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    HandoffTicket,
    KvLayout,
    Phase,
    ReleaseOutcome,
    Role,
    Sampling,
    token_ids,
)

LAYOUT = KvLayout(dtype="fp8", block_tokens=32, num_layers=1, num_kv_heads=1, head_dim=8)
PARAMS = {"first_gen_tokens": [7], "ctx_request_id": 3, "opaque_state": b"s", "draft_tokens": None}


class Refusal(RuntimeError):
    """The vendor's RequestError."""


class Result:
    """One call. `say` makes the next result, `fail` an error; nothing comes unasked."""

    def __init__(self) -> None:
        self.outputs = [SimpleNamespace(token_ids=[], logprobs=None, finish_reason=None, stop_reason=None)]
        self.outputs[0].disaggregated_params = SimpleNamespace(**PARAMS)
        self.cached_tokens = 0
        self.aborts = 0
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    def say(self, *ids: int, finish: str | None = None) -> None:
        self._queue.put_nowait((ids, finish))

    def fail(self, error: Exception) -> None:
        self._queue.put_nowait(error)

    def abort(self) -> None:
        self.aborts += 1

    def __aiter__(self) -> Result:
        return self

    async def __anext__(self) -> Result:
        found = await self._queue.get()
        if isinstance(found, Exception):
            raise found
        self.outputs[0].token_ids += found[0]
        self.outputs[0].finish_reason = found[1]
        return self

    def __await__(self) -> Any:
        return self.__anext__().__await__()


class Llm:
    def __init__(self) -> None:
        self.results: list[Result] = []
        self.healthy = True

    def generate_async(self, **_: Any) -> Result:
        self.results.append(Result())
        return self.results[-1]

    def get_stats(self, timeout: float) -> list[dict[str, Any]]:
        return []

    def _check_health(self) -> bool:
        return self.healthy


def vendor() -> Vendor:
    capabilities = Capabilities(
        release="1.2.1",
        line="1.2",
        disagg_fields=frozenset({"request_type", *PARAMS}),
        cache_salt=True,
        cached_tokens=True,
        structural_tag_format=True,
    )
    return Vendor(
        version="1.2.1",
        capabilities=capabilities,
        llm=Llm,
        sampling_params=dict,
        disaggregated_params=dict,
        guided_decoding_params=dict,
        logprob=None,
        request_error=Refusal,
        reports_health=True,
    )


def make(role: Role, *, ttl_s: float = 60.0, handoff_timeout_s: float = 30.0) -> tuple[Serving, Llm]:
    rules = Rules(
        role=role,
        context_length=1000,
        prompt_limits={phase: PromptLimit(500, "") for phase in Phase},
        vocab_size=100,
        end_ids=(99,),
        refuses=(),
        structural_tags=True,
    )
    llm, settled = Llm(), vendor()
    terms = Terms(1, "m", LAYOUT, {"release": "1.2"}, settled.capabilities)
    return Serving(settled, llm, rules, terms, Times(ttl_s, handoff_timeout_s)), llm


@pytest.fixture
def decode() -> tuple[Serving, Llm]:
    return make(Role.DECODE)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kv_wait_s", "answer_s"):
        monkeypatch.setitem(Flight.wind_down.__kwdefaults__, name, 0.05)


def ask(
    phase: Phase = Phase.WHOLE, *, ticket: HandoffTicket | None = None, within_s: float = 60, max_tokens: int = 8
) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="m",
        token_ids=token_ids(range(10)),
        sampling=Sampling(max_tokens=max_tokens),
        deadline=time.time() + within_s,
        phase=phase,
        ticket=ticket,
    )


async def started(at: Serving, llm: Llm, request: GenerateRequest) -> tuple[asyncio.Task[list[Chunk]], Result]:
    async def collected() -> list[Chunk]:
        async with aclosing(at.generate(request)) as stream:
            return [chunk async for chunk in stream]

    task = asyncio.create_task(collected())
    await asyncio.sleep(0)
    return task, llm.results[-1]


async def a_ticket() -> HandoffTicket:
    at, llm = make(Role.PREFILL)
    task, result = await started(at, llm, ask(Phase.PREFILL))
    result.say(7, finish="length")
    (chunk,) = await task
    assert chunk.ticket is not None
    await at.aclose()
    return chunk.ticket


async def check_idle(at: Serving) -> None:
    await asyncio.wait_for(at.drain(), 2)
    assert at.stats().running == 0


# --- ends of a prefill leg -----------------------------------------------------------------------------


@pytest.mark.parametrize("finish", ["length", "not_finished"])
async def test_prefill_when_either_word_for_go_on_comes_then_a_ticket(finish: str) -> None:
    at, llm = make(Role.PREFILL)
    task, result = await started(at, llm, ask(Phase.PREFILL))
    result.say(7, finish=finish)
    (chunk,) = await task
    assert chunk.finish_reason is FinishReason.HANDOFF
    assert chunk.ticket is not None
    assert list(chunk.ticket.first_token_ids) == [7]
    assert at.stats().tickets_held == 1
    at.release(chunk.ticket.ticket_id, ReleaseOutcome.REDEEMED)
    assert result.aborts == 0
    await check_idle(at)


@pytest.mark.parametrize(("finish", "aborts"), [("stop", 0), ("length", 1)])
async def test_prefill_when_the_first_token_stops_then_no_ticket_and_no_kv_is_left(finish: str, aborts: int) -> None:
    at, llm = make(Role.PREFILL)
    task, result = await started(at, llm, ask(Phase.PREFILL))
    result.say(99, finish=finish)
    (chunk,) = await task
    assert (list(chunk.token_ids), chunk.finish_reason, chunk.ticket) == ([99], FinishReason.STOP, None)
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


async def test_ticket_when_it_expires_then_its_kv_is_given_up() -> None:
    at, llm = make(Role.PREFILL, ttl_s=0.02)
    task, result = await started(at, llm, ask(Phase.PREFILL))
    result.say(7, finish="length")
    await task
    await check_idle(at)
    assert result.aborts == 1


# --- decode --------------------------------------------------------------------------------------------


async def test_decode_when_cancelled_before_its_kv_came_then_the_abort_waits_for_the_first_result(
    decode: tuple[Serving, Llm],
) -> None:
    at, llm = decode
    task, result = await started(at, llm, ask(Phase.DECODE, ticket=await a_ticket()))
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
    decode: tuple[Serving, Llm],
) -> None:
    at, llm = decode
    task, result = await started(at, llm, ask(Phase.DECODE, ticket=await a_ticket()))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await check_idle(at)
    assert result.aborts == 1


async def test_decode_when_the_ticket_ends_first_then_handoff_timeout(decode: tuple[Serving, Llm]) -> None:
    at, llm = decode
    ticket = msgspec.structs.replace(await a_ticket(), expires_at=time.time() + 0.2)
    task, _ = await started(at, llm, ask(Phase.DECODE, ticket=ticket))
    with pytest.raises(HandoffTimeout):
        await task
    await check_idle(at)


async def test_decode_when_the_kv_takes_too_long_then_handoff_timeout_names_the_bound() -> None:
    at, llm = make(Role.DECODE, handoff_timeout_s=0.1)
    task, _ = await started(at, llm, ask(Phase.DECODE, ticket=await a_ticket()))
    with pytest.raises(HandoffTimeout, match=r"before --handoff-timeout-s 0.1 passed"):
        await task
    await check_idle(at)


async def test_decode_when_the_deadline_comes_before_the_kv_then_it_is_no_fault_of_the_handoff() -> None:
    at, llm = make(Role.DECODE)
    near = msgspec.structs.replace(ask(Phase.DECODE, ticket=await a_ticket()), deadline=time.time() + 0.1)
    task, _ = await started(at, llm, near)
    with pytest.raises(DeadlineExceeded, match="did not come before the request's deadline"):
        await task
    await check_idle(at)


@pytest.mark.parametrize("finish", ["cancelled", "timeout"])
async def test_decode_when_the_vendor_gives_up_before_a_token_then_it_is_the_handoffs_error(
    finish: str, decode: tuple[Serving, Llm]
) -> None:
    at, llm = decode
    task, result = await started(at, llm, ask(Phase.DECODE, ticket=await a_ticket()))
    result.say(finish=finish)
    with pytest.raises(HandoffTimeout if finish == "timeout" else TransferFailed):
        await task


async def test_decode_when_nothing_is_left_to_decode_then_refused_before_the_vendor_is_called(
    decode: tuple[Serving, Llm],
) -> None:
    at, llm = decode
    ticket = await a_ticket()
    with pytest.raises(EngineRefused, match="nothing is left"):
        await anext(at.generate(ask(Phase.DECODE, ticket=ticket, max_tokens=1)))
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


@pytest.mark.parametrize(("error", "kind"), [(Refusal("no"), EngineRefused), (ValueError("no"), EngineRefused)])
async def test_error_when_it_is_one_requests_then_the_others_go_on(error: Exception, kind: type[Exception]) -> None:
    at, llm = make(Role.AGGREGATED)
    first, broken = await started(at, llm, ask())
    second, result = await started(at, llm, ask())
    broken.fail(error)
    with pytest.raises(kind):
        await first
    result.say(1, finish="length")
    assert len(await second) == 1
    at.check()


async def test_error_when_it_is_the_executors_then_everybody_hears_it() -> None:
    at, llm = make(Role.AGGREGATED)
    first, broken = await started(at, llm, ask())
    second, _ = await started(at, llm, ask())
    llm.healthy = False
    broken.fail(Refusal("a rank was lost"))
    for task in (first, second):
        with pytest.raises(EngineFailed, match="a rank was lost"):
            await task
    with pytest.raises(EngineFailed):
        at.check()
    with pytest.raises(EngineFailed):
        await anext(at.generate(ask()))
    await check_idle(at)


async def test_check_when_the_executor_is_shut_down_then_waiting_streams_end() -> None:
    at, llm = make(Role.AGGREGATED)
    task, _ = await started(at, llm, ask())
    llm.healthy = False
    with pytest.raises(EngineFailed):
        at.check()
    with pytest.raises(EngineFailed):
        await task


async def test_check_when_nothing_moves_with_requests_waiting_then_the_engine_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving_module, "_STALL_S", 0.0)
    at, llm = make(Role.AGGREGATED, ttl_s=0.01)
    at.poll_stats()
    await asyncio.sleep(0.05)
    at.check()  # idle: nothing has to move
    task, _ = await started(at, llm, ask())
    at.check()
    await asyncio.sleep(0.05)
    with pytest.raises(EngineFailed, match="no iteration and no result"):
        at.check()
    with pytest.raises(EngineFailed):
        await task
    await at.aclose()


async def test_stream_when_the_vendor_cancels_what_nobody_cancelled_then_it_is_said() -> None:
    at, llm = make(Role.AGGREGATED)
    task, result = await started(at, llm, ask())
    result.say(1)
    result.say(finish="cancelled")
    with pytest.raises(NotMigratable, match="cancelled"):
        await task


async def test_stream_when_it_ends_without_a_word_then_it_is_said() -> None:
    at, llm = make(Role.AGGREGATED)
    task, result = await started(at, llm, ask())
    result.fail(StopAsyncIteration())
    with pytest.raises(NotMigratable, match="no reason"):
        await task


async def test_close_when_streams_run_then_they_end_and_tickets_are_forgotten() -> None:
    at, llm = make(Role.PREFILL)
    task, result = await started(at, llm, ask(Phase.PREFILL))
    result.say(7, finish="length")
    await task
    running, _ = await started(at, llm, ask(Phase.PREFILL))
    await at.aclose()
    await at.aclose()
    with pytest.raises(EngineFailed):
        await running
    await check_idle(at)


# --- one timer for many waits --------------------------------------------------------------------------


async def test_deadline_when_it_passes_while_nobody_waits_then_the_next_wait_ends() -> None:
    at, llm = make(Role.AGGREGATED)
    stream = at.generate(ask(within_s=0.02))
    async with aclosing(stream):
        pull = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        llm.results[0].say(1)
        await pull
        await asyncio.sleep(0.05)
        llm.results[0].say(2)
        with pytest.raises(DeadlineExceeded):
            await anext(stream)
    await check_idle(at)


async def test_deadline_when_the_task_is_cancelled_at_the_same_time_then_it_stays_cancelled() -> None:
    at, llm = make(Role.AGGREGATED)
    task, _ = await started(at, llm, ask())
    task.cancel()
    at.fail("at the same time")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_deadline_when_it_ends_a_wait_then_the_task_itself_is_not_cancelled() -> None:
    at, _llm = make(Role.AGGREGATED)

    async def survives() -> int:
        with pytest.raises(DeadlineExceeded):
            await anext(at.generate(ask(within_s=0.01)))
        await asyncio.sleep(0)
        current = asyncio.current_task()
        assert current is not None
        return current.cancelling()

    assert await asyncio.create_task(survives()) == 0
    await check_idle(at)


async def test_deadline_when_the_kv_has_come_then_it_is_the_requests_own(decode: tuple[Serving, Llm]) -> None:
    at, llm = decode
    ticket = msgspec.structs.replace(await a_ticket(), expires_at=time.time() + 0.1)
    task, result = await started(at, llm, ask(Phase.DECODE, ticket=ticket))
    result.say(7)
    await asyncio.sleep(0.15)
    result.say(8, finish="length")
    assert [list(chunk.token_ids) for chunk in await task] == [[7], [8]]
