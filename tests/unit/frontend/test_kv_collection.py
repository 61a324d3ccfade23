"""KV of cancelled requests that only a fetch frees, on the in-process plane with scripted
workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from dynamo_trtllm.cluster.request_plane.frames import Frame
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.protocol.errors import (
    Draining,
    DynamoError,
    MigrationFailed,
    Overloaded,
    TransferFailed,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    Phase,
    ReleaseKv,
    ReleaseOutcome,
    Role,
    token_ids,
)
from dynamo_trtllm.protocol.streams import StreamEvent, StreamHandle
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

FETCHED = ReleaseKv("t1", ReleaseOutcome.FETCHED)
ABORTED = ReleaseKv("t1", ReleaseOutcome.ABORTED)


@dataclass
class Pair:
    """A prefill worker whose KV only a fetch frees, a decode worker, and the outcomes of
    collections.
    """

    cluster: Cluster
    prefill: ScriptedWorker
    decode: ScriptedWorker
    outcomes: list[str] = field(default_factory=list)
    events: list[StreamEvent] = field(default_factory=list)  # that the client got

    def start(self) -> StreamHandle:
        return self.cluster.router.generate(request(), ChoiceTimeline(), self.events.append)

    async def ended(self) -> list[str]:
        """Wait for a collection. Return the outcomes."""
        async with asyncio.timeout(SOON_S):
            while not self.outcomes:  # noqa: ASYNC110  # a list has no event
                await asyncio.sleep(0)
        return self.outcomes

    async def releases(self) -> list[ReleaseKv]:
        """Return what the prefill worker was sent, when all of it has arrived."""
        await self.cluster.router.aclose()
        return self.prefill.releases


async def pair_of(
    cluster: Cluster, prefill: Sequence[Step], *decode: Sequence[Step], **fields: Any
) -> Pair:
    prefill_worker = await cluster.add(1, Role.PREFILL, prefill, keeps_unfetched_kv=True)
    pair = Pair(cluster, prefill_worker, await cluster.add(2, Role.DECODE, *decode, **fields))
    cluster.router.kv_collector.on_end = pair.outcomes.append
    return pair


async def cancelled_in_decode(cluster: Cluster, *script: Step) -> tuple[Pair, asyncio.Event]:
    """Cancel a request while its decode worker waits for the event, after which it plays the
    script.
    """
    gate = asyncio.Event()
    pair = await pair_of(cluster, [kv_chunk("t1")], [gate, *script])
    handle = pair.start()
    await asyncio.wait_for(pair.decode.hanging.wait(), SOON_S)
    handle.cancel()
    return pair, gate


async def test_cancel_before_first_token_waits_for_the_fetch(cluster: Cluster) -> None:
    pair, gate = await cancelled_in_decode(cluster, FINISHED[0], HANG)
    assert len(cluster.router.kv_collector) == 1
    pair.decode.hanging.clear()
    gate.set()
    assert await pair.ended() == ["ok"]
    await asyncio.wait_for(pair.decode.closed.wait(), SOON_S)  # no tokens are generated for nothing
    assert (await pair.releases(), pair.events) == ([FETCHED], [])
    assert len(pair.decode.requests) == 1
    assert len(cluster.router.kv_collector) == 0


@pytest.mark.parametrize(
    "error", [Overloaded("full"), Draining("leaving"), TransferFailed("broke")]
)
async def test_cancel_with_failed_decode_call_is_not_retried(
    cluster: Cluster, error: DynamoError
) -> None:
    await cluster.add(4, Role.DECODE)
    pair, gate = await cancelled_in_decode(cluster, error)
    gate.set()
    assert await pair.ended() == [error.code]
    assert await pair.releases() == [ABORTED]
    assert len(pair.decode.requests) == 1


async def test_cancel_without_kv_ends_after_the_longest_time(cluster: Cluster) -> None:
    cluster.router.kv_collector.collection_s = 0.01
    pair, _ = await cancelled_in_decode(cluster)
    assert await pair.ended() == ["collection_timeout"]
    await asyncio.wait_for(pair.decode.closed.wait(), SOON_S)
    assert await pair.releases() == [ABORTED]


async def test_cancel_over_collection_limit_cancels_the_call(cluster: Cluster) -> None:
    cluster.router.kv_collector.max_collections = 0
    pair, _ = await cancelled_in_decode(cluster)
    assert await pair.ended() == ["too_many"]
    await asyncio.wait_for(pair.decode.closed.wait(), SOON_S)
    assert await pair.releases() == [ABORTED]


@pytest.mark.parametrize("arrives", [True, False])
async def test_close_bounds_a_running_collection(cluster: Cluster, arrives: bool) -> None:
    cluster.router.kv_collector.close_s = SOON_S if arrives else 0.01
    pair, gate = await cancelled_in_decode(cluster, *FINISHED)
    closing = asyncio.create_task(cluster.router.aclose())
    await asyncio.sleep(0)
    assert pair.outcomes == []
    if arrives:
        gate.set()
    await asyncio.wait_for(closing, SOON_S)
    assert pair.outcomes == ["ok" if arrives else "collection_timeout"]
    assert pair.prefill.releases == [FETCHED if arrives else ABORTED]


# --- a cancel while the prefill call runs ---------------------------------------------------------


async def cancelled_on_the_way(cluster: Cluster, **decode: Any) -> Pair:
    """Cancel a request when its KV transfer parameters have arrived and are not read yet."""
    pair = await pair_of(cluster, [kv_chunk("t1")], [FINISHED[0], HANG], **decode)
    feed = cluster.plane.client._inbox._feed

    def cancel_first(frames: list[Frame]) -> None:
        if any(
            isinstance(frame.chunk, Chunk) and frame.chunk.kv_params is not None for frame in frames
        ):
            handle.cancel()
        feed(frames)

    cluster.plane.client._inbox._feed = cancel_first  # type: ignore[method-assign]
    handle = pair.start()
    assert await pair.ended() == ["ok"]
    return pair


async def test_cancel_during_transfer_params_fetches_with_one_token(cluster: Cluster) -> None:
    pair = await cancelled_on_the_way(cluster)
    (call,) = pair.decode.requests
    assert call.kv_params is not None
    assert (call.phase, call.kv_params.transfer_id) == (Phase.DECODE, "t1")
    assert call.sampling.max_tokens == len(call.kv_params.first_token_ids) + 1
    assert (await pair.releases(), pair.events) == ([FETCHED], [])


@pytest.mark.parametrize(("features", "priority"), [(("priority",), 1 << 20), ((), 0)])
async def test_fetch_with_priorities_comes_after_all_requests(
    cluster: Cluster, features: tuple[str, ...], priority: int
) -> None:
    pair = await cancelled_on_the_way(cluster, supported_features=features)
    assert [call.priority for call in pair.decode.requests] == [priority]


async def stopped_prefill(cluster: Cluster, *script: Step) -> Pair:
    """Cancel a request while its prefill worker computes.

    When it is stopped, it plays the script.
    """
    stopped = asyncio.Event()
    pair = await pair_of(cluster, [stopped, *script], FINISHED)
    pair.prefill.stopped = stopped
    handle = pair.start()
    await asyncio.wait_for(pair.prefill.hanging.wait(), SOON_S)
    async with asyncio.timeout(SOON_S):
        inbox = cluster.plane.client._inbox
        while any(call.last_ping_before_ack is None for call in inbox.values()):  # noqa: ASYNC110
            await asyncio.sleep(0)  # until the call is acknowledged
    handle.cancel()
    await pair.ended()
    return pair


async def test_cancel_of_prefill_with_kv_fetches_it(cluster: Cluster) -> None:
    pair = await stopped_prefill(cluster, kv_chunk("t1"))
    assert pair.outcomes == ["ok"]
    assert len(pair.decode.requests) == 1
    assert (await pair.releases(), pair.events) == ([FETCHED], [])


@pytest.mark.parametrize(
    "last",
    [MigrationFailed("aborted"), Chunk(token_ids=token_ids([2]), finish_reason=FinishReason.STOP)],
)
async def test_cancel_of_prefill_without_kv_fetches_nothing(cluster: Cluster, last: Step) -> None:
    pair = await stopped_prefill(cluster, last)
    assert pair.outcomes == ["nothing"]
    assert (pair.decode.requests, await pair.releases()) == ([], [])


async def test_cancel_of_endless_prefill_is_bounded(cluster: Cluster) -> None:
    cluster.router.kv_collector.collection_s = 0.01
    pair = await stopped_prefill(cluster, HANG)
    assert pair.outcomes == ["collection_timeout"]
    await asyncio.wait_for(pair.prefill.closed.wait(), SOON_S)
    assert await pair.releases() == []


async def test_cancel_of_unacknowledged_prefill_is_at_once(cluster: Cluster) -> None:
    pair = await pair_of(cluster, [HANG])
    handle = pair.start()
    await asyncio.sleep(0)  # the call begins
    handle.cancel()
    assert len(cluster.router.kv_collector) == 0
    await cluster.router.aclose()
    assert (pair.outcomes, pair.prefill.releases) == ([], [])
