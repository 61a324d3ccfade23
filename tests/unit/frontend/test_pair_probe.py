"""Probes of pairs on the in-process plane: which pass, and which do not."""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial

import msgspec
import pytest

from dynamo_trtllm.cluster.request_plane.inproc import InprocPlane
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.pair_breakers import BreakerLimits, PairBreakers, PairState
from dynamo_trtllm.frontend.routing.pair_probe import ANSWER_TOKENS, PairProbes
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.protocol.errors import (
    Disconnected,
    DynamoError,
    EngineFailed,
    Overloaded,
    TransferFailed,
    Unreachable,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    Control,
    FinishReason,
    GenerateRequest,
    Phase,
    PhaseTimings,
    ReleaseKv,
    Role,
    Sampling,
    TokenLogprob,
    token_ids,
)
from tests.kit.generator_streams import ChunkSource, routed_stream
from tests.kit.instances import CARD, make_instance, make_transfer_params
from tests.kit.routing import request
from tests.kit.waiting import SOON_S

NUM_PROMPT = 120
ASKED = Sampling(max_tokens=ANSWER_TOKENS)
Answer = Callable[[GenerateRequest], list[int]]
PREFILL_END = Chunk(finish_reason=FinishReason.KV_TRANSFER, kv_params=make_transfer_params("t"))


def answer(count: int = ANSWER_TOKENS, kv_bytes: int = 64) -> Chunk:
    return Chunk(
        token_ids=token_ids([5] * count),
        finish_reason=FinishReason.LENGTH,
        stats=PhaseTimings(kv_bytes=kv_bytes),
    )


def right(request: GenerateRequest) -> list[int]:
    """Other tokens after every prompt."""
    seed = zlib.crc32(request.token_ids)
    return [(seed + at) % 1_000_000 for at in range(request.sampling.max_tokens)]


def wrong(request: GenerateRequest, prompts: int, seen: list[bytes]) -> list[int]:
    """In the decode call of the first `prompts` prompts the last token is another one."""
    tokens = right(request)
    if request.phase is Phase.DECODE:
        if request.token_ids.tobytes() not in seen:
            seen.append(request.token_ids.tobytes())
        tokens[-1] += seen.index(request.token_ids.tobytes()) < prompts
    return tokens


def wrongly(prompts: int) -> Answer:
    return partial(wrong, prompts=prompts, seen=[])


class Worker(ChunkSource):
    """A worker that ends every call with `ending`; None: it does not end."""

    def __init__(self, ending: Chunk | DynamoError | Answer | None) -> None:
        self.ending = ending
        self.asked: list[GenerateRequest] = []

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.asked.append(request)
        if self.ending is None:
            await asyncio.Event().wait()
        elif isinstance(self.ending, DynamoError):
            raise self.ending
        elif isinstance(self.ending, Chunk):
            yield self.ending
        else:
            made = msgspec.structs.replace(answer(), token_ids=token_ids(self.ending(request)))
            yield PREFILL_END if request.phase is Phase.PREFILL else made

    def phases(self) -> Counter[Phase]:
        return Counter(request.phase for request in self.asked)

    async def control(self, verb: Control) -> bytes:
        assert isinstance(verb, ReleaseKv)
        return b""


class Bench:
    def __init__(
        self,
        *,
        timeout_s: float = 5.0,
        interval_s: float = 60.0,
        limits: BreakerLimits | None = None,
    ) -> None:
        self.plane = InprocPlane()
        self.view = ClusterView()
        self.breakers = PairBreakers(limits)
        self.router = RequestRouter(self.view, self.plane, breakers=self.breakers)
        self.probes = PairProbes(
            self.router, self.probe_finished, interval_s=interval_s, timeout_s=timeout_s
        )
        self.codes: Counter[str] = Counter()

    def probe_finished(self, *, model: str, code: str) -> None:
        self.codes[code] += 1

    async def add(
        self,
        number: int,
        role: Role,
        ending: Chunk | DynamoError | Answer | None,
    ) -> Worker:
        return await self.add_worker(number, role, Worker(ending))

    async def add_worker(self, number: int, role: Role, worker: Worker) -> Worker:
        """It can aggregate if it computes its answers."""
        made = make_instance(number, role=role)
        instance = msgspec.structs.replace(made, can_aggregate=callable(worker.ending))
        await self.plane.serve(instance.subject, worker)
        self.view.add(instance)
        return worker

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.probes.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.router.aclose()
            await self.plane.aclose()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON_S):
            while not condition():  # noqa: ASYNC110 - it changes on its own
                await asyncio.sleep(0.005)


async def test_run_probes_a_new_pair_once() -> None:
    bench = Bench()
    async with bench.running():
        prefill = await bench.add(1, Role.PREFILL, PREFILL_END)
        decode = await bench.add(2, Role.DECODE, answer())
        await bench.until(lambda: bench.breakers.status((1, 2)).state is PairState.WORKING)
        await asyncio.sleep(0.05)
        assert bench.codes == {"ok": 1}  # no worker does aggregated requests: nothing is compared
    assert [request.phase for request in (*prefill.asked, *decode.asked)] == [
        Phase.PREFILL,
        Phase.DECODE,
    ]
    sampling = decode.asked[0].sampling
    assert (sampling.max_tokens, sampling.ignore_eos, sampling.temperature) == (
        ANSWER_TOKENS,
        True,
        0.0,
    )


async def test_run_probes_an_aggregated_worker() -> None:
    bench = Bench()
    async with bench.running():
        await bench.add(3, Role.AGGREGATED, answer(kv_bytes=0))
        await bench.until(lambda: bench.breakers.status((None, 3)).state is PairState.WORKING)


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        (answer(count=1), "failed", "returned 1"),
        (answer(kv_bytes=0), "failed", "without reading"),
        (TransferFailed("no route"), "transfer_failed", "no route"),
        (EngineFailed("dead"), "engine_failed", "dead"),
        (None, "failed", "no answer"),
    ],
)
async def test_run_failed_probe_says_why(
    ending: Chunk | DynamoError | None, code: str, said: str
) -> None:
    bench = Bench(
        timeout_s=0.2 if ending is None else SOON_S, limits=BreakerLimits(failures=1, open_s=60.0)
    )
    async with bench.running():
        await bench.add(1, Role.PREFILL, PREFILL_END)
        await bench.add(2, Role.DECODE, ending)
        await bench.until(lambda: bench.breakers.is_open((1, 2)))
        await bench.until(lambda: bench.codes == {code: 1})
    assert said in bench.breakers.status((1, 2)).reason


@pytest.mark.parametrize("ending", [answer(kv_bytes=0), answer(count=1)])
async def test_run_probe_failing_after_first_token_keeps_pair_open(ending: Chunk) -> None:
    bench = Bench(limits=BreakerLimits(failures=1, open_s=0.01, max_open_s=0.01))
    async with bench.running():
        await bench.add(1, Role.PREFILL, PREFILL_END)
        await bench.add(2, Role.DECODE, ending)
        await bench.until(lambda: bench.codes["failed"] > 2)
        assert bench.breakers.is_open((1, 2))


async def test_run_when_a_worker_is_full_then_the_pair_is_not_blamed() -> None:
    bench = Bench(limits=BreakerLimits(failures=1))
    async with bench.running():
        await bench.add(1, Role.PREFILL, Overloaded("full"))
        await bench.add(2, Role.DECODE, answer())
        await bench.until(lambda: bench.codes["overloaded"] > 0)
        assert bench.breakers.status((1, 2)).state is PairState.UNTRIED


async def test_run_probe_lets_a_recovered_pair_serve() -> None:
    bench = Bench(limits=BreakerLimits(failures=1, open_s=0.05))
    async with bench.running():
        await bench.add(1, Role.PREFILL, PREFILL_END)
        decode = await bench.add(2, Role.DECODE, TransferFailed("for now"))
        await bench.until(lambda: bench.breakers.status((1, 2)).state is PairState.QUARANTINED)
        decode.ending = answer()
        await bench.until(lambda: bench.breakers.status((1, 2)).state is PairState.WORKING)
        assert not bench.breakers.is_open((1, 2))


@pytest.mark.parametrize(
    "ending", [Disconnected("no connection to NATS"), Unreachable("no subscriber")]
)
async def test_run_rejected_probe_waits_for_the_pair(ending: DynamoError) -> None:
    """That says nothing about its KV: no quarantine outlives the outage."""
    bench = Bench(interval_s=0.05, limits=BreakerLimits(failures=1, open_s=60.0))
    async with bench.running():
        prefill = await bench.add(1, Role.PREFILL, ending)
        await bench.add(2, Role.DECODE, answer())
        await bench.until(lambda: bench.codes[ending.code] > 1)
        record = bench.breakers.status((1, 2))
        assert (record.state, record.reason) == (
            PairState.FAILING,
            f"{ending.code}: {ending.message}",
        )
        assert not bench.breakers.is_open((1, 2))
        prefill.ending = PREFILL_END
        await bench.until(lambda: bench.breakers.status((1, 2)).state is PairState.WORKING)


async def test_run_probes_at_once_after_a_failed_request() -> None:
    bench = Bench()
    async with bench.running():
        await bench.add(1, Role.PREFILL, PREFILL_END)
        decode = await bench.add(2, Role.DECODE, answer())
        await bench.until(lambda: bench.codes["ok"] == 1)
        decode.ending = Unreachable("no subscriber")
        with pytest.raises(Unreachable):
            async with aclosing(routed_stream(bench.router, request(), ChoiceTimeline())) as chunks:
                await anext(chunks)
        assert bench.breakers.status((1, 2)).state is PairState.FAILING
        decode.ending = answer()
        await bench.until(lambda: bench.breakers.status((1, 2)).state is PairState.WORKING)


async def test_run_probe_bug_is_a_failure_of_its_pair(caplog: pytest.LogCaptureFixture) -> None:
    """A card without a vocabulary, which discovery would have rejected: its probe has no
    prompt.
    """
    bench = Bench(interval_s=0.05, limits=BreakerLimits(failures=3, open_s=0.01))
    odd = make_instance(3, role=Role.AGGREGATED)
    odd = msgspec.structs.replace(odd, card=msgspec.structs.replace(CARD, name="odd", vocab_size=0))
    async with bench.running():
        bench.view.add(odd)
        await bench.until(lambda: bench.codes["internal"] > 1)
        await bench.add(1, Role.PREFILL, PREFILL_END)
        await bench.add(2, Role.DECODE, answer())
        await bench.until(lambda: bench.breakers.status((1, 2)).state is PairState.WORKING)
        assert bench.breakers.status((None, 3)).reason.startswith("internal: ValueError: ")
        await bench.until(lambda: bench.breakers.is_open((None, 3)))
        said = [
            record for record in caplog.records if record.getMessage().startswith("probe raised")
        ]
        assert [(record.levelno, record.exc_info is not None) for record in said] == [
            (logging.ERROR, True)
        ]
        # the same instance with a sound card
        await bench.add(3, Role.AGGREGATED, answer(kv_bytes=0))
        await bench.until(lambda: bench.breakers.status((None, 3)).state is PairState.WORKING)


# --- answers that are compared --------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompts", "code"), [(0, "ok"), (1, "ok"), (2, "ok"), (3, "mismatch")])
async def test_run_wrong_answers_open_the_pair_at_once(prompts: int, code: str) -> None:
    """Rounding changes a token now and then; KV that arrives wrongly changes all answers."""
    bench = Bench()
    async with bench.running():
        await bench.add(1, Role.PREFILL, right)
        await bench.add(2, Role.DECODE, wrongly(prompts))
        await bench.until(lambda: bench.codes == {code: 1})
        bench.router.health.record_success(
            (1, 2), time.monotonic()
        )  # by a request that had begun before
        assert bench.breakers.is_open((1, 2)) is (code == "mismatch")
        assert ("KV arrives changed" in bench.breakers.status((1, 2)).reason) is (
            code == "mismatch"
        )


@pytest.mark.parametrize(
    ("logprobs", "code"),
    [
        ([-0.5, -0.9], "ok"),
        ([-0.5, -1.1], "mismatch"),
        ([-0.5], "mismatch"),  # the other token is not among the likeliest ones
        ([], "mismatch"),  # not known
    ],
)
async def test_run_answers_that_rounding_explains_are_right(
    logprobs: list[float], code: str
) -> None:
    """The last token of the pair is always another one, as with other batches and kernels."""

    class Rounding(Worker):
        async def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
            async for chunk in super().chunks(request):
                if request.sampling.logprobs is not None:
                    scored.append(request)
                    first = chunk.token_ids[0]
                    top = tuple((first + at, value) for at, value in enumerate(logprobs))
                    entry = TokenLogprob(token_id=first, logprob=-0.5, top=top)
                    chunk = msgspec.structs.replace(chunk, logprobs=(entry,))
                yield chunk

    def ending(request: GenerateRequest) -> list[int]:
        # After the prompt and the first seven tokens, the eighth one is the same.
        begin = request.token_ids[:NUM_PROMPT]
        tokens = right(msgspec.structs.replace(request, token_ids=begin, sampling=ASKED))
        tokens = tokens[len(request.token_ids) - NUM_PROMPT :][: request.sampling.max_tokens]
        if request.phase is Phase.DECODE:
            tokens[-1] += 1
        return tokens

    scored: list[GenerateRequest] = []
    bench = Bench()
    async with bench.running():
        await bench.add(1, Role.PREFILL, ending)
        await bench.add_worker(2, Role.DECODE, Rounding(ending))
        await bench.until(lambda: bench.codes == {code: 1})
    assert {len(request.token_ids) for request in scored} == {NUM_PROMPT + ANSWER_TOKENS - 1}


async def test_run_compares_pairs_again_one_at_a_time() -> None:
    """The answers of an engine depend on the probes that it computes at the same time."""

    class Batching(Worker):
        async def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
            prompt = request.token_ids[:NUM_PROMPT].tobytes()
            running.append(prompt)
            has_others = len(set(running)) > 1
            # The other pair's probe comes meanwhile, if it may.
            await asyncio.sleep(0.02)
            is_disturbed = has_others or len(set(running)) > 1
            running.remove(prompt)
            async for chunk in super().chunks(request):
                if is_disturbed and request.phase is Phase.DECODE:
                    chunk = msgspec.structs.replace(chunk, token_ids=token_ids([7] * ANSWER_TOKENS))
                yield chunk

    running: list[bytes] = []
    bench = Bench()
    async with bench.running():
        for number in (1, 3):
            await bench.add_worker(number, Role.PREFILL, Batching(right))
        await bench.add_worker(2, Role.DECODE, Batching(right))
        await bench.until(lambda: bench.codes.total() == 2)
    assert bench.codes == {"ok": 2}


async def test_run_worker_that_hangs_delays_only_its_own_pairs() -> None:
    """Also if the answers of all pairs differed, so that they are compared again."""

    class HangsLater(Worker):
        async def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
            if self.asked:
                hanging.set()
                await asyncio.Event().wait()
            async for chunk in super().chunks(request):
                yield chunk

    hanging = asyncio.Event()
    bench = Bench(timeout_s=60.0)
    async with bench.running():
        await bench.add_worker(1, Role.PREFILL, HangsLater(right))
        await bench.add(4, Role.DECODE, wrongly(1))
        await bench.until(hanging.is_set)
        for number in (2, 3):
            await bench.add(number, Role.PREFILL, right)
            await bench.add(number + 3, Role.DECODE, wrongly(1))
        sound = [(prefill, decode) for prefill in (2, 3) for decode in (5, 6)]
        await bench.until(lambda: all(bench.breakers.status(pair).is_proven for pair in sound))
        assert bench.breakers.status((1, 4)).state is PairState.UNTRIED


async def test_run_compares_equal_prompts_with_own_salts() -> None:
    bench = Bench()
    async with bench.running():
        prefill = await bench.add(1, Role.PREFILL, right)
        decode = await bench.add(2, Role.DECODE, right)
        await bench.until(lambda: bench.codes == {"ok": 1})
    assert decode.phases() == {Phase.AGGREGATED: 1, Phase.DECODE: 1}
    asked = [*decode.asked, *prefill.asked]
    assert {request.token_ids.tobytes() for request in asked} == {asked[0].token_ids.tobytes()}
    assert len(asked[0].token_ids) == NUM_PROMPT
    # no prefix cache answers the second one
    assert len({request.cache_salt for request in decode.asked}) == 2


async def test_run_retries_a_wrong_instance_with_other_prompts() -> None:
    """Two tokens may be about equally likely after all of the first ones."""
    bench = Bench(limits=BreakerLimits(open_s=0.01))
    async with bench.running():
        await bench.add(1, Role.PREFILL, right)
        await bench.add(2, Role.DECODE, wrongly(4))
        await bench.until(lambda: bench.codes == {"mismatch": 1, "ok": 1})
        assert bench.breakers.status((1, 2)).state is PairState.WORKING


async def test_run_hanging_pair_does_not_delay_others() -> None:
    bench = Bench(timeout_s=60.0)
    async with bench.running():
        hanging = await bench.add(1, Role.PREFILL, None)
        await bench.add(2, Role.DECODE, right)
        await bench.until(lambda: bool(hanging.asked))
        await bench.add(3, Role.PREFILL, right)
        await bench.until(lambda: bench.breakers.status((3, 2)).state is PairState.WORKING)
        assert bench.breakers.status((1, 2)).state is PairState.UNTRIED
