"""What keeps a frontend's books true while it serves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo_trtllm.cluster.request_plane.inproc import InprocPlane
from dynamo_trtllm.cluster.request_plane.subjects import load_subject
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.process.routing_setup import (
    create_placement,
    create_router,
    follow_loads,
    prune_breakers,
    routing_work,
)
from dynamo_trtllm.frontend.routing import pair_probe
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.pair_breakers import BreakerLimits, PairBreakers, PairState
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.frontend.routing.worker_load import ClusterLoad
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.protocol.messages import LoadReport, Role, encode
from tests.kit.instances import make_instance
from tests.unit.frontend.test_pair_probe import PREFILL_END, Bench, answer


async def test_breakers_forget_pairs_of_a_gone_instance() -> None:
    view = ClusterView()
    breakers = PairBreakers(BreakerLimits(failures=1))
    for instance in (make_instance(1, role=Role.PREFILL), make_instance(2), make_instance(3)):
        view.add(instance)
    forgetting = asyncio.create_task(prune_breakers(view, breakers))
    await asyncio.sleep(0)
    for pair in ((1, 2), (1, 3)):
        breakers.record_failure(pair, "x", 0.0)
    view.remove(2)
    await asyncio.sleep(0)
    assert not breakers.pairs_with(2)
    assert breakers.is_open((1, 3))
    forgetting.cancel()
    await asyncio.gather(forgetting, return_exceptions=True)


async def test_loads_are_known_until_workers_leave() -> None:
    view = ClusterView()
    loads = ClusterLoad()
    plane = InprocPlane()
    view.add(make_instance(1))
    view.add(make_instance(2))
    following = asyncio.create_task(follow_loads(plane, "ns", view, loads))
    await asyncio.sleep(0)
    for instance_id in (1, 2):
        report = LoadReport(
            instance_id,
            1,
            running=instance_id,
            waiting=0,
            queued_prefill_tokens=0,
            kv_blocks_used=0,
            kv_blocks_total=0,
            context_tokens=0,
        )
        assert plane.try_publish(load_subject("ns"), encode(report))
    await asyncio.sleep(0)
    reports = [loads.get(instance_id).report for instance_id in (1, 2)]
    assert [report and report.running for report in reports] == [1, 2]
    view.remove(1)
    await asyncio.sleep(0)
    assert loads.requests() == {2: 0}
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_probes_of_many_pairs_run_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_probe, "_MAX_ALL", 2)
    bench = Bench()
    async with bench.running():
        await bench.add(1, Role.PREFILL, PREFILL_END)
        decodes = [await bench.add(number, Role.DECODE, None) for number in (2, 3, 4, 5)]
        await bench.until(lambda: sum(len(decode.asked) for decode in decodes) == 2)
        await asyncio.sleep(0.05)
        assert sum(len(decode.asked) for decode in decodes) == 2


async def test_probes_without_request_plane_blame_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_probe, "_UNAVAILABLE_S", 0.01)
    bench = Bench()
    reasons = ["away"]
    monkeypatch.setattr(bench.plane, "unavailable_reason", lambda: reasons[0] if reasons else None)
    async with bench.running():
        prefill = await bench.add(1, Role.PREFILL, PREFILL_END)
        await bench.add(2, Role.DECODE, answer())
        await asyncio.sleep(0.05)
        assert not prefill.asked
        reasons.clear()
        await bench.until(lambda: bench.breakers.status((1, 2)).state is PairState.WORKING)
    assert bench.codes == {"ok": 1}


@pytest.mark.parametrize(
    ("settings", "work"),
    [
        ({"router_mode": "random"}, {"pairs"}),
        ({"router_mode": "least-loaded"}, {"pairs", "loads"}),
        ({"router_mode": "kv"}, {"pairs", "loads", "kv-events"}),
        ({"router_mode": "kv", "router_kv_events": False}, {"pairs", "loads", "kv-events"}),
        (
            {"router_mode": "slo", "slo_ttft_ms": 2000, "slo_itl_ms": 100},
            {"pairs", "loads", "kv-events"},
        ),
    ],
)
async def test_routing_work_updates_what_its_mode_reads(
    settings: dict[str, Any], work: set[str]
) -> None:
    config = FrontendConfig(**settings)
    plane = InprocPlane()
    breakers = PairBreakers()
    router = RequestRouter(
        ClusterView(), plane, breakers=breakers, placement=create_placement(config)
    )
    tasks = {
        name: asyncio.create_task(coroutine)
        for name, coroutine in routing_work("ns", router, FrontendMetrics()).items()
    }
    assert set(tasks) == work
    router.view.add(make_instance(1))
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in tasks.values())
    if router.placement is not None and router.placement.prefixes is not None:
        assert router.placement.prefixes.reads_events is config.router_kv_events
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


@pytest.mark.parametrize(
    ("settings", "pause_s", "part"),
    [
        ({}, 0.075, 0.75),
        ({"early_token_pause_ms": 20.0}, 0.02, 0.75),
        ({"early_token_pause_ms": 0.0}, 0.0, 0.0),
        ({"router_mode": "slo", "slo_ttft_ms": 1000.0, "slo_itl_ms": 40.0}, 0.03, 0.75),
    ],
)
async def test_limit_of_the_pause_after_an_early_token(
    settings: dict[str, Any], pause_s: float, part: float
) -> None:
    plane = InprocPlane()
    config = FrontendConfig(**settings)
    router = create_router(config, ClusterView(), plane, PairBreakers(), FrontendMetrics())
    assert router.options.early_token_pause_s == pytest.approx(pause_s)
    assert router.options.early_token_part == part
    await router.aclose()
    await plane.aclose()
