"""Workers that leave, are gone while discovery still lists them, or lack a feature; and bugs.

In-process plane.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.cluster_view import ModelView
from dynamo_trtllm.frontend.routing.cost_placement import Placement
from dynamo_trtllm.frontend.routing.generation_events import RouterOptions
from dynamo_trtllm.frontend.routing.pair_breakers import COOLDOWN_S, Cooldown
from dynamo_trtllm.frontend.routing.pairs import WorkerSelection
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.protocol.errors import (
    Disconnected,
    Draining,
    InternalError,
    Overloaded,
    TransferExpired,
    Unreachable,
    UnsupportedParameter,
)
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    LoadReport,
    Phase,
    ReissueKvParams,
    ReleaseKv,
    ReleaseOutcome,
    Role,
)
from dynamo_trtllm.protocol.streams import run_stream
from tests.kit.generator_streams import routed_stream
from tests.kit.instances import make_instance
from tests.kit.routing import (
    FINISHED,
    HANG,
    Cluster,
    kv_chunk,
    request,
    signed_for,
    signed_kv_chunk,
)
from tests.kit.waiting import SOON_S


@pytest.mark.parametrize("refusal", [Draining("leaving"), Unreachable("gone"), Overloaded("full")])
async def test_rejected_transfer_is_fetched_by_another_worker(
    cluster: Cluster, refusal: Draining | Unreachable | Overloaded
) -> None:
    prefill = await cluster.add(1, Role.PREFILL, [kv_chunk("t1")])
    await cluster.add(2, Role.DECODE, [refusal])
    other = await cluster.add(4, Role.DECODE, FINISHED)
    trace = ChoiceTimeline()
    assert await cluster.tokens(trace) == [10, 11, 12, 13]
    assert other.requests[0].kv_params is not None
    assert other.requests[0].kv_params.transfer_id == "t1"
    assert len(prefill.requests) == 1
    assert (trace.decode_instance, trace.retries) == (4, 0)
    await cluster.router.aclose()
    assert prefill.releases == [ReleaseKv("t1", ReleaseOutcome.FETCHED)]


async def test_signed_transfer_is_reissued_for_the_other_worker(cluster: Cluster) -> None:
    prefill = await cluster.add(1, Role.PREFILL, [signed_kv_chunk("t1", 2)])
    await cluster.add(2, Role.DECODE, [Draining("leaving")])
    other = await cluster.add(4, Role.DECODE, FINISHED)
    assert await cluster.tokens() == [10, 11, 12, 13]
    (verb,) = prefill.reissues
    assert verb.receivers == (4,)
    (call,) = other.requests
    assert call.kv_params == signed_for((4,), verb.kv_params)
    await cluster.router.aclose()
    assert prefill.releases == [ReleaseKv("t1", ReleaseOutcome.FETCHED)]


async def test_signed_transfer_when_reissue_fails_then_it_is_retried(cluster: Cluster) -> None:
    chunks = [signed_kv_chunk("t1", 2)], [signed_kv_chunk("t2", 4)]
    prefill = await cluster.add(1, Role.PREFILL, *chunks)
    prefill.faults[ReissueKvParams] = TransferExpired("too late")
    await cluster.add(2, Role.DECODE, [Draining("leaving")])
    await cluster.add(4, Role.DECODE, FINISHED)
    assert await cluster.tokens() == [10, 11, 12, 13]
    await cluster.router.aclose()
    assert prefill.releases == [
        ReleaseKv("t1", ReleaseOutcome.ABORTED),
        ReleaseKv("t2", ReleaseOutcome.FETCHED),
    ]


async def test_rejected_transfer_goes_to_the_least_loaded(cluster: Cluster) -> None:
    cluster.router = RequestRouter(cluster.view, cluster.plane, placement=Placement("least-loaded"))
    assert cluster.router.placement is not None
    await cluster.add(1, Role.PREFILL, [kv_chunk("t1")])
    await cluster.add(2, Role.DECODE, [Draining("leaving")])
    # of more than four in all, four random ones are compared
    for instance_id, running in ((3, 5), (6, 1), (7, 8)):
        await cluster.add(instance_id, Role.DECODE, FINISHED)
        cluster.router.placement.loads.on_report(
            LoadReport(instance_id, 1, running, 0, 0, 0, 0, 0), time.monotonic()
        )
    trace = ChoiceTimeline()
    assert await cluster.tokens(trace) == [10, 11, 12, 13]
    assert trace.decode_instance == 6


async def test_transfer_rejected_by_all_is_released_each_time(cluster: Cluster) -> None:
    prefill = await cluster.add(1, Role.PREFILL, *([kv_chunk("t")] for _ in range(4)))
    await cluster.add(2, Role.DECODE, *([Draining("leaving")] for _ in range(4)))
    with pytest.raises(Draining):
        await cluster.tokens()
    await cluster.router.aclose()
    assert prefill.releases == [ReleaseKv("t", ReleaseOutcome.ABORTED)] * 4


async def test_probe_of_draining_worker_uses_no_other(cluster: Cluster) -> None:
    await cluster.add(1, Role.PREFILL, [kv_chunk("t1")])
    await cluster.add(2, Role.DECODE, [Draining("leaving")])
    other = await cluster.add(4, Role.DECODE, FINISHED)
    selection = WorkerSelection(*(i for i in cluster.view.instances() if i.id in (1, 2)))
    probe = partial(cluster.router.generate, request(), ChoiceTimeline(), selection=selection)
    with pytest.raises(Draining):
        await run_stream(probe, lambda chunk: True)
    assert other.requests == []


async def test_gone_registered_worker_delays_only_the_first_request(cluster: Cluster) -> None:
    gone = make_instance(1, role=Role.AGGREGATED)
    asked: list[str] = []
    generate = cluster.plane.client.generate

    def counting(subject, call, sink=None):
        asked.append(subject)
        return generate(subject, call, sink)

    cluster.plane.client.generate = counting  # type: ignore[method-assign]
    cluster.view.add(gone)
    worker = await cluster.add(2, Role.AGGREGATED, *[FINISHED] * 6)
    for _ in range(6):
        assert await cluster.tokens() == [10, 11, 12, 13]
    assert asked.count(gone.subject) == 1
    assert len(worker.requests) == 6


async def test_workers_that_all_rejected_lately_are_tried(cluster: Cluster) -> None:
    worker = await cluster.add(2, Role.AGGREGATED, [Unreachable("just reconnecting")], FINISHED)
    assert await cluster.tokens() == [10, 11, 12, 13]
    assert len(worker.requests) == 2


async def test_many_rejections_are_not_retries(cluster: Cluster) -> None:
    for number in range(1, 8):
        cluster.view.add(make_instance(number, role=Role.AGGREGATED))
    await cluster.add(9, Role.AGGREGATED, FINISHED)
    trace = ChoiceTimeline()
    assert await cluster.tokens(trace) == [10, 11, 12, 13]
    assert trace.retries == 0


async def test_rejections_by_all_are_bounded_by_the_hold(cluster: Cluster) -> None:
    cluster.router = RequestRouter(cluster.view, cluster.plane, RouterOptions(hold_s=0.35))
    cluster.view.add(make_instance(1, role=Role.AGGREGATED))
    begun = asyncio.get_running_loop().time()
    with pytest.raises(Unreachable):
        await cluster.tokens()
    assert 0.34 <= asyncio.get_running_loop().time() - begun < SOON_S


async def test_release_is_repeated_after_a_short_absence(cluster: Cluster) -> None:
    prefill = await cluster.add(1, Role.PREFILL, [kv_chunk("t1")])
    await cluster.add(2, Role.DECODE, FINISHED)
    prefill.faults[ReleaseKv] = Disconnected("away")
    assert await cluster.tokens() == [10, 11, 12, 13]
    async with asyncio.timeout(SOON_S):
        while not prefill.releases:  # noqa: ASYNC110  # a list has no event
            await asyncio.sleep(0)
    prefill.faults.clear()
    await cluster.router.aclose()
    assert prefill.releases == [ReleaseKv("t1", ReleaseOutcome.FETCHED)] * 2


async def test_absent_worker_does_not_rebuild_the_view_per_request(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.view.add(make_instance(1, role=Role.DECODE))  # registered, and nothing listens there
    await cluster.add(2, Role.PREFILL, *([kv_chunk(f"t{number}")] for number in range(20)))
    await cluster.add(3, Role.DECODE, *([FINISHED] * 20))
    made: list[ModelView] = []
    build = ModelView.__post_init__
    monkeypatch.setattr(ModelView, "__post_init__", lambda self: (made.append(self), build(self)))
    for _ in range(20):
        assert await cluster.tokens() == [10, 11, 12, 13]
    assert [[decode.id for decode in view.decode] for view in made] == [[3]]


def test_absent_mark_ends_with_time_or_success() -> None:
    absent = Cooldown()
    assert absent.ids(0.0) == set()
    absent.start(1, 10.0)
    absent.start(2, 12.0)
    absent.forget(3)
    both = absent.ids(12.0)
    absent.start(1, 10.0)
    assert absent.ids(12.0) is both
    assert absent.ids(10.0 + COOLDOWN_S) == {2}
    absent.forget(2)
    assert absent.ids(0.0) == set()


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
async def test_generate_router_bug_frees_kv_and_is_internal(
    cluster: Cluster, phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = await cluster.add(1, Role.PREFILL, [kv_chunk("t1")])
    await cluster.add(2, Role.DECODE, [HANG])
    start = cluster.plane.client.generate

    def generate(subject: str, asked: GenerateRequest, on_event: Any) -> Any:
        if asked.phase is Phase.DECODE and phase is Phase.PREFILL:
            raise RuntimeError("a bug before the decode call")
        if asked.phase is Phase.DECODE:
            # a bug during the decode call
            asyncio.get_running_loop().call_soon(on_event, "not an event")
        return start(subject, asked, on_event)

    monkeypatch.setattr(cluster.plane.client, "generate", generate)
    with pytest.raises(InternalError):
        await cluster.tokens()
    await cluster.router.aclose()
    assert [(release.transfer_id, release.outcome) for release in prefill.releases] == [
        ("t1", ReleaseOutcome.ABORTED)
    ]


async def test_generate_calls_only_workers_with_the_feature(cluster: Cluster) -> None:
    wanted = msgspec.structs.replace(request(), priority=1)
    older = await cluster.add(1, Role.AGGREGATED)
    for has_other in (False, True):
        if has_other:
            await cluster.add(2, Role.AGGREGATED, *[FINISHED] * 3, supported_features=("priority",))
        for _ in range(3):
            async with aclosing(routed_stream(cluster.router, wanted, ChoiceTimeline())) as stream:
                if has_other:
                    assert [chunk async for chunk in stream]
                else:
                    with pytest.raises(UnsupportedParameter, match="priority is not supported"):
                        await anext(stream)
    assert older.requests == []


async def test_generate_rejects_when_last_capable_worker_leaves(cluster: Cluster) -> None:
    wanted = msgspec.structs.replace(request(), priority=1)
    has_left = asyncio.Event()
    has_feature = partial(cluster.add, supported_features=("priority",))
    prefill = await has_feature(1, Role.PREFILL, [has_left, kv_chunk("t1")])
    await has_feature(2, Role.DECODE, [Draining("leaving")])
    older = await cluster.add(3, Role.DECODE)
    async with aclosing(routed_stream(cluster.router, wanted, ChoiceTimeline())) as stream:
        answer = asyncio.ensure_future(anext(stream))
        await prefill.hanging.wait()
        cluster.view.remove(2)
        has_left.set()
        with pytest.raises(UnsupportedParameter, match="priority is not supported"):
            await answer
    assert older.requests == []


def work(cluster: Cluster) -> dict[int, tuple[int, int, int]]:
    """Return what the router counts per instance: requests, prompt tokens to compute, tokens of
    context.
    """
    assert cluster.router.placement is not None
    loads = {
        instance.id: cluster.router.placement.loads.of(instance.id)
        for instance in cluster.view.instances()
    }
    return {
        name: (load.requests, load.unseen_prefill_tokens, load.unseen_kv_tokens)
        for name, load in loads.items()
    }


async def test_load_counts_what_each_worker_runs(cluster: Cluster) -> None:
    cluster.router = RequestRouter(cluster.view, cluster.plane, placement=Placement("least-loaded"))
    gate = asyncio.Event()
    prefill = await cluster.add(1, Role.PREFILL, [gate, kv_chunk("t1")], [kv_chunk("t2")])
    decode = await cluster.add(2, Role.DECODE, [FINISHED[0], HANG], [Draining("leaving")])
    tokens = asyncio.create_task(cluster.tokens())
    await asyncio.wait_for(prefill.hanging.wait(), SOON_S)
    assert work(cluster) == {1: (1, 3, 3), 2: (1, 0, 3)}  # the decode worker is to run it
    gate.set()
    await asyncio.wait_for(decode.hanging.wait(), SOON_S)
    assert work(cluster) == {1: (0, 0, 0), 2: (1, 0, 3)}
    tokens.cancel()
    with pytest.raises(asyncio.CancelledError):
        await tokens
    assert work(cluster) == {1: (0, 0, 0), 2: (0, 0, 0)}
    assert cluster.router.placement is not None
    report = LoadReport(
        4,
        1,
        running=9,
        waiting=0,
        queued_prefill_tokens=0,
        kv_blocks_used=0,
        kv_blocks_total=0,
        context_tokens=0,
    )
    cluster.router.placement.loads.on_report(report, time.monotonic())
    other = await cluster.add(4, Role.DECODE, [*FINISHED[:2], HANG])
    tokens = asyncio.create_task(cluster.tokens())
    await asyncio.wait_for(other.hanging.wait(), SOON_S)
    assert work(cluster) == {1: (0, 0, 0), 2: (0, 0, 0), 4: (1, 0, 3)}
    tokens.cancel()
    await asyncio.gather(tokens, return_exceptions=True)
    assert work(cluster)[4] == (0, 0, 0)


async def test_load_after_first_token_has_no_prompt_work(cluster: Cluster) -> None:
    cluster.router = RequestRouter(cluster.view, cluster.plane, placement=Placement("least-loaded"))
    gate = asyncio.Event()
    worker = await cluster.add(1, Role.AGGREGATED, [gate, FINISHED[0], HANG])
    tokens = asyncio.create_task(cluster.tokens())
    await asyncio.wait_for(worker.hanging.wait(), SOON_S)
    assert work(cluster) == {1: (1, 3, 3)}
    worker.hanging.clear()
    gate.set()
    await asyncio.wait_for(worker.hanging.wait(), SOON_S)
    assert work(cluster) == {1: (1, 0, 3)}
    tokens.cancel()
    await asyncio.gather(tokens, return_exceptions=True)


async def test_random_placement_uses_both_pairs(cluster: Cluster) -> None:
    cluster.router = RequestRouter(
        cluster.view, cluster.plane, RouterOptions(selects_at_random=True)
    )
    assert cluster.router.placement is None
    workers = [await cluster.add(number, Role.AGGREGATED, *[FINISHED] * 40) for number in (1, 2)]
    for _ in range(40):
        await cluster.tokens()
    assert all(worker.requests for worker in workers)  # by chance not in 1 of 500 billion runs
