"""Frontends exchange what clients take over the request plane, in process and over NATS."""

from __future__ import annotations

import asyncio

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.requests.admission import AdmissionLimits
from dynamo_trtllm.frontend.requests.token_counters import Client
from dynamo_trtllm.frontend.requests.usage_reports import UsageReports
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.protocol.frontend_usage import frontend_usage_subject
from dynamo_trtllm.support.background import cancel_all
from tests.kit.admission import acquire
from tests.kit.request_planes import PlanePair, until


async def test_tokens_and_shares_reach_other_frontends(bench: PlanePair) -> None:
    unreadable: list[None] = []
    frontends = [AdmissionLimits(FrontendConfig(max_inflight=1), ClusterView()) for _ in range(2)]
    running = [
        asyncio.create_task(
            UsageReports(limits, lambda model: False).run(
                plane, "ns", lambda: unreadable.append(None)
            )
        )
        for limits, plane in zip(frontends, (bench.caller, bench.worker), strict=True)
    ]
    here, there = frontends
    window = there.start_windows.window("m")
    before = window.usages[0].limit
    places = here.start_windows.window("m").places_for(1, 1)
    await acquire(here.choice_permits, 1, "a", places=places)
    waiting = asyncio.create_task(acquire(here.choice_permits, 1, "b", places=places))
    here.has_requests.set()
    # The first report may come before the other one has subscribed.
    await until(lambda: window.usages[0].limit == before // 2)
    counters = here.choice_permits.counters("m")
    counters.count(counters.counter(Client("c")), 500)
    await until(lambda: there.choice_permits.counters("m").counter(Client("c")).value == 500)
    bench.caller.try_publish(frontend_usage_subject("ns"), b"no report")
    await until(lambda: len(unreadable) == 2)
    await cancel_all([*running, waiting])
