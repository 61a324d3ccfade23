"""Test what an engine that inherits from `TransfersKv` promises of prefill and decode calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, NamedTuple

import msgspec
import pytest

from dynamo_trtllm.engines.capabilities import TransfersKv
from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.protocol.errors import KvTransferError, TransferExpired, TransferMismatch
from dynamo_trtllm.protocol.messages import (
    FinishReason,
    Phase,
    ReleaseOutcome,
    Role,
    token_ids,
)
from dynamo_trtllm.protocol.number_types import ceil_div
from dynamo_trtllm.protocol.streams import as_stream
from dynamo_trtllm.testing.contract_base import ContractBase
from dynamo_trtllm.testing.engine_pool import EnginePool
from dynamo_trtllm.testing.engine_requests import (
    LIMITS,
    call_of,
    cancel_after,
    check_stats,
    collect,
    ended_with,
    prefill,
    release,
    run_both,
    tokens,
    within,
)

_NO_SETTINGS: Mapping[str, Any] = {}


class Pair(NamedTuple):
    """A prefill and a decode engine."""

    prefill: Engine
    decode: Engine


class KvTransferContract(ContractBase):
    """Tests of prefill and decode calls."""

    @asynccontextmanager
    async def started_pair(
        self,
        pool: EnginePool,
        of_prefill: Mapping[str, Any] = _NO_SETTINGS,
        of_decode: Mapping[str, Any] = _NO_SETTINGS,
    ) -> AsyncIterator[Pair]:
        """Start a prefill and a decode engine.

        Args:
            pool: the engines of the class.
            of_prefill: settings of the prefill engine.
            of_decode: settings of the decode engine.
        """
        self.skip_without_capability(pool, TransfersKv)
        pair = Pair(pool.open(Role.PREFILL, **of_prefill), pool.open(Role.DECODE, **of_decode))
        async with pool.started(*pair):
            yield pair

    async def test_two_calls_equal_one_call_and_free_both_sides(self, pool: EnginePool) -> None:
        async with self.started_pair(pool) as pair:
            request = pool.ask(pair.decode, 100, max_tokens=20)
            chunks = await run_both(*pair, request)
            aggregated = pool.open()
            async with pool.started(aggregated):
                expected = tokens(await collect(aggregated, request))
            assert tokens(chunks) == expected, (
                "a prefill call and a decode call give the tokens of one aggregated call"
            )
            stats = chunks[-1].stats
            assert stats is not None, "the last chunk of a stream has stats"
            assert stats.kv_bytes > 0, "the stats of a decode call have kv_bytes"
            assert stats.kv_transfer_s > 0, "the stats of a decode call have kv_transfer_s"
            assert stats.transport, "the stats of a decode call name the transport"
            assert chunks[0].stats is not None, "the first chunk of a decode call has stats"
            for engine in pair:
                await pool.check_nothing_left(engine)

    async def test_resumed_pair_equals_undisturbed_run(self, pool: EnginePool) -> None:
        async with self.started_pair(pool) as pair:
            whole = pool.ask(pair.decode, 70, max_tokens=24)
            undisturbed = tokens(await run_both(*pair, whole))
            rest = msgspec.structs.replace(
                whole,
                token_ids=whole.token_ids + token_ids(undisturbed[:3]),
                sampling=msgspec.structs.replace(whole.sampling, max_tokens=21),
                num_resumed_output_tokens=3,
            )
            assert tokens(await run_both(*pair, rest)) == undisturbed[3:], (
                "a greedy answer that is resumed after 3 tokens continues as if it had not been"
                " interrupted"
            )

    async def test_prefill_of_one_token_has_no_transfer(self, pool: EnginePool) -> None:
        self.skip_without_capability(pool, TransfersKv)
        engine = pool.open(Role.PREFILL)
        async with pool.started(engine):
            request = call_of(pool.ask(engine, 40, max_tokens=1), Phase.PREFILL)
            chunks = await collect(engine, request)
            last = chunks[-1]
            promise = (
                "a prefill call with max_tokens=1 ends with its token and LENGTH, without transfer"
            )
            assert len(tokens(chunks)) == 1, promise
            assert last.finish_reason is FinishReason.LENGTH, promise
            await pool.check_nothing_left(engine)

    async def test_prefill_cancelled_at_any_moment_leaves_nothing(self, pool: EnginePool) -> None:
        self.skip_without_capability(pool, TransfersKv)
        engine = pool.open(Role.PREFILL)
        async with pool.started(engine):
            for turns in range(25):
                request = call_of(pool.ask(engine, 40), Phase.PREFILL)
                await cancel_after(engine, request, turns)
            await pool.check_nothing_left(engine)

    async def test_timings_phases_fit_before_first_chunk(self, pool: EnginePool) -> None:
        async with self.started_pair(pool) as pair:
            request = pool.ask(pair.decode, 70)
            kv_params = await prefill(pair.prefill, request)
            begun_s = time.monotonic()
            call = call_of(request, Phase.DECODE, kv_params)
            async with aclosing(as_stream(pair.decode, call)) as stream:
                async with within(LIMITS.answer_s, "a decode call has a first chunk"):
                    timings = (await anext(stream)).stats
            elapsed_s = time.monotonic() - begun_s
            assert timings is not None, "the first chunk of a decode call has stats"
            # A name with a dot is a part of another phase.
            more_s = [seconds for name, seconds in timings.more.items() if "." not in name]
            phases_s = timings.queue_s + timings.prefill_s + timings.kv_transfer_s + sum(more_s)
            assert 0 < phases_s <= elapsed_s, (
                f"the phases of a call do not overlap: together {phases_s} s of {elapsed_s} s"
            )
            release(pair.prefill, kv_params)

    async def test_decode_worker_serves_aggregated_requests(self, pool: EnginePool) -> None:
        async with self.started_pair(pool) as pair:
            if not pool.info(pair.decode).can_aggregate:
                pytest.skip("EngineInfo.can_aggregate is False")
            request = pool.ask(pair.decode, 70)
            aggregated = tokens(await collect(pair.decode, request))
            disaggregated = tokens(await run_both(*pair, request))
            assert aggregated == disaggregated, (
                "a decode engine with can_aggregate answers aggregated requests"
            )
            await pool.check_nothing_left(pair.decode)

    async def test_transfer_blocks_stay_counted_until_release(self, pool: EnginePool) -> None:
        async with self.started_pair(pool) as pair:
            requests = [pool.ask(pair.prefill, 100, seed=seed) for seed in (1, 2)]
            transfers = [await prefill(pair.prefill, request) for request in requests]
            block_tokens = pool.info(pair.prefill).layout.block_tokens
            blocks = 2 * ceil_div(len(requests[0].token_ids), block_tokens)
            await check_stats(
                pair.prefill,
                pending_kv_transfers=2,
                pending_kv_blocks=blocks,
                kv_blocks_used=blocks,
            )
            for kv_params in transfers:
                assert isinstance(pair.prefill, TransfersKv)
                assert pair.prefill.is_pending(kv_params.transfer_id), (
                    "is_pending() is True until a transfer is released"
                )
            # release() is idempotent.
            for kv_params in (*transfers, *transfers):
                release(pair.prefill, kv_params)
            await pool.check_nothing_left(pair.prefill)

    async def test_drain_waits_until_transfers_are_released(self, pool: EnginePool) -> None:
        async with self.started_pair(pool) as pair:
            kv_params = await prefill(pair.prefill, pool.ask(pair.prefill, 100))
            drain = asyncio.create_task(pair.prefill.drain())
            await asyncio.sleep(0.05)
            is_early = drain.done()
            release(pair.prefill, kv_params)
            async with within(LIMITS.soon_s, "drain() returns when all KV is released"):
                await drain
            assert not is_early, "drain() waits until no KV of a transfer is held"

    async def test_decode_of_released_kv_fails(self, pool: EnginePool) -> None:
        if not self.detects_released_kv():
            pytest.skip("detects_released_kv() is False")
        async with self.started_pair(pool) as pair:
            request = pool.ask(pair.decode, 100)
            kv_params = await prefill(pair.prefill, request)
            release(pair.prefill, kv_params)
            await pool.check_nothing_left(pair.prefill)
            error = await ended_with(pair.decode, call_of(request, Phase.DECODE, kv_params))
            assert isinstance(error, KvTransferError), (
                f"a decode call for released KV ends with KvTransferError, not {error!r}"
            )
            await pool.check_nothing_left(pair.decode)

    async def test_expired_transfer_frees_blocks_and_rejects_decode(self, pool: EnginePool) -> None:
        self.skip_without_settings("ttl_s")
        async with self.started_pair(pool, of_prefill={"ttl_s": 0.05}) as pair:
            request = pool.ask(pair.decode, 100)
            kv_params = await prefill(pair.prefill, request)
            await pool.check_nothing_left(pair.prefill)
            error = await ended_with(pair.decode, call_of(request, Phase.DECODE, kv_params))
            assert isinstance(error, TransferExpired), (
                f"a decode call for expired KV ends with TransferExpired, not {error!r}"
            )
            await pool.check_nothing_left(pair.decode)

    async def test_decode_when_layout_differs_then_refused_by_name(self, pool: EnginePool) -> None:
        self.skip_without_settings("kv_block_size")
        of_prefill = {"kv_block_size": 32}
        of_decode = {"kv_block_size": 16}
        async with self.started_pair(pool, of_prefill, of_decode) as pair:
            request = pool.ask(pair.decode, 100)
            kv_params = await prefill(pair.prefill, request)
            error = await ended_with(pair.decode, call_of(request, Phase.DECODE, kv_params))
            assert isinstance(error, TransferMismatch), (
                f"a decode call for another layout ends with TransferMismatch, not {error!r}"
            )
            assert error.field == "layout.block_tokens", (
                f"TransferMismatch names the field layout.block_tokens, not {error.field}"
            )
            await pool.check_nothing_left(pair.decode)

    async def test_cancelled_decode_leaves_nothing(self, pool: EnginePool) -> None:
        async with self.started_pair(pool) as pair:
            request = pool.ask(pair.decode, 100, max_tokens=500)
            kv_params = await prefill(pair.prefill, request)
            call = call_of(request, Phase.DECODE, kv_params)
            async with aclosing(as_stream(pair.decode, call)) as stream:
                async with within(LIMITS.answer_s, "a decode call has a first chunk"):
                    await anext(stream)
            await pool.check_nothing_left(pair.decode)
            release(pair.prefill, kv_params, ReleaseOutcome.FETCHED)
            await pool.check_nothing_left(pair.prefill)
