"""Canaries on the in-process plane: what passes, what does not, and who is asked to restart."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest

from dynamo_trtllm.errors import Disconnected, DynamoError, EngineFailed, Overloaded, TransferFailed, Unreachable
from dynamo_trtllm.frontend.canary import Canaries, CanaryOptions
from dynamo_trtllm.frontend.pipeline import Pipeline, Trace
from dynamo_trtllm.messages import (
    Chunk,
    Control,
    FinishReason,
    GenerateRequest,
    LegStats,
    Phase,
    Release,
    Restart,
    Role,
    token_ids,
)
from dynamo_trtllm.plane.inproc import InprocPlane
from dynamo_trtllm.router.pairs import BreakerLimits, PairBook, PairState
from dynamo_trtllm.router.view import ClusterView
from tests.instances import CARD, make_instance, make_ticket
from tests.unit.frontend.legs import request
from tests.waiting import SOON_S

HANDOFF = Chunk(finish_reason=FinishReason.HANDOFF, ticket=make_ticket("t"))


def answer(count: int = 2, kv_bytes: int = 64) -> Chunk:
    return Chunk(token_ids=token_ids([5] * count), finish_reason=FinishReason.LENGTH, stats=LegStats(kv_bytes=kv_bytes))


class Worker:
    """Ends every leg in `ending`; for ever for None."""

    def __init__(self, ending: Chunk | DynamoError | None) -> None:
        self.ending = ending
        self.asked: list[GenerateRequest] = []
        self.restarts: list[str] = []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.asked.append(request)
        if self.ending is None:
            await asyncio.Event().wait()
        elif isinstance(self.ending, DynamoError):
            raise self.ending
        else:
            yield self.ending

    async def control(self, verb: Control) -> bytes:
        if isinstance(verb, Restart):
            self.restarts.append(verb.reason)
        else:
            assert isinstance(verb, Release)
        return b""


class Bench:
    def __init__(self, *, timeout_s: float = 5.0, limits: BreakerLimits | None = None) -> None:
        self.plane, self.view = InprocPlane(), ClusterView()
        self.book = PairBook(limits)
        self.pipeline = Pipeline(self.view, self.plane, None, self.book)
        options = CanaryOptions(interval_s=60.0, timeout_s=timeout_s)
        self.canaries = Canaries(self.view, self.pipeline, self.book, options)
        self.codes: Counter[str] = Counter()

    def canary_finished(self, *, model: str, code: str) -> None:
        self.codes[code] += 1

    async def add(self, number: int, role: Role, ending: Chunk | DynamoError | None) -> Worker:
        worker, instance = Worker(ending), make_instance(number, role=role)
        await self.plane.serve(instance.subject, worker)
        self.view.add(instance)
        return worker

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.canaries.run(self.plane, self))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.pipeline.aclose()
            await self.plane.aclose()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON_S):
            while not condition():  # noqa: ASYNC110 - it changes on its own
                await asyncio.sleep(0.005)


async def test_run_when_a_pair_comes_up_then_two_tokens_cross_it_once_and_it_works() -> None:
    bench = Bench()
    async with bench.running():
        prefill = await bench.add(1, Role.PREFILL, HANDOFF)
        decode = await bench.add(2, Role.DECODE, answer())
        await bench.until(lambda: bench.book.record((1, 2)).state is PairState.WORKING)
        await asyncio.sleep(0.05)
        assert bench.codes == {"ok": 1}
    assert [request.phase for request in (*prefill.asked, *decode.asked)] == [Phase.PREFILL, Phase.DECODE]
    sampling = decode.asked[0].sampling
    assert (sampling.max_tokens, sampling.ignore_eos, sampling.temperature) == (2, True, 0.0)


async def test_run_when_an_aggregated_worker_comes_up_then_it_is_tried_whole() -> None:
    bench = Bench()
    async with bench.running():
        await bench.add(3, Role.AGGREGATED, answer(kv_bytes=0))
        await bench.until(lambda: bench.book.record((None, 3)).state is PairState.WORKING)


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        (answer(count=1), "canary", "brought 1"),
        (answer(kv_bytes=0), "canary", "without reading"),
        (TransferFailed("no route"), "transfer", "no route"),
        (EngineFailed("dead"), "engine_failed", "dead"),
        (None, "canary", "no answer"),
    ],
)
async def test_run_when_a_canary_does_not_come_through_then_the_pair_fails_and_says_why(
    ending: Chunk | DynamoError | None, code: str, said: str
) -> None:
    bench = Bench(timeout_s=0.2 if ending is None else SOON_S, limits=BreakerLimits(failures=1, open_s=60.0))
    async with bench.running():
        await bench.add(1, Role.PREFILL, HANDOFF)
        await bench.add(2, Role.DECODE, ending)
        await bench.until(lambda: bench.book.is_shut((1, 2)))
        await bench.until(lambda: bench.codes == {code: 1})
    assert said in bench.book.record((1, 2)).reason


@pytest.mark.parametrize("ending", [answer(kv_bytes=0), answer(count=1)])
async def test_run_when_canaries_fail_after_their_first_token_then_the_pair_stays_shut_and_a_worker_restarts(
    ending: Chunk,
) -> None:
    bench = Bench(limits=BreakerLimits(failures=1, open_s=0.01, max_open_s=0.01))
    async with bench.running():
        prefill = await bench.add(1, Role.PREFILL, HANDOFF)
        await bench.add(2, Role.DECODE, ending)
        await bench.until(lambda: bool(prefill.restarts))
        assert bench.book.is_shut((1, 2))


async def test_run_when_a_worker_is_full_then_the_pair_is_not_blamed() -> None:
    bench = Bench(limits=BreakerLimits(failures=1))
    async with bench.running():
        await bench.add(1, Role.PREFILL, Overloaded("full"))
        await bench.add(2, Role.DECODE, answer())
        await bench.until(lambda: bench.codes["overloaded"] > 0)
        assert bench.book.record((1, 2)).state is PairState.UNTRIED


async def test_run_when_a_quarantined_pair_recovers_then_a_canary_lets_it_serve_again() -> None:
    bench = Bench(limits=BreakerLimits(failures=1, open_s=0.05))
    async with bench.running():
        await bench.add(1, Role.PREFILL, HANDOFF)
        decode = await bench.add(2, Role.DECODE, TransferFailed("for now"))
        await bench.until(lambda: bench.book.is_shut((1, 2)))
        decode.ending = answer()
        await bench.until(lambda: not bench.book.is_shut((1, 2)))
        assert bench.book.record((1, 2)).state is PairState.WORKING


async def test_run_when_all_pairs_of_one_prefill_fail_then_it_alone_is_asked_to_restart_once() -> None:
    bench = Bench(limits=BreakerLimits(failures=1, open_s=0.01, max_open_s=0.01))
    async with bench.running():
        good = await bench.add(1, Role.PREFILL, HANDOFF)
        bad = await bench.add(2, Role.PREFILL, EngineFailed("poisoned"))
        await bench.add(11, Role.DECODE, answer())
        await bench.until(lambda: bool(bad.restarts))
        await asyncio.sleep(0.1)
    assert len(bad.restarts) == 1
    assert good.restarts == []


@pytest.mark.parametrize("ending", [Disconnected("no connection to NATS"), Unreachable("nobody listens")])
async def test_run_when_a_leg_is_not_taken_up_then_the_pair_is_not_ready_and_works_as_soon_as_it_is_again(
    ending: DynamoError,
) -> None:
    """That tells nothing of its KV: no quarantine outlives the outage, and nobody is asked to restart."""
    bench = Bench(limits=BreakerLimits(failures=1, open_s=60.0))
    async with bench.running():
        prefill = await bench.add(1, Role.PREFILL, ending)
        await bench.add(2, Role.DECODE, answer())
        await bench.until(lambda: bench.codes[ending.code] > 1)
        record = bench.book.record((1, 2))
        assert (record.state, record.reason) == (PairState.FAILING, f"{ending.code}: {ending.message}")
        assert not bench.book.is_shut((1, 2))
        prefill.ending = HANDOFF
        await bench.until(lambda: bench.book.record((1, 2)).state is PairState.WORKING)
    assert prefill.restarts == []


async def test_run_when_a_request_fails_between_two_that_work_then_a_canary_tries_them_at_once_and_not_when_idle() -> (
    None
):
    bench = Bench()
    async with bench.running():
        await bench.add(1, Role.PREFILL, HANDOFF)
        decode = await bench.add(2, Role.DECODE, answer())
        await bench.until(lambda: bench.codes["ok"] == 1)
        decode.ending = Unreachable("nobody listens")
        with pytest.raises(Unreachable):
            async with aclosing(bench.pipeline.generate(request(), Trace())) as chunks:
                await anext(chunks)
        assert bench.book.record((1, 2)).state is PairState.FAILING
        decode.ending = answer()
        await bench.until(lambda: bench.book.record((1, 2)).state is PairState.WORKING)


async def test_run_when_a_canary_raises_what_none_may_then_it_is_that_pairs_failure_and_the_others_are_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A card without a vocabulary, which discovery would have rejected: its canary divides by zero."""
    bench = Bench(limits=BreakerLimits(failures=3, open_s=0.01))
    odd = make_instance(3, role=Role.AGGREGATED)
    odd = msgspec.structs.replace(odd, card=msgspec.structs.replace(CARD, name="odd", vocab_size=0))
    async with bench.running():
        bench.view.add(odd)
        await bench.until(lambda: bench.codes["internal"] > 1)
        await bench.add(1, Role.PREFILL, HANDOFF)
        await bench.add(2, Role.DECODE, answer())
        await bench.until(lambda: bench.book.record((1, 2)).state is PairState.WORKING)
        assert bench.book.record((None, 3)).reason.startswith("internal: ZeroDivisionError: ")
        await bench.until(lambda: bench.book.is_shut((None, 3)))
        said = [record for record in caplog.records if record.getMessage().startswith("canary raised")]
        assert [(each.levelno, each.exc_info is not None) for each in said] == [(logging.ERROR, True)]
        await bench.add(3, Role.AGGREGATED, answer(kv_bytes=0))  # the same instance with a sound card
        await bench.until(lambda: bench.book.record((None, 3)).state is PairState.WORKING)
