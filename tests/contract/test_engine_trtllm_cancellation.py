"""Whatever TensorRT-LLM makes of an abort, a cancelled request leaves nothing in the adapter or the
engine below.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.protocol.messages import FinishReason, Phase, Role
from dynamo_trtllm.protocol.streams import as_stream
from dynamo_trtllm.testing.engine_requests import (
    ask,
    cancel_after,
    check_nothing_left,
    check_stats,
    collect,
    prompt_of,
    release,
    started,
    tokens,
)
from tests.kit.engines import TRTLLM_TTL_S, answer, make, prefill_params, prefill_then_decode
from tests.kit.fake_packages import fake_tensorrt_llm
from tests.kit.trtllm_engines import TrtllmEngines, check_engines_idle, start_engines
from tests.kit.waiting import SOON_S

PROMPT = prompt_of(70)
ABORTS = ["", "abort_never_answers", "abort_lost", "abort_slow", "-abort_drops_waiting"]


@pytest.mark.parametrize("trap", ABORTS)
async def test_cancel_at_every_phase_then_nothing_left(
    trap: str, gpt_oss: Path, package: Any
) -> None:
    async with start_engines(package, gpt_oss, max_batch_size=1) as engines:
        with engines.turned(*([trap] if trap else [])):
            # the vendor ends them itself, or only an abort does
            tokens_left = 10 if trap == "abort_lost" else 6000
            await cancel_while_waiting_and_running(engines, tokens_left)
            await cancel_both_calls(engines, tokens_left)
            for engine in engines.all():
                await check_nothing_left(engine)
        await check_engines_idle(package)
        expected = await answer(engines.aggregated, PROMPT)
        assert (
            tokens(await prefill_then_decode(engines.prefill, engines.decode, PROMPT)) == expected
        )


async def test_cancel_when_abort_raises_then_request_ends_by_itself(engines: TrtllmEngines) -> None:
    with engines.turned("abort_fails"):
        async with aclosing(as_stream(engines.aggregated, ask(PROMPT, max_tokens=10))) as stream:
            await anext(stream)
        await check_nothing_left(engines.aggregated)
    await engines.aggregated.check()


async def cancel_while_waiting_and_running(engines: TrtllmEngines, max_tokens: int) -> None:
    """One streams, two wait for its place: all three are cancelled."""
    engine = engines.aggregated
    async with aclosing(as_stream(engine, ask(PROMPT, max_tokens=max_tokens))) as running:
        await anext(running)
        waiting = [
            asyncio.create_task(answer(engine, prompt_of(40, n), max_tokens=10)) for n in range(2)
        ]
        await asyncio.sleep(0.02)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def cancel_both_calls(engines: TrtllmEngines, max_tokens: int) -> None:
    prefilling = asyncio.create_task(
        collect(engines.prefill, ask(prompt_of(500), phase=Phase.PREFILL))
    )
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


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc29"])
async def test_aborted_transfer_holds_kv_until_library_timeout(version: str, gpt_oss: Path) -> None:
    with fake_tensorrt_llm(version) as package:
        prefill = make("trtllm", gpt_oss, Role.PREFILL)
        async with started(prefill):
            kv_params = await prefill_params(prefill, PROMPT)
            release(prefill, kv_params)
            await check_stats(
                prefill, running=0, pending_kv_transfers=1, pending_kv_blocks=3, kv_blocks_used=3
            )
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(TRTLLM_TTL_S / 2):
                    await prefill.drain()
            await check_used(package, 3)
            await check_nothing_left(prefill)
            await check_used(package, 0)


@pytest.mark.parametrize("version", ["1.1.0"])
async def test_aborted_transfer_is_leaked_when_kv_is_never_freed(
    version: str, gpt_oss: Path
) -> None:
    with fake_tensorrt_llm(version) as package:
        prefill = make("trtllm", gpt_oss, Role.PREFILL)
        async with started(prefill):
            for aborted in (1, 2):
                release(prefill, await prefill_params(prefill, prompt_of(70, seed=aborted)))
                await asyncio.wait_for(prefill.drain(), SOON_S)
                leaked = 3 * aborted
                await check_stats(
                    prefill, pending_kv_transfers=0, leaked_kv_blocks=leaked, kv_blocks_used=leaked
                )
            await check_used(package, 6)


async def test_prefill_ended_by_stop_word_holds_kv_until_timeout(engines: TrtllmEngines) -> None:
    token, *_ = await answer(engines.aggregated, PROMPT)
    with engines.package.standin.traps.turned("not_finished"):
        (last,) = await collect(
            engines.prefill, ask(PROMPT, phase=Phase.PREFILL, stop_token_ids=(token,))
        )
    assert (list(last.token_ids), last.finish_reason, last.kv_params) == (
        [token],
        FinishReason.STOP,
        None,
    )
    await check_stats(engines.prefill, running=0, pending_kv_transfers=1, kv_blocks_used=3)
    await check_nothing_left(engines.prefill)
    await check_engines_idle(engines.package)


@pytest.mark.parametrize("turns", [0, 1, 3])
@pytest.mark.parametrize(("version", "transceiver"), [("1.2.1", "UCX"), ("1.3.0rc29", "NIXL")])
async def test_decode_cancelled_before_submission_frees_prefill_kv(
    version: str, transceiver: str, turns: int, gpt_oss: Path
) -> None:
    """The library's own timeout would free it after ten minutes."""
    with fake_tensorrt_llm(version) as package:
        prefill, decode = (
            make("trtllm", gpt_oss, role, ttl_s=600.0, transceiver=transceiver)
            for role in (Role.PREFILL, Role.DECODE)
        )
        async with started(prefill, decode):
            kv_params = await prefill_params(prefill, PROMPT, max_tokens=6000)
            await check_used(package, 3)
            await cancel_after(
                decode, ask(PROMPT, phase=Phase.DECODE, kv_params=kv_params, max_tokens=6000), turns
            )
            await check_used(package, 0)
            await asyncio.wait_for(decode.drain(), SOON_S)


async def check_used(package: Any, blocks: int) -> None:
    """Wait until the fake itself uses this number of KV blocks. Fail after a timeout."""
    deadline = time.monotonic() + SOON_S
    while True:
        used = sum(stats.kv_blocks_used for stats in package.standin.core.live_stats())
        if used == blocks or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.01)
    assert used == blocks
