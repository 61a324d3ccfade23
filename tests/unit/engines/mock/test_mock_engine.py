"""What only the mock engine promises, or what the contract suite can't see: gates in the transfers,
a dead clock.
"""

from __future__ import annotations

import asyncio
import ctypes
from array import array
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.chunk_size import ChunkSize
from dynamo_trtllm.engines.mock.args import MockArgs
from dynamo_trtllm.engines.mock.engine import MockEngine
from dynamo_trtllm.engines.mock.scheduler import MockScheduler
from dynamo_trtllm.engines.mock.stream import MAX_SEED, MockStream
from dynamo_trtllm.engines.mock.transfer_posts import TransferPosts
from dynamo_trtllm.kv_transfer.memory import MemoryRegion
from dynamo_trtllm.kv_transfer.transfer_backend import Destination
from dynamo_trtllm.protocol.clocks import Clocks
from dynamo_trtllm.protocol.cost_model import decode_features
from dynamo_trtllm.protocol.errors import EngineFailed, TransferExpired, TransferMismatch
from dynamo_trtllm.protocol.messages import KvTransferParams, Phase, ReleaseOutcome, Role
from dynamo_trtllm.protocol.streams import as_stream
from dynamo_trtllm.simulate.memory_transfers import MemoryBackend
from dynamo_trtllm.simulate.virtual_time import run_virtual, virtual_clocks
from dynamo_trtllm.testing.engine_requests import (
    ask,
    check_nothing_left,
    collect,
    prompt_of,
    started,
    tokens,
)
from tests.kit.engines import answer, prefill_params
from tests.kit.loopback_backend import LoopbackBackend
from tests.kit.waiting import SOON_S

PROMPT = prompt_of(100)  # four blocks


class GatedCarrier(LoopbackBackend):
    """A KV transfer backend that counts its fetches, which wait for a gate."""

    def __init__(self, closed: str = "") -> None:
        super().__init__()
        self.closed = closed
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()
        self.fetches = 0

    async def _pass(self, gate: str) -> None:
        if gate == self.closed:
            self.reached.set()
            await self.opened.wait()

    async def publish(
        self, transfer_id: str, regions: Sequence[MemoryRegion], **named: Any
    ) -> bytes:
        await self._pass("offer")
        return await super().publish(transfer_id, regions, **named)

    async def unpublish(self, transfer_id: str) -> None:
        await self._pass("withdraw")
        await super().unpublish(transfer_id)

    async def read(
        self, transfer_id: str, offer: bytes, to: Destination, *, timeout_s: float
    ) -> None:
        self.fetches += 1
        await self._pass("fetch")
        await super().read(transfer_id, offer, to, timeout_s=timeout_s)


class DamagingCarrier(LoopbackBackend):
    """A KV transfer backend that delivers other bytes than were offered."""

    async def read(
        self, transfer_id: str, offer: bytes, to: Destination, *, timeout_s: float
    ) -> None:
        await super().read(transfer_id, offer, to, timeout_s=timeout_s)
        for region in to.regions:
            ctypes.memset(region.address, 1, region.num_bytes)


def mock(
    role: Role = Role.AGGREGATED, *, backend: LoopbackBackend | None = None, **args: Any
) -> MockEngine:
    config = WorkerConfig(
        model_path="tiny",
        engine="mock",
        disaggregation_mode=role,
        override_engine_args={"step_s": 0, **args},
    )
    return MockEngine(
        config, instance_id=list(Role).index(role) + 1, backend=backend or LoopbackBackend()
    )


async def until(reached: Callable[[], bool]) -> None:
    for _ in range(1000):  # turns of the loop, not time
        if reached():
            return
        await asyncio.sleep(0)
    pytest.fail("it was never reached")


async def decode(
    engine: MockEngine, kv_params: KvTransferParams, prompt: array[int] = PROMPT, **sampling: Any
) -> list[int]:
    return tokens(
        await collect(engine, ask(prompt, phase=Phase.DECODE, kv_params=kv_params, **sampling))
    )


async def check_each_failed(streams: Sequence[asyncio.Task[list[int]]]) -> None:
    async with asyncio.timeout(SOON_S):
        results = await asyncio.gather(*streams, return_exceptions=True)
    assert [type(result) for result in results] == [EngineFailed] * len(streams)


async def test_dead_step_task_ends_streams_in_engine_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = mock(max_batch_size=2)
    async with started(engine):
        await engine.check()
        streams = [asyncio.create_task(answer(engine, PROMPT, max_tokens=5000)) for _ in range(3)]
        await until(lambda: (engine.stats().running, engine.stats().waiting) == (2, 1))

        def die(_: MockScheduler) -> None:
            raise RuntimeError("a broken step")

        monkeypatch.setattr(MockScheduler, "_step", die)
        await check_each_failed(streams)
        with pytest.raises(EngineFailed):
            await engine.check()
        with pytest.raises(EngineFailed):
            await answer(engine, PROMPT)
        await check_nothing_left(engine)


async def test_close_ends_running_and_waiting_streams() -> None:
    engine = mock(max_batch_size=1)
    async with started(engine):
        streams = [asyncio.create_task(answer(engine, PROMPT, max_tokens=5000)) for _ in range(3)]
        await until(lambda: (engine.stats().running, engine.stats().waiting) == (1, 2))
        await engine.aclose()
        await check_each_failed(streams)
        await check_nothing_left(engine)


async def test_close_when_a_transfer_is_held_then_it_is_withdrawn() -> None:
    prefill = mock(Role.PREFILL)
    decoder = mock(Role.DECODE)
    async with started(prefill, decoder):
        await prefill_params(prefill, PROMPT)
        assert prefill.stats().pending_kv_transfers == 1
        await prefill.aclose()
        await check_nothing_left(prefill)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"engine": "torch"}, TransferMismatch),
        ({"model": "other"}, TransferMismatch),
        ({"expires_at": 1.0}, TransferExpired),
        ({"kv_bytes": 1 << 60}, TransferMismatch),
        ({"kv_bytes": 0}, TransferMismatch),
    ],
)
async def test_decode_when_transfer_does_not_fit_then_no_fetch(
    change: dict[str, Any], error: type[Exception]
) -> None:
    backend = GatedCarrier()
    prefill = mock(Role.PREFILL)
    decoder = mock(Role.DECODE, backend=backend)
    async with started(prefill, decoder):
        kv_params = await prefill_params(prefill, PROMPT)
        wrong = msgspec.structs.replace(kv_params, **change)
        async with aclosing(
            as_stream(decoder, ask(PROMPT, phase=Phase.DECODE, kv_params=wrong))
        ) as stream:
            with pytest.raises(error):
                await anext(stream)
        assert backend.fetches == 0
        await check_nothing_left(decoder)
        assert len(await decode(decoder, kv_params)) == 8  # a refusal does not spend the transfer
        await check_nothing_left(prefill)


async def test_decode_when_layout_differs_then_no_fetch() -> None:
    backend = GatedCarrier()
    prefill = mock(Role.PREFILL)
    decoder = mock(Role.DECODE, backend=backend, kv_block_size=16)
    async with started(prefill, decoder):
        kv_params = await prefill_params(prefill, PROMPT)
        async with aclosing(
            as_stream(decoder, ask(PROMPT, phase=Phase.DECODE, kv_params=kv_params))
        ) as stream:
            with pytest.raises(TransferMismatch):
                await anext(stream)
        assert backend.fetches == 0


async def test_decode_of_damaged_kv_gives_other_tokens() -> None:
    whole = mock()
    prefill = mock(Role.PREFILL)
    decoder = mock(Role.DECODE)
    damaged = mock(Role.DECODE, backend=DamagingCarrier())
    async with started(whole, prefill, decoder, damaged):
        wanted = await answer(whole, PROMPT)
        assert await decode(decoder, await prefill_params(prefill, PROMPT)) == wanted
        assert await decode(damaged, await prefill_params(prefill, PROMPT)) != wanted


def test_no_two_seeds_give_equal_answers() -> None:
    """Otherwise a probe of a pair whose KV arrives changed may succeed, once in thousands."""
    stream: Any = SimpleNamespace(request=ask(PROMPT))
    answers = set()
    for seed in range(2 * (MAX_SEED + 1)):
        stream.seed = seed
        answers.add(tuple(MockStream.token(stream, index) for index in (3, 4, 5)))
    assert len(answers) == 2 * (MAX_SEED + 1)


async def test_drain_during_a_fetch_returns_after_withdrawal() -> None:
    backend = GatedCarrier("withdraw")
    prefill = mock(Role.PREFILL, backend=backend)
    decoder = mock(Role.DECODE)
    async with started(prefill, decoder):
        kv_params = await prefill_params(prefill, PROMPT)
        drain = asyncio.create_task(prefill.drain())
        await decode(decoder, kv_params)
        await backend.reached.wait()
        assert not drain.done()  # the backend may still read the memory
        assert prefill.stats().kv_blocks_used == 4
        backend.opened.set()
        async with asyncio.timeout(SOON_S):
            await drain
        await check_nothing_left(prefill)


async def cancelled(stream: asyncio.Task[Any]) -> None:
    stream.cancel()
    assert isinstance(
        (await asyncio.gather(stream, return_exceptions=True))[0], asyncio.CancelledError
    )


async def test_cancel_while_waiting_for_a_slot_lets_next_run() -> None:
    engine = mock(max_batch_size=1)
    async with started(engine):
        first, second = (
            asyncio.create_task(answer(engine, PROMPT, max_tokens=5000)) for _ in range(2)
        )
        await until(lambda: (engine.stats().running, engine.stats().waiting) == (1, 1))
        await cancelled(second)
        assert (engine.stats().running, engine.stats().waiting) == (1, 0)
        await cancelled(first)
        await check_nothing_left(engine)


async def test_cancel_when_the_prompt_is_half_taken_then_nothing_left() -> None:
    engine = mock(prefill_tokens_per_step=1)
    async with started(engine):
        stream = asyncio.create_task(answer(engine, prompt_of(20000)))
        await until(lambda: engine.stats().running == 1)
        for _ in range(10):
            await asyncio.sleep(0)
        assert engine.stats().running == 1
        await cancelled(stream)
        await check_nothing_left(engine)


async def test_cancel_when_the_offer_is_being_made_then_nothing_left() -> None:
    backend = GatedCarrier("offer")
    engine = mock(Role.PREFILL, backend=backend)
    async with started(engine):
        stream = asyncio.create_task(prefill_params(engine, PROMPT))
        await backend.reached.wait()
        assert engine.stats().kv_blocks_used > 0
        await cancelled(stream)
        await check_nothing_left(engine)


async def test_cancel_during_fetch_keeps_the_transfer() -> None:
    backend = GatedCarrier("fetch")
    prefill = mock(Role.PREFILL)
    decoder = mock(Role.DECODE, backend=backend)
    async with started(prefill, decoder):
        kv_params = await prefill_params(prefill, PROMPT)
        stream = asyncio.create_task(decode(decoder, kv_params))
        await backend.reached.wait()
        await cancelled(stream)
        await check_nothing_left(decoder)
        assert prefill.stats().pending_kv_transfers == 1
        prefill.release(kv_params.transfer_id, ReleaseOutcome.ABORTED)
        await check_nothing_left(prefill)


async def test_prefix_cache_leaves_only_the_rest_to_compute() -> None:
    engine = mock(enable_prefix_caching=True, prefill_tokens_per_step=1)
    async with started(engine):
        for taken in (101, 106):
            await answer(engine, PROMPT, max_tokens=2)
            assert len(engine.steps) == taken


async def test_steps_are_measured_with_their_work() -> None:
    engine = mock(
        step_s=0.001,
        prefill_token_s=1e-4,
        decode_request_s=1e-3,
        step_noise=0.1,
        prefill_tokens_per_step=60,
    )
    async with started(engine):
        await answer(engine, PROMPT, max_tokens=3)
    assert [step[1:] for step in engine.steps] == [
        (0, 0, 60, 1800.0),
        (0, 0, 40, 3200.0),
        (1, 101, 0, 0.0),
        (1, 102, 0, 0.0),
    ]
    engine._scheduler._step(0.1, {}, [])  # without any work: the time of no step
    assert len(engine.steps) == 4
    assert engine.steps[0].seconds > 0.003
    prior = engine._info.cost_prior
    assert prior is not None
    assert prior.readable() == prior
    assert prior.prefill is not None
    assert prior.prefill.predict(engine.steps[0].features) == pytest.approx(0.007)


def test_kv_transfers_are_predicted_to_take_turns() -> None:
    times = {"kv_transfer_s": 0.01, "kv_transfer_block_s": 0.002, "kv_block_size": 32}
    prior = MockArgs.model_validate(times).cost_prior
    assert prior.kv_transfer_s(1024) == pytest.approx(0.01 + 32 * 0.002)
    assert prior.kv_transfer_s(1024, other_tokens=512) == pytest.approx(0.01 + 48 * 0.002)


def test_step_costs_replace_the_times_of_steps() -> None:
    decode = [0.001, 1e-4, 0.0, 0.0, 0.0, 0.0]
    prefill = [0.002, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 0.0, 0.0, 0.5]
    args = MockArgs.model_validate({"step_costs": {"decode": decode, "prefill": prefill}})
    assert not args.is_constant
    costs = args.cost_prior
    assert costs.readable() == costs
    assert costs.decode is not None
    assert costs.decode.predict(decode_features(3, 1000)) == pytest.approx(0.0013)
    with pytest.raises(ValidationError, match="at least 10 items"):
        MockArgs.model_validate({"step_costs": {"decode": decode, "prefill": decode}})


def elastic_pair(clocks: Clocks, **args: Any) -> list[MockEngine]:
    """Return two elastic engines whose steps of 1,000 prompt tokens take 110 ms."""
    published: dict[str, Any] = {}
    config = WorkerConfig(
        model_path="mock",
        engine="mock",
        disaggregation_mode=Role.ELASTIC,
        override_engine_args={
            "step_s": 0.01,
            "prefill_token_s": 1e-4,
            "prefill_tokens_per_step": 1000,
            "max_seq_len": 21_000,
            **args,
        },
    )
    return [
        MockEngine(config, instance_id=id_, backend=MemoryBackend(published), clocks=clocks, seed=1)
        for id_ in (1, 2)
    ]


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_decode_calls_do_not_wait_for_prompts_of_elastic_engines(plan_ahead: bool) -> None:
    """So it is with vLLM: `vllm.chunk_threshold` leaves them tokens of each step."""

    async def decoded_after_s() -> float:
        clocks = virtual_clocks()
        first, second = elastic_pair(clocks, kv_transfer_s=0.3, plan_ahead=plan_ahead)
        async with started(first), started(second):
            kv_params = await prefill_params(first, PROMPT)
            # Without streams, 20 steps of 110 ms.
            long_prompt = second.generate(ask(prompt_of(20_000), max_tokens=1), lambda event: None)
            await asyncio.sleep(0.05)
            begun_s = clocks.monotonic()
            assert len(await decode(second, kv_params, max_tokens=3)) == 3
            after_s = clocks.monotonic() - begun_s
            long_prompt.cancel()
        # Steps are short while the KV is fetched, too: the stream will begin soon. So they are in
        # the step that was planned before the KV arrived.
        before_stream = [step for step in second.steps if not step.decode_requests]
        prompt_tokens = [step.prefill_tokens for step in before_stream]
        assert prompt_tokens == sorted(prompt_tokens, reverse=True)
        assert (max(prompt_tokens), min(prompt_tokens)) == (1000, ChunkSize(1000).tokens)
        return after_s

    assert run_virtual(decoded_after_s()) < 0.3 + 0.3


async def test_kv_transfers_begin_before_their_step_and_delay_it() -> None:
    posts = TransferPosts()
    first = posts.add(0.2, first_step=1)
    cancelled = posts.add(0.4, first_step=1)
    second = posts.add(0.3, first_step=2)
    cancelled.cancel()
    assert posts.begin(0) == 0.0
    assert posts.begin(1) == 0.2
    assert (first.done(), second.done()) == (True, False)
    assert posts.has_later(1)
    assert not posts.has_later(2)
    assert posts.begin(2) == 0.3
    assert second.done()
    assert not posts.has_later(1)


async def noted(order: list[str], name: str, call: Coroutine[Any, Any, Any]) -> None:
    """Await a call, and note that it has ended."""
    await call
    order.append(name)


@pytest.mark.parametrize(("stream_s", "is_prompt_first"), [(20.0, False), (40.0, True)])
def test_decode_calls_overtake_no_prompt_that_has_waited_long(
    stream_s: float, is_prompt_first: bool
) -> None:
    """As docs/queues.md says of the mock engine: after 30 s, a request goes before later ones."""

    async def ended() -> list[str]:
        first, second = elastic_pair(virtual_clocks(), max_batch_size=1)
        order: list[str] = []
        async with started(first), started(second), asyncio.TaskGroup() as group:
            kv_params = await prefill_params(first, PROMPT)
            stream = answer(second, PROMPT, max_tokens=int(stream_s / 0.01))
            group.create_task(noted(order, "stream", stream))
            await asyncio.sleep(1.0)
            group.create_task(noted(order, "prompt", answer(second, PROMPT, max_tokens=2)))
            await asyncio.sleep(1.0)
            group.create_task(noted(order, "decode call", decode(second, kv_params, max_tokens=2)))
        return order

    last = ["prompt", "decode call"] if is_prompt_first else ["decode call", "prompt"]
    assert run_virtual(ended()) == ["stream", *last]


def test_prompts_take_no_space_for_which_a_decode_call_waits() -> None:
    """vLLM does not look at requests behind the first one that lacks KV blocks."""

    async def ended() -> list[str]:
        first, second = elastic_pair(virtual_clocks(), kv_cache_blocks=12)
        order: list[str] = []
        async with started(first), started(second), asyncio.TaskGroup() as group:
            kv_params = await prefill_params(first, PROMPT)
            # Seven blocks, so there is space for the prompt and not for the decode call.
            group.create_task(noted(order, "stream", answer(second, PROMPT, max_tokens=100)))
            await asyncio.sleep(0.1)
            prompt = answer(second, prompt_of(33), max_tokens=90)
            group.create_task(noted(order, "prompt", prompt))
            group.create_task(noted(order, "decode call", decode(second, kv_params, max_tokens=80)))
        return order

    assert run_virtual(ended()) == ["stream", "decode call", "prompt"]


def test_request_after_a_cancelled_one_is_served() -> None:
    """The step that was planned for both is empty, and the next one has work."""

    async def served() -> None:
        clocks = virtual_clocks()
        config = WorkerConfig(
            model_path="mock",
            engine="mock",
            disaggregation_mode=Role.AGGREGATED,
            override_engine_args={"plan_ahead": True, "step_s": 0.01},
        )
        engine = MockEngine(config, instance_id=1, backend=MemoryBackend({}), clocks=clocks, seed=1)
        async with started(engine):
            cancelled = engine.generate(ask(PROMPT), lambda event: None)
            await asyncio.sleep(0.025)  # within a step
            cancelled.cancel()
            assert len(tokens(await collect(engine, ask(PROMPT)))) == 8

    run_virtual(served())
