"""One request over its calls, on the in-process plane: what is sent where, what is released, what
is retried.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

import pytest

from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.generation_events import RouterOptions
from dynamo_trtllm.frontend.routing.pair_breakers import BreakerLimits, PairBreakers, PairState
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.protocol.errors import (
    Disconnected,
    Draining,
    DynamoError,
    MigrationFailed,
    NoInstances,
    NonFinite,
    Overloaded,
    RequestRejected,
    StreamIncomplete,
    TransferFailed,
    TransferRejected,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    OutputFormat,
    Phase,
    ReleaseKv,
    ReleaseOutcome,
    Role,
    StructuredOutput,
    token_ids,
)
from tests.kit.generator_streams import routed_stream
from tests.kit.routing import (
    DECODE_STATS,
    FINISHED,
    HANG,
    PREFILL_STATS,
    Cluster,
    kv_chunk,
    request,
)
from tests.kit.waiting import SOON_S


async def test_generate_by_a_pair_returns_tokens_and_trace(cluster: Cluster) -> None:
    prefill = await cluster.add(1, Role.PREFILL, [kv_chunk("t1")])
    decode = await cluster.add(2, Role.DECODE, FINISHED)
    trace = ChoiceTimeline()
    assert await cluster.tokens(trace) == [10, 11, 12, 13]
    assert [(r.phase, r.kv_params) for r in prefill.requests] == [(Phase.PREFILL, None)]
    assert prefill.requests[0].kv_receivers == (2,)
    call = decode.requests[0]
    assert call.phase is Phase.DECODE
    assert call.kv_params is not None
    assert call.kv_params.transfer_id == "t1"
    assert call.token_ids == token_ids([1, 2, 3])
    assert trace == ChoiceTimeline(
        prefill_instance=1,
        decode_instance=2,
        prefill_stats=PREFILL_STATS,
        decode_stats=DECODE_STATS,
    )


async def test_generate_by_aggregated_worker_makes_one_call(cluster: Cluster) -> None:
    worker = await cluster.add(3, Role.AGGREGATED, FINISHED)
    trace = ChoiceTimeline()
    assert await cluster.tokens(trace) == [10, 11, 12, 13]
    assert [(r.phase, r.kv_params) for r in worker.requests] == [(Phase.AGGREGATED, None)]
    assert trace == ChoiceTimeline(decode_instance=3, decode_stats=DECODE_STATS)


async def test_generate_finished_by_prefill_makes_no_decode_call(cluster: Cluster) -> None:
    done = Chunk(token_ids=token_ids([10]), finish_reason=FinishReason.LENGTH, stats=PREFILL_STATS)
    prefill = await cluster.add(1, Role.PREFILL, [done])
    decode = await cluster.add(2, Role.DECODE)
    trace = ChoiceTimeline()
    assert await cluster.tokens(trace) == [10]
    assert decode.requests == []
    assert trace == ChoiceTimeline(prefill_instance=1, prefill_stats=PREFILL_STATS)
    await cluster.router.aclose()
    assert prefill.releases == []


async def test_generate_without_expected_transfer_is_incomplete(cluster: Cluster) -> None:
    endings = [[Chunk(finish_reason=FinishReason.KV_TRANSFER)]] * 4
    prefill = await cluster.add(1, Role.PREFILL, *endings)
    await cluster.add(2, Role.DECODE)
    with pytest.raises(StreamIncomplete, match="no KV transfer parameters"):
        await cluster.tokens()
    assert len(prefill.requests) == 4  # three retries, and there is no other worker


async def test_generate_releases_transfer_as_fetched(cluster: Cluster) -> None:
    prefill = await cluster.add(1, Role.PREFILL, [kv_chunk("t1")])
    await cluster.add(2, Role.DECODE, [FINISHED[0], HANG])
    async with aclosing(routed_stream(cluster.router, request(), ChoiceTimeline())) as stream:
        await anext(stream)
        await cluster.router.aclose()  # waits for what was posted: the call still runs
        assert prefill.releases == [ReleaseKv("t1", ReleaseOutcome.FETCHED)]
    await cluster.router.aclose()
    assert len(prefill.releases) == 1


async def test_generate_releases_transfer_as_rejected(cluster: Cluster) -> None:
    prefill = await cluster.add(1, Role.PREFILL, [kv_chunk("t1")])
    await cluster.add(2, Role.DECODE, [RequestRejected("too long")])
    with pytest.raises(RequestRejected):
        await cluster.tokens()
    await cluster.router.aclose()
    assert prefill.releases == [ReleaseKv("t1", ReleaseOutcome.ABORTED)]
    assert len(prefill.requests) == 1  # not a fault of the KV transfer


async def test_generate_with_failed_release_is_complete(cluster: Cluster) -> None:
    prefill = await cluster.add(1, Role.PREFILL, [kv_chunk("t1")])
    prefill.faults[ReleaseKv] = RequestRejected("no")
    await cluster.add(2, Role.DECODE, FINISHED)
    assert await cluster.tokens() == [10, 11, 12, 13]
    await cluster.router.aclose()
    assert len(prefill.releases) == 1


@pytest.mark.parametrize("error", [TransferFailed("gone"), TransferRejected("forged")])
async def test_generate_failed_transfer_prefills_once_more(
    cluster: Cluster, error: DynamoError
) -> None:
    prefill = await cluster.add(1, Role.PREFILL, [kv_chunk("t1")], [kv_chunk("t2")])
    decode = await cluster.add(2, Role.DECODE, [error], FINISHED)
    assert await cluster.tokens() == [10, 11, 12, 13]
    assert [r.kv_params.transfer_id for r in decode.requests if r.kv_params is not None] == [
        "t1",
        "t2",
    ]
    await cluster.router.aclose()
    assert prefill.releases == [
        ReleaseKv("t1", ReleaseOutcome.ABORTED),
        ReleaseKv("t2", ReleaseOutcome.FETCHED),
    ]


async def test_generate_transfer_failed_twice_raises_its_error(cluster: Cluster) -> None:
    prefill = await cluster.add(
        1, Role.PREFILL, [kv_chunk("t1")], [kv_chunk("t2")], [kv_chunk("t3")]
    )
    await cluster.add(2, Role.DECODE, [TransferFailed("one")], [TransferFailed("two")], FINISHED)
    with pytest.raises(TransferFailed, match="two"):
        await cluster.tokens()
    assert len(prefill.requests) == 2
    await cluster.router.aclose()
    assert [r.outcome for r in prefill.releases] == [ReleaseOutcome.ABORTED] * 2


async def test_generate_failed_transfer_uses_another_prefill(cluster: Cluster) -> None:
    """Also when another request took the turn in between, so that the round robin is back at the
    one that failed.
    """
    gate = asyncio.Event()
    first = await cluster.add(1, Role.PREFILL, [kv_chunk("a1")], [kv_chunk("a2")])
    other = await cluster.add(3, Role.PREFILL, [kv_chunk("b1")], [kv_chunk("b2")])
    decode = await cluster.add(2, Role.DECODE, [gate, TransferFailed("gone")], FINISHED, FINISHED)
    failing = asyncio.create_task(cluster.tokens())
    await asyncio.wait_for(decode.hanging.wait(), SOON_S)
    await cluster.tokens()
    gate.set()
    assert await failing == [10, 11, 12, 13]
    assert (len(first.requests), len(other.requests)) == (1, 2)


async def test_generate_with_missing_role_names_it(cluster: Cluster) -> None:
    await cluster.add(1, Role.PREFILL)
    with pytest.raises(NoInstances, match="decode"):
        await cluster.tokens()


@pytest.mark.parametrize("failure", [Disconnected("gone"), NonFinite("NaN")])
async def test_generate_failed_prefill_uses_another(cluster: Cluster, failure: DynamoError) -> None:
    failing = await cluster.add(1, Role.PREFILL, [failure])
    other = await cluster.add(3, Role.PREFILL, [kv_chunk("b1")])
    await cluster.add(2, Role.DECODE, FINISHED)
    trace = ChoiceTimeline()
    assert await cluster.tokens(trace) == [10, 11, 12, 13]
    assert (len(failing.requests), len(other.requests)) == (1, 1)
    assert (trace.prefill_instance, trace.retries, trace.migrations) == (3, 1, 0)


async def test_generate_with_full_workers_asks_each_once(cluster: Cluster) -> None:
    workers = [
        await cluster.add(number, Role.AGGREGATED, [Overloaded("full")]) for number in (1, 2)
    ]
    with pytest.raises(Overloaded):
        await cluster.tokens()
    assert [len(worker.requests) for worker in workers] == [1, 1]


async def test_generate_does_not_retry_other_errors(cluster: Cluster) -> None:
    await cluster.add(1, Role.AGGREGATED, [RequestRejected("no")])
    other = await cluster.add(2, Role.AGGREGATED, FINISHED)
    with pytest.raises(RequestRejected):
        await cluster.tokens()
    assert other.requests == []


@pytest.mark.parametrize("failure", [Disconnected("gone"), NonFinite("NaN")])
async def test_generate_continues_after_decode_dies(cluster: Cluster, failure: DynamoError) -> None:
    prefill = await cluster.add(1, Role.PREFILL, [kv_chunk("t1")], [kv_chunk("t2")])
    await cluster.add(2, Role.DECODE, [FINISHED[0], failure])
    other = await cluster.add(4, Role.DECODE, FINISHED[1:])
    trace = ChoiceTimeline()
    assert await cluster.tokens(trace, min_tokens=3) == [10, 11, 12, 13]
    resumed = prefill.requests[1]
    assert list(resumed.token_ids) == [1, 2, 3, 10]
    assert (
        resumed.sampling.max_tokens,
        resumed.sampling.min_tokens,
        resumed.num_resumed_output_tokens,
    ) == (7, 2, 1)
    assert other.requests[0].token_ids == resumed.token_ids
    assert (trace.decode_instance, trace.retries, trace.migrations) == (4, 0, 1)


async def test_generate_with_only_end_lost_ends_by_length(cluster: Cluster) -> None:
    await cluster.add(1, Role.AGGREGATED, [FINISHED[0], FINISHED[1], Disconnected("gone")])
    assert await cluster.tokens(max_tokens=3) == [10, 11, 12]


HISTORIES: list[dict[str, Any]] = [
    {"guided": StructuredOutput(alternatives=(OutputFormat(json_schema="{}"),))},
    {"seed": 5, "temperature": 0.5},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
]


@pytest.mark.parametrize("sampling", HISTORIES)
async def test_generate_not_migratable_says_why(cluster: Cluster, sampling: dict[str, Any]) -> None:
    for number in (1, 2):
        await cluster.add(
            number,
            Role.AGGREGATED,
            [FINISHED[0], Disconnected("gone")],
            unsupported_features=("resumed_tokens",),
        )
    with pytest.raises(MigrationFailed, match="disconnected: gone"):
        await cluster.tokens(**sampling)


@pytest.mark.parametrize("sampling", HISTORIES)
async def test_generate_migrates_when_the_engine_can(
    cluster: Cluster, sampling: dict[str, Any]
) -> None:
    await cluster.add(1, Role.AGGREGATED, [FINISHED[0], Disconnected("gone")])
    await cluster.add(2, Role.AGGREGATED, FINISHED[1:])
    assert await cluster.tokens(**sampling) == [10, 11, 12, 13]


async def test_generate_breaking_repeatedly_ends_at_the_limit(cluster: Cluster) -> None:
    script = [FINISHED[0], Disconnected("gone")]
    workers = [await cluster.add(number, Role.AGGREGATED, script) for number in range(1, 6)]
    with pytest.raises(Disconnected):
        await cluster.tokens(max_tokens=100)
    assert sum(len(worker.requests) for worker in workers) == 4  # the first, and three migrations


async def test_generate_holds_the_request_for_a_missing_role(cluster: Cluster) -> None:
    cluster.router = RequestRouter(cluster.view, cluster.plane, RouterOptions(hold_s=5))
    await cluster.add(1, Role.PREFILL, [kv_chunk("t1")])
    held = asyncio.create_task(cluster.tokens())
    await asyncio.sleep(0)
    await cluster.add(2, Role.DECODE, FINISHED)
    assert await asyncio.wait_for(held, SOON_S) == [10, 11, 12, 13]


async def test_generate_waits_for_the_successor_of_a_dead_worker(cluster: Cluster) -> None:
    cluster.router = RequestRouter(cluster.view, cluster.plane, RouterOptions(hold_s=5))
    death = asyncio.Event()
    first = await cluster.add(1, Role.AGGREGATED, [FINISHED[0], death, Disconnected("gone")])
    tokens = asyncio.create_task(cluster.tokens())
    await asyncio.wait_for(first.hanging.wait(), SOON_S)
    death.set()
    await asyncio.sleep(0.05)  # so that it has failed, and is held
    await cluster.add(2, Role.AGGREGATED, FINISHED[1:])
    assert await asyncio.wait_for(tokens, SOON_S) == [10, 11, 12, 13]


async def test_generate_without_prefill_worker_is_all_decode(cluster: Cluster) -> None:
    cluster.router = RequestRouter(cluster.view, cluster.plane, RouterOptions(decode_fallback=True))
    decode = await cluster.add(2, Role.DECODE, FINISHED, can_aggregate=True)
    assert await cluster.tokens() == [10, 11, 12, 13]
    assert [r.phase for r in decode.requests] == [Phase.AGGREGATED]


async def test_close_in_prefill_closes_its_call(cluster: Cluster) -> None:
    prefill = await cluster.add(1, Role.PREFILL, [HANG])
    decode = await cluster.add(2, Role.DECODE)
    await _cancel_when(prefill.hanging, cluster)
    await asyncio.wait_for(prefill.closed.wait(), SOON_S)
    await cluster.router.aclose()
    assert prefill.releases == []
    assert decode.requests == []


async def test_close_before_decode_chunk_frees_the_kv(cluster: Cluster) -> None:
    prefill = await cluster.add(1, Role.PREFILL, [kv_chunk("t1")])
    decode = await cluster.add(2, Role.DECODE, [HANG])
    await _cancel_when(decode.hanging, cluster)
    await asyncio.wait_for(decode.closed.wait(), SOON_S)
    await cluster.router.aclose()
    assert prefill.releases == [ReleaseKv("t1", ReleaseOutcome.ABORTED)]


async def test_close_during_decode_releases_as_fetched(cluster: Cluster) -> None:
    prefill = await cluster.add(1, Role.PREFILL, [kv_chunk("t1")])
    decode = await cluster.add(2, Role.DECODE, [FINISHED[0], HANG])
    async with aclosing(routed_stream(cluster.router, request(), ChoiceTimeline())) as stream:
        await anext(stream)
    await asyncio.wait_for(decode.closed.wait(), SOON_S)
    await cluster.router.aclose()
    assert prefill.releases == [ReleaseKv("t1", ReleaseOutcome.FETCHED)]


async def test_close_during_aggregated_closes_its_call(cluster: Cluster) -> None:
    worker = await cluster.add(3, Role.AGGREGATED, [FINISHED[0], HANG])
    async with aclosing(routed_stream(cluster.router, request(), ChoiceTimeline())) as stream:
        await anext(stream)
    await asyncio.wait_for(worker.closed.wait(), SOON_S)


async def _cancel_when(reached: asyncio.Event, cluster: Cluster) -> None:
    """A caller that goes away while it waits for its next chunk."""
    caller = asyncio.create_task(cluster.tokens())
    await asyncio.wait_for(reached.wait(), SOON_S)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller


@pytest.mark.parametrize("error", [TransferFailed("for now"), TransferRejected("other keys")])
async def test_generate_tries_a_quarantined_pair_after_its_time(
    cluster: Cluster, error: DynamoError
) -> None:
    breakers = PairBreakers(BreakerLimits(failures=1, open_s=60.0))
    options = RouterOptions(has_probes=False)
    cluster.router = RequestRouter(cluster.view, cluster.plane, options, breakers)
    await cluster.add(1, Role.PREFILL, *[[kv_chunk(f"t{n}")] for n in range(2)])
    await cluster.add(2, Role.DECODE, [error], FINISHED)
    with pytest.raises(type(error)):
        await cluster.tokens()
    with pytest.raises(NoInstances, match="quarantined"):
        await cluster.tokens()
    breakers.keep_only(())
    breakers.record_failure((1, 2), "for now", time.monotonic() - 61.0)
    assert breakers.is_open((1, 2))
    assert await cluster.tokens() == [10, 11, 12, 13]


async def test_generate_held_request_uses_a_recovered_pair(cluster: Cluster) -> None:
    breakers = PairBreakers(BreakerLimits(failures=1, open_s=60.0))
    cluster.router = RequestRouter(cluster.view, cluster.plane, RouterOptions(hold_s=5.0), breakers)
    await cluster.add(1, Role.PREFILL, [kv_chunk("t1")])
    await cluster.add(2, Role.DECODE, FINISHED)
    breakers.record_failure((1, 2), "transfer: x", time.monotonic())
    held = asyncio.create_task(cluster.tokens())
    await asyncio.sleep(0.05)
    assert not held.done()
    cluster.router.health.record_success((1, 2), time.monotonic())  # by a probe
    assert await asyncio.wait_for(held, SOON_S) == [10, 11, 12, 13]


async def test_generate_uses_a_new_pair_after_its_probe(cluster: Cluster) -> None:
    options = RouterOptions(hold_s=SOON_S, has_probes=True)
    cluster.router = RequestRouter(cluster.view, cluster.plane, options)
    await cluster.add(1, Role.PREFILL, *[[kv_chunk(f"t{n}")] for n in range(4)])
    await cluster.add(2, Role.DECODE, *[FINISHED] * 4)
    held = asyncio.create_task(cluster.tokens())
    await asyncio.sleep(0.05)
    assert not held.done()
    cluster.router.health.record_success((1, 2), time.monotonic(), is_probe=True)
    assert await asyncio.wait_for(held, SOON_S) == [10, 11, 12, 13]
    untried = await cluster.add(3, Role.DECODE)
    for _ in range(3):
        await cluster.tokens()
    assert untried.requests == []


async def test_generate_uses_a_new_unprobed_pair_after_the_hold(cluster: Cluster) -> None:
    options = RouterOptions(hold_s=0.05, has_probes=True)
    cluster.router = RequestRouter(cluster.view, cluster.plane, options)
    await cluster.add(1, Role.PREFILL, [kv_chunk("t")])
    await cluster.add(2, Role.DECODE, FINISHED)
    assert await asyncio.wait_for(cluster.tokens(), SOON_S) == [10, 11, 12, 13]


@pytest.mark.parametrize("ending", [Disconnected("the worker is gone"), Draining("leaves")])
async def test_generate_pair_of_gone_decode_is_not_working(
    cluster: Cluster, ending: DynamoError
) -> None:
    breakers = PairBreakers()
    cluster.router = RequestRouter(cluster.view, cluster.plane, breakers=breakers)
    await cluster.add(1, Role.PREFILL, *[[kv_chunk(f"t{n}")] for n in range(9)])
    await cluster.add(2, Role.DECODE, FINISHED, *[[ending]] * 8)
    await cluster.tokens()
    assert breakers.status((1, 2)).state is PairState.WORKING
    with pytest.raises(type(ending)):
        await cluster.tokens()
    assert breakers.status((1, 2)).state is PairState.FAILING
    assert breakers.status((1, 2)).reason == f"{ending.code}: {ending.message}"
