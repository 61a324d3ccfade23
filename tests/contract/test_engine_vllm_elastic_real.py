"""Two elastic workers over the real vLLM, on this CPU or a GPU, and a router as a frontend has it.

Run with `pytest -m vllm`. The engines are loaded once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.engines.vllm.engine import VllmEngine
from dynamo_trtllm.protocol.cost_model import StepSample
from dynamo_trtllm.protocol.shares import Shares
from dynamo_trtllm.testing.engine_requests import (
    ask,
    check_nothing_left,
    collect,
    prompt_of,
    release,
    run_both,
    tokens,
)
from dynamo_trtllm.worker.cost_fit import CostFit
from tests.contract.vllm_real import (
    engine_arguments,
    save_byte_tokenizer,
    save_windowed,
    vllm_environment,
)
from tests.integration.elastic_workers import OUTPUT_TOKENS, Elastic, elastic, prompt_of_seed
from tests.kit.engines import answer, prefill_params
from tests.kit.waiting import SOON_S

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # the vendor's
]

# A small cache: KV to transfer may take 38 of its 96 blocks.
BLOCK_TOKENS = 32
BLOCKS = 96
STEP_TOKENS = 512
ARGUMENTS = {
    "block_size": BLOCK_TOKENS,
    "num_gpu_blocks_override": BLOCKS,
    "max_model_len": 1536,
    "max_num_batched_tokens": STEP_TOKENS,
    "enable_prefix_caching": False,
}
PROMPTS = 10
SPLIT = Shares(1.0, 0.0), Shares(0.0, 1.0)
EVEN = Shares(1.0, 1.0), Shares(1.0, 1.0)


@dataclass
class Running:
    """Elastic workers, their engines, and the answers to whole requests that run alone."""

    workers: Elastic
    engines: list[VllmEngine]
    expected: list[list[int]]  # of the prompts of the router
    expected_direct: list[list[int]]  # of the prompts of engines
    steps: list[StepSample] = field(default_factory=list)  # of both engines


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = save_windowed(tmp_path_factory.mktemp("models") / "windowed", window=48)
    save_byte_tokenizer(folder)
    engines: list[VllmEngine] = []
    steps: list[StepSample] = []
    start = VllmEngine.start
    take = CostFit.take

    async def noted_start(engine: VllmEngine) -> Any:
        engines.append(engine)
        return await start(engine)

    def noted_take(fit: CostFit, samples: Iterable[StepSample], *more: Any) -> Any:
        found = list(samples)
        steps.extend(found)
        return take(fit, found, *more)

    with vllm_environment() as patch:
        patch.setattr(VllmEngine, "start", noted_start)
        patch.setattr(CostFit, "take", noted_take)
        args = engine_arguments(**ARGUMENTS)
        async with elastic(folder, "vllm", override_engine_args=args) as workers:
            yield Running(workers, engines, *await whole_answers(engines[0]), steps)


async def whole_answers(engine: Engine) -> tuple[list[list[int]], list[list[int]]]:
    """Return what an engine answers to whole requests, one at a time.

    They have the prompts of the router, and those of calls to engines.
    """
    router = [
        await answer(engine, prompt_of_seed(seed), max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        for seed in range(PROMPTS)
    ]
    return router, [await answer(engine, direct_prompt(seed)) for seed in range(PROMPTS)]


def direct_prompt(seed: int) -> Any:
    return prompt_of(90 + 7 * seed, seed)


async def test_80_interleaved_calls_have_the_answers_of_one_engine(running: Running) -> None:
    """A quarter goes from one engine to the other one, a quarter back, and half runs on one."""
    first, second = running.engines
    slots = asyncio.Semaphore(8)  # as many as the cache has space for

    async def one(number: int) -> list[int]:
        request = ask(direct_prompt(number % PROMPTS))
        async with slots:
            match number % 4:
                case 0:
                    return tokens(await run_both(first, second, request))
                case 1:
                    return tokens(await run_both(second, first, request))
                case 2:
                    return tokens(await collect(first, request))
                case _:
                    return tokens(await collect(second, request))

    answers = await asyncio.gather(*map(one, range(80)))
    assert answers == [running.expected_direct[number % PROMPTS] for number in range(80)]
    for engine in running.engines:
        await check_nothing_left(engine)


async def test_prompts_have_large_steps_while_kv_awaits_its_transfer(running: Running) -> None:
    """vLLM keeps a prefill call among its requests until its KV is fetched."""
    engine = running.engines[0]
    kv_params = await prefill_params(engine, direct_prompt(1))
    try:
        await check_large_steps(engine, running.steps)
    finally:
        release(engine, kv_params)


async def check_large_steps(engine: Engine, steps: list[StepSample]) -> None:
    """Check that prompts have larger steps than beside streams. Not each step is a sample."""
    steps.clear()
    seeds = itertools.count(41)
    async with asyncio.timeout(SOON_S):
        while not any(step.prefill_tokens >= STEP_TOKENS // 2 for step in steps):
            await collect(engine, ask(prompt_of(1400, next(seeds)), max_tokens=1))
            # A worker reads the times of steps a little later.
            await asyncio.sleep(0.05)


async def test_answers_are_equal_while_shares_change(running: Running) -> None:
    workers = running.workers
    pairs: Counter[tuple[int | None, int | None]] = Counter()
    has_ended = False
    most_blocks = 0

    async def change() -> None:
        for shares in itertools.cycle((SPLIT, EVEN, SPLIT[::-1])):
            if has_ended:
                return
            await workers.share(shares)
            await asyncio.sleep(0.2)

    async def watch_blocks() -> None:
        nonlocal most_blocks
        while not has_ended:
            blocks = max(engine.stats().pending_kv_blocks for engine in running.engines)
            most_blocks = max(most_blocks, blocks)
            await asyncio.sleep(0.002)

    async def one(seed: int) -> list[int]:
        answered, timeline = await workers.ask(seed)
        pairs[timeline.prefill_instance, timeline.decode_instance] += 1
        return answered

    background = [asyncio.create_task(change()), asyncio.create_task(watch_blocks())]
    answers = []
    for _ in range(4):
        answers += await asyncio.gather(*(one(seed % PROMPTS) for seed in range(20)))
    has_ended = True
    await asyncio.gather(*background)
    assert answers == running.expected * 8
    # KV went in both directions, and never took more than its part of the cache.
    assert {tuple(workers.ids), tuple(workers.ids[::-1])} <= pairs.keys()
    assert 0 < most_blocks <= 0.4 * BLOCKS
    for engine in running.engines:
        await check_nothing_left(engine)


async def test_prompts_are_computed_while_streams_run(running: Running) -> None:
    engine = running.engines[0]
    steps = running.steps
    await check_large_steps(engine, steps)

    steps.clear()
    stream = ask(prompt_of(60, 42), max_tokens=600, ignore_eos=True)
    streaming = asyncio.create_task(collect(engine, stream))
    await until(lambda: any(step.decode_requests for step in steps))
    await collect(engine, ask(prompt_of(1400, 51), max_tokens=1))
    assert not streaming.done()
    await streaming

    # How many tokens a step has depends on its time, so on this machine.
    await until(lambda: any(step.decode_requests and step.prefill_tokens for step in steps))


async def until(is_true: Callable[[], bool]) -> None:
    """Wait until something is true, for example until a worker has read the times of its steps."""
    async with asyncio.timeout(SOON_S):
        while not is_true():  # noqa: ASYNC110  # the engine has no event for it
            await asyncio.sleep(0.01)
