"""Whatever TensorRT-LLM makes of an abort, a cancelled request leaves nothing in the adapter or the engine below."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.messages import Phase
from dynamo_trtllm.streams import as_stream
from tests.engines import (
    answer,
    ask,
    check_nothing_left,
    check_stats,
    collect,
    prefill_params,
    prefill_then_decode,
    prompt_of,
    release,
    tokens,
)
from tests.trtllm_engines import TrtllmEngines, check_engines_idle, start_engines

PROMPT = prompt_of(70)
ABORTS = ["", "abort_never_answers", "abort_lost", "abort_slow", "-abort_drops_waiting", "abort_keeps_context"]


@pytest.mark.parametrize("trap", ABORTS)
async def test_cancel_at_every_phase_then_nothing_left(trap: str, gpt_oss: Path, package: Any) -> None:
    args: dict[str, Any] = {"max_batch_size": 1}
    if trap in ("abort_lost", "abort_keeps_context"):  # then the vendor's own time-out frees what nobody fetched
        args["cache_transceiver_config"] = {
            "backend": "UCX",
            "max_tokens_in_buffer": 8192,
            "kv_transfer_timeout_ms": 4000,
        }
    async with start_engines(package, gpt_oss, **args) as engines:
        with engines.turned(*([trap] if trap else [])):
            tokens_left = 30 if trap == "abort_lost" else 6000  # the vendor ends them itself, or only an abort does
            await cancel_while_waiting_and_running(engines, tokens_left)
            await cancel_both_legs(engines, tokens_left)
            for engine in engines.all():
                await check_nothing_left(engine)
        await check_engines_idle(package)
        expected = await answer(engines.aggregated, PROMPT)
        assert tokens(await prefill_then_decode(engines.prefill, engines.decode, PROMPT)) == expected


async def cancel_while_waiting_and_running(engines: TrtllmEngines, max_tokens: int) -> None:
    """One streams, two wait for its place: all three are cancelled."""
    engine = engines.aggregated
    async with aclosing(as_stream(engine, ask(PROMPT, max_tokens=max_tokens))) as running:
        await anext(running)
        waiting = [asyncio.create_task(answer(engine, prompt_of(40, n), max_tokens=50)) for n in range(2)]
        await asyncio.sleep(0.02)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def cancel_both_legs(engines: TrtllmEngines, max_tokens: int) -> None:
    prefilling = asyncio.create_task(collect(engines.prefill, ask(prompt_of(500), phase=Phase.PREFILL)))
    await asyncio.sleep(0)
    prefilling.cancel()
    await asyncio.gather(prefilling, return_exceptions=True)
    for steps in (0, 1, 3):
        kv_params = await prefill_params(engines.prefill, PROMPT, max_tokens=max_tokens)
        decoding = ask(PROMPT, phase=Phase.DECODE, kv_params=kv_params, max_tokens=max_tokens)
        async with aclosing(as_stream(engines.decode, decoding)) as stream:
            if steps == 0:
                first = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0)
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            for _ in range(steps):
                await anext(stream)
        release(engines.prefill, kv_params)


async def test_transfer_when_refused_then_the_vendor_is_asked_to_let_go(engines: TrtllmEngines) -> None:
    kv_params = await prefill_params(engines.prefill, PROMPT)
    await check_stats(engines.prefill, tickets_held=1, kv_blocks_used=3)
    release(engines.prefill, kv_params)
    await check_nothing_left(engines.prefill)
    await check_engines_idle(engines.package)
