"""Engines of one process on GPUs with a backend that moves host memory only: KV goes through pinned
memory.
"""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.protocol.messages import Phase, Role
from dynamo_trtllm.testing.engine_requests import (
    ask,
    check_nothing_left,
    collect,
    prompt_of,
    started,
    tokens,
)
from tests.gpu.torch.site import Site
from tests.kit.engines import answer, make, prefill_then_decode

LENGTHS = [1, 31, 32, 33, 127, 128, 129, 1000, 5000]


def make_on(site: Site, folder: Path, role: Role, number: int = 0, **args: Any) -> Engine:
    chosen = site.engine_args(**args)
    if site.gpus:
        chosen["device"] = f"cuda:{number % site.gpus}"
    return make("torch", folder, role, backend="tcp", **chosen)


async def check_nothing_staged(engine: Any) -> None:
    """A parcel is free once the copies that were queued before it was given back are done, which
    can only be asked.
    """
    buffer = engine._scheduler.transfer_buffer
    for _ in range(500):
        if all(event.query() for _, event in buffer._leaving):
            break
        await asyncio.sleep(0.01)
    assert buffer._used == sorted(
        (allocation for allocation, _ in buffer._leaving), key=lambda allocation: allocation.begin
    )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_two_calls_through_host_memory_equal_one_engine(
    site: Site, tiny: Path, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    aggregated = make_on(site, tiny, Role.AGGREGATED)
    prefill = make_on(site, tiny, Role.PREFILL)
    decode = make_on(site, tiny, Role.DECODE, 1)
    sampling: dict[str, Any] = {"max_tokens": 24, "temperature": temperature, "seed": 11}
    async with started(aggregated, prefill, decode):
        for length in LENGTHS:
            expected = await collect(aggregated, ask(prompt_of(length), **sampling))
            assert tokens(
                await prefill_then_decode(prefill, decode, prompt_of(length), **sampling)
            ) == tokens(expected), length
        for engine in (prefill, decode):
            await check_nothing_left(engine)
            await check_nothing_staged(engine)
    said = [record for record in caplog.records if "pinned host memory" in record.message]
    # each has a backend here, also the one that needs none
    assert len(said) == (3 if site.device == "cuda" else 0)


async def test_staging_for_one_prompt_makes_requests_wait(site: Site, tiny: Path) -> None:
    exact = {"dtype": "float32"}  # or sums would depend on what else is in a batch
    # 1.3 MB; 900 tokens move 1.1
    small: dict[str, Any] = {"max_seq_len": 1024, "kv_staging_gib": 0.0012, **exact}
    aggregated = make_on(site, tiny, Role.AGGREGATED, **exact)
    prefill = make_on(site, tiny, Role.PREFILL, **small)
    decode = make_on(site, tiny, Role.DECODE, 1, **small)
    prompts = [prompt_of(900, seed) for seed in range(12)]
    async with started(aggregated, prefill, decode):
        alone = [await answer(aggregated, prompt) for prompt in prompts]
        answers = await asyncio.gather(
            *(prefill_then_decode(prefill, decode, prompt) for prompt in prompts)
        )
        assert [tokens(chunks) for chunks in answers] == alone
        for engine in (prefill, decode):
            await check_nothing_left(engine)
            await check_nothing_staged(engine)


async def test_kv_after_random_cancels_is_free(site: Site, tiny: Path) -> None:
    prefill = make_on(site, tiny, Role.PREFILL)
    decode = make_on(site, tiny, Role.DECODE, 1)
    chosen = random.Random(3)

    async def one(number: int) -> None:
        calls = asyncio.create_task(
            prefill_then_decode(prefill, decode, prompt_of(chosen.randrange(1, 1500), number))
        )
        if chosen.random() < 0.3:
            await asyncio.sleep(chosen.random() / 2)
            calls.cancel()
        await asyncio.gather(calls, return_exceptions=True)

    async with started(prefill, decode):
        for begin in range(0, 200, 20):
            await asyncio.gather(*(one(number) for number in range(begin, begin + 20)))
        for engine in (prefill, decode):
            await check_nothing_left(engine)
            await check_nothing_staged(engine)
        assert await prefill_then_decode(prefill, decode, prompt_of(100))


async def test_dummy_weights_when_made_twice_then_equal(site: Site, tmp_path: Path) -> None:
    from tests.gpu.torch.site import write_gpt_oss_20b_shape

    folder = write_gpt_oss_20b_shape(tmp_path, full=False)
    engines = [
        make_on(site, folder, Role.AGGREGATED, number, load_format="dummy") for number in (0, 1)
    ]
    async with started(*engines):
        first, second = [await answer(engine, prompt_of(100), max_tokens=24) for engine in engines]
        assert first == second
        assert len(set(first)) > 1


async def test_prefill_cancelled_before_transfer_frees_staging(site: Site, tiny: Path) -> None:
    prefill = make_on(site, tiny, Role.PREFILL)
    async with started(prefill):
        for length in (10, 600, 3000):
            call = asyncio.create_task(
                collect(prefill, ask(prompt_of(length), phase=Phase.PREFILL))
            )
            await asyncio.sleep(0.02)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        for transfer_id in list(prefill.kv_connector._pending):  # type: ignore[attr-defined]
            prefill.kv_connector.release(transfer_id)  # type: ignore[attr-defined]
        await check_nothing_left(prefill)
        await check_nothing_staged(prefill)


async def test_cached_prefix_gives_equal_tokens(site: Site, tiny: Path) -> None:
    exact = {"dtype": "float32"}  # or sums would depend on where the computation begins
    plain = make_on(site, tiny, Role.AGGREGATED, enable_prefix_caching=False, **exact)
    prefill = make_on(site, tiny, Role.PREFILL, **exact)
    decode = make_on(site, tiny, Role.DECODE, 1, **exact)
    async with started(plain, prefill, decode):
        for length in (1000, 1000, 1500):
            expected = await answer(plain, prompt_of(length))
            assert tokens(await prefill_then_decode(prefill, decode, prompt_of(length))) == expected
        last = (await collect(prefill, ask(prompt_of(1500), phase=Phase.PREFILL)))[-1]
        assert last.stats is not None
        assert last.stats.cached_tokens == 1472
