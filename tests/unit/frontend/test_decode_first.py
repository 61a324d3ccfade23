"""decode_first on the in-process plane: which slot is kept, who takes it, and that none is left."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import msgspec
import pytest

from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.protocol.errors import (
    DeadlineExceeded,
    Disconnected,
    Overloaded,
    RequestRejected,
    TransferFailed,
    TransferMismatch,
    Unreachable,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    Phase,
    ReleaseSlot,
    ReserveSlot,
    Role,
    token_ids,
)
from tests.kit.generator_streams import routed_stream
from tests.kit.routing import (
    FINISHED,
    HANG,
    Cluster,
    ScriptedWorker,
    Step,
    kv_chunk,
    request,
)
from tests.kit.waiting import SOON_S

FIRST = "decode_first"


async def pair(
    cluster: Cluster, prefill: list[Step], *decode: list[Step]
) -> tuple[ScriptedWorker, ScriptedWorker]:
    made = await cluster.add(1, Role.PREFILL, prefill, [kv_chunk("t2")], strategy=FIRST)
    return made, await cluster.add(2, Role.DECODE, *decode, strategy=FIRST)


def check_given_back(decode: ScriptedWorker) -> None:
    """The last slot that was kept was given back, once."""
    kept, back = decode.reservations[-2:]
    assert isinstance(kept, ReserveSlot)
    assert back == ReleaseSlot(kept.reservation_id)


async def test_decode_first_pair_reserves_a_slot_before_prefill(cluster: Cluster) -> None:
    gate = asyncio.Event()
    prefill, decode = await pair(cluster, [gate, kv_chunk("t1")], FINISHED)
    trace = ChoiceTimeline()
    asking = asyncio.create_task(cluster.tokens(trace))
    await asyncio.wait_for(prefill.hanging.wait(), SOON_S)
    (kept,) = decode.reservations
    assert isinstance(kept, ReserveSlot)
    assert time.time() < kept.expires_at <= time.time() + 10  # the request's deadline
    gate.set()
    assert await asking == [10, 11, 12, 13]
    assert [(call.phase, call.reservation_id) for call in decode.requests] == [
        (Phase.DECODE, kept.reservation_id)
    ]
    assert prefill.requests[0].reservation_id is None
    assert (trace.prefill_instance, trace.decode_instance, trace.retries) == (1, 2, 0)
    await cluster.router.aclose()
    assert decode.reservations == [kept]


async def test_pair_when_prefill_first_then_no_slot_is_asked_for(cluster: Cluster) -> None:
    await cluster.add(1, Role.PREFILL, [kv_chunk("t1")])
    decode = await cluster.add(2, Role.DECODE, FINISHED)
    await cluster.tokens()
    assert decode.reservations == []
    assert decode.requests[0].reservation_id is None


async def test_reserve_outlives_a_dead_frontend_by_a_minute(cluster: Cluster) -> None:
    _, decode = await pair(cluster, [kv_chunk("t1")], FINISHED)
    long = msgspec.structs.replace(request(), deadline=time.time() + 3600)
    async with aclosing(routed_stream(cluster.router, long, ChoiceTimeline())) as stream:
        async for _ in stream:
            pass
    (kept,) = decode.reservations
    assert isinstance(kept, ReserveSlot)
    assert 50 < kept.expires_at - time.time() <= 60


async def test_reserve_at_full_worker_retries_another(cluster: Cluster) -> None:
    prefill = await cluster.add(1, Role.PREFILL, [kv_chunk("t1")], strategy=FIRST)
    full = await cluster.add(2, Role.DECODE, strategy=FIRST)
    full.faults[ReserveSlot] = Overloaded("full")
    other = await cluster.add(3, Role.DECODE, FINISHED, strategy=FIRST)
    trace = ChoiceTimeline()
    assert await cluster.tokens(trace) == [10, 11, 12, 13]
    assert (trace.decode_instance, trace.retries) == (3, 1)
    assert len(prefill.requests) == 1  # not before there was a slot
    await cluster.router.aclose()
    # nothing was kept, so nothing is given back
    assert [type(verb) for verb in full.reservations] == [ReserveSlot]
    assert [type(verb) for verb in other.reservations] == [ReserveSlot]


async def test_reserve_at_full_workers_is_overloaded_unprefilled(cluster: Cluster) -> None:
    prefill = await cluster.add(1, Role.PREFILL, strategy=FIRST)
    decodes = [await cluster.add(number, Role.DECODE, strategy=FIRST) for number in (2, 3)]
    for decode in decodes:
        decode.faults[ReserveSlot] = Overloaded("full")
    with pytest.raises(Overloaded):
        await cluster.tokens()
    assert [len(decode.reservations) for decode in decodes] == [1, 1]  # each was asked once
    assert prefill.requests == []


async def test_reserve_without_answer_releases_and_retries(cluster: Cluster) -> None:
    prefill = await cluster.add(1, Role.PREFILL, [kv_chunk("t1")], strategy=FIRST)
    lost = await cluster.add(2, Role.DECODE, strategy=FIRST)
    lost.faults[ReserveSlot] = Unreachable("the answer was lost")
    await cluster.add(3, Role.DECODE, FINISHED, strategy=FIRST)
    assert await cluster.tokens() == [10, 11, 12, 13]
    await cluster.router.aclose()
    check_given_back(lost)
    assert len(prefill.requests) == 1


async def test_slot_of_failed_prefill_returns_before_next_attempt(cluster: Cluster) -> None:
    first = await cluster.add(1, Role.PREFILL, [Disconnected("gone")], strategy=FIRST)
    second = await cluster.add(3, Role.PREFILL, [kv_chunk("t1")], strategy=FIRST)
    decode = await cluster.add(2, Role.DECODE, FINISHED, strategy=FIRST)
    assert await cluster.tokens() == [10, 11, 12, 13]
    assert (len(first.requests), len(second.requests)) == (1, 1)
    await cluster.router.aclose()
    kept = [verb.reservation_id for verb in decode.reservations if isinstance(verb, ReserveSlot)]
    assert [
        verb.reservation_id for verb in decode.reservations if isinstance(verb, ReleaseSlot)
    ] == kept[:1]
    assert decode.requests[0].reservation_id == kept[1]


async def test_slot_returns_when_prefill_finishes_the_request(cluster: Cluster) -> None:
    done = Chunk(token_ids=token_ids([10]), finish_reason=FinishReason.STOP)
    _, decode = await pair(cluster, [done])
    assert await cluster.tokens() == [10]
    await cluster.router.aclose()
    check_given_back(decode)


async def test_slot_returns_when_client_leaves_during_prefill(cluster: Cluster) -> None:
    prefill, decode = await pair(cluster, [HANG])
    asking = asyncio.create_task(cluster.tokens())
    await asyncio.wait_for(prefill.hanging.wait(), SOON_S)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await cluster.router.aclose()
    check_given_back(decode)
    await asyncio.wait_for(prefill.closed.wait(), SOON_S)


async def test_slot_returns_when_client_leaves_during_reserve(cluster: Cluster) -> None:
    prefill, decode = await pair(cluster, [HANG])
    decode.stalls = asyncio.Event()
    asking = asyncio.create_task(cluster.tokens())
    await asyncio.wait_for(decode.asked.wait(), SOON_S)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    decode.stalls.set()
    await cluster.router.aclose()
    check_given_back(decode)
    assert prefill.requests == []


async def test_slot_returns_when_decode_call_is_rejected(cluster: Cluster) -> None:
    _, decode = await pair(cluster, [kv_chunk("t1")], [RequestRejected("no")])
    with pytest.raises(RequestRejected):
        await cluster.tokens()
    await cluster.router.aclose()
    check_given_back(decode)


async def test_slot_of_second_attempt_is_its_own(cluster: Cluster) -> None:
    _, decode = await pair(cluster, [kv_chunk("t1")], [TransferFailed("gone")], FINISHED)
    assert await cluster.tokens() == [10, 11, 12, 13]
    first, second = (call.reservation_id for call in decode.requests)
    assert first != second
    assert None not in (first, second)


async def test_slot_after_deadline_asks_no_worker(cluster: Cluster) -> None:
    _, decode = await pair(cluster, [kv_chunk("t1")])
    late = msgspec.structs.replace(request(), deadline=time.time() - 1)
    with pytest.raises(DeadlineExceeded):
        async with aclosing(routed_stream(cluster.router, late, ChoiceTimeline())) as stream:
            await anext(stream)
    assert decode.reservations == []


async def test_strategies_when_the_roles_differ_then_refused_by_name(cluster: Cluster) -> None:
    await cluster.add(1, Role.PREFILL, strategy=FIRST)
    await cluster.add(2, Role.DECODE)
    with pytest.raises(
        TransferMismatch,
        match="strategy is 'decode_first' at prefill and 'prefill_first' at decode",
    ):
        await cluster.tokens()
