"""Test what an engine promises of its life: start, statistics, drain, shutdown, sleep."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import pytest

from dynamo_trtllm.engines.capabilities import (
    MAX_STEPS,
    ChecksHealth,
    MeasuresSteps,
    PublishesKvEvents,
    Sleeps,
)
from dynamo_trtllm.engines.engine_interface import Engine, EngineInfo, EngineStats
from dynamo_trtllm.engines.method_checks import check_engine_class
from dynamo_trtllm.protocol.errors import EngineFailed, EngineNotReady
from dynamo_trtllm.protocol.kv_events import BlocksStored, KvEvent
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.testing.contract_base import ContractBase
from dynamo_trtllm.testing.engine_pool import EnginePool
from dynamo_trtllm.testing.engine_requests import (
    LIMITS,
    ask,
    collect,
    ended_with,
    prompt_of,
    tokens,
    within,
)
from dynamo_trtllm.testing.stream_record import StreamRecord


def _check_counters(stats: EngineStats) -> None:
    assert isinstance(stats, EngineStats), f"stats() returns an EngineStats, not {stats!r}"
    negative = [name for name, value in asdict(stats).items() if value < 0]
    assert not negative, f"counters of stats() are not negative: {', '.join(negative)}"


class LifecycleContract(ContractBase):
    """Tests of start, statistics, drain, shutdown and sleep."""

    async def test_methods_have_the_parameters_of_the_interface(self, pool: EnginePool) -> None:
        check_engine_class(pool.engine_class())

    async def test_start_returns_what_the_engine_registers(self, pool: EnginePool) -> None:
        engine = pool.open()
        async with pool.started(engine):
            info = pool.info(engine)
            assert isinstance(info, EngineInfo), f"start() returns an EngineInfo, not {info!r}"
            assert all(token_id < info.vocab_size for token_id in info.eos_token_ids), (
                "eos_token_ids are below vocab_size"
            )

    async def test_stats_count_running_requests_only(self, pool: EnginePool) -> None:
        engine = pool.open()
        async with pool.started(engine):
            stream = StreamRecord(engine, pool.ask(engine, 40, max_tokens=500))
            await stream.wait_for_events(1)
            stats = engine.stats()
            _check_counters(stats)
            if not stream.has_ended:
                assert stats.running + stats.waiting >= 1, (
                    "stats() counts a request as running or waiting until its stream ends"
                )
            # An engine that does not know its number of blocks reports 0.
            if stats.kv_blocks_total:
                assert stats.kv_blocks_used <= stats.kv_blocks_total, (
                    "kv_blocks_used is at most kv_blocks_total"
                )
            stream.handle.cancel()
            await pool.check_nothing_left(engine)

    async def test_drain_waits_until_no_request_runs(self, pool: EnginePool) -> None:
        engine = pool.open()
        async with pool.started(engine):
            stream = StreamRecord(engine, pool.ask(engine, 40, max_tokens=500))
            await stream.wait_for_events(1)
            drain = asyncio.create_task(engine.drain())
            await asyncio.sleep(0.05)
            is_early = drain.done() and not stream.has_ended
            stream.handle.cancel()
            async with within(LIMITS.soon_s, "drain() returns when no request runs"):
                await drain
            assert not is_early, "drain() waits until running requests have ended"

    async def test_close_ends_running_streams_and_is_idempotent(self, pool: EnginePool) -> None:
        never_started = self.create_engine(Role.AGGREGATED)
        _check_counters(never_started.stats())
        await self._close(never_started)
        engine = self.create_engine(Role.AGGREGATED)
        try:
            info = await engine.start()
            request = ask(prompt_of(40, vocab_size=info.vocab_size), max_tokens=500)
            stream = StreamRecord(engine, request)
            await stream.wait_for_events(1)
        finally:
            await self._close(engine)
        await asyncio.sleep(0.05)  # the last event may come in the next turns of the event loop
        assert stream.has_ended, "aclose() ends running streams before it returns"
        last = stream.events[-1]
        assert not isinstance(last, Exception) or isinstance(last, EngineFailed), (
            f"aclose() ends running streams with EngineFailed, not {last!r}"
        )
        await self._close(engine)
        error = await ended_with(engine, request)
        assert isinstance(error, EngineFailed | EngineNotReady), (
            f"after aclose(), a stream ends with EngineFailed or EngineNotReady, not {error!r}"
        )
        if isinstance(engine, ChecksHealth):
            with pytest.raises(EngineFailed):
                await engine.check()

    async def _close(self, engine: Engine) -> None:
        async with within(LIMITS.close_s, "aclose() returns"):
            await engine.aclose()

    async def test_steps_are_in_one_bounded_deque(self, pool: EnginePool) -> None:
        self.skip_without_capability(pool, MeasuresSteps)
        engine = pool.open()
        async with pool.started(engine):
            assert isinstance(engine, MeasuresSteps)
            await collect(engine, pool.ask(engine, 40))
            # Engines that learn of steps from reports of a library may have measured none yet.
            steps = engine.steps
            assert engine.steps is steps, (
                "`steps` is always the same deque, which its reader empties"
            )
            assert len(steps) <= MAX_STEPS, f"`steps` has at most {MAX_STEPS} steps"
            assert all(step.seconds >= 0 for step in steps), "a step takes time"

    async def test_sleep_and_wake_give_the_same_answer(self, pool: EnginePool) -> None:
        self.skip_without_capability(pool, Sleeps)
        engine = pool.open()
        async with pool.started(engine):
            assert isinstance(engine, Sleeps)
            if engine.sleep_obstacle:
                pytest.skip(f"the engine can't sleep: {engine.sleep_obstacle}")
            request = pool.ask(engine, 40)
            before = tokens(await collect(engine, request))
            await engine.sleep()
            await engine.wake()
            after = tokens(await collect(engine, request))
            assert after == before, "an engine answers as before after sleep() and wake()"

    async def test_kv_events_report_the_blocks_of_a_prompt(self, pool: EnginePool) -> None:
        self.skip_without_capability(pool, PublishesKvEvents)
        self.skip_without_settings("enable_prefix_caching")
        engine = pool.open(enable_prefix_caching=True)
        async with pool.started(engine):
            assert isinstance(engine, PublishesKvEvents)
            events: list[KvEvent] = []
            engine.start_kv_events(events.extend)
            request = pool.ask(engine, 100)
            await collect(engine, request)
            again = await collect(engine, request)
            await pool.check_nothing_left(engine)
            stored = [
                token_id
                for event in events
                if isinstance(event, BlocksStored)
                for block in event.blocks
                for token_id in block.token_ids
            ]
            block_tokens = pool.info(engine).layout.block_tokens
            assert list(request.token_ids[:block_tokens]) == stored[:block_tokens], (
                "KV events report the full blocks of a prompt, the first block first"
            )
            stats = again[-1].stats
            assert stats is not None
            assert stats.cached_tokens >= block_tokens, (
                "a repeated prompt reuses the reported blocks, and `cached_tokens` counts them"
            )
