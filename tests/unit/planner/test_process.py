"""What a planner says while etcd is away. Integration tests run planners with a real etcd."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import msgspec
import pytest

from dynamo_trtllm.cluster.discovery.memory import MemoryDiscovery, MemoryLeadership
from dynamo_trtllm.cluster.request_plane.client import PlaneLimits
from dynamo_trtllm.cluster.request_plane.inproc import InprocTransport
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.config.planner import PlannerConfig
from dynamo_trtllm.frontend.routing.pairs import pairing_key
from dynamo_trtllm.planner.frontend_queues import FrontendQueue
from dynamo_trtllm.planner.observe import Observer, PoolKey
from dynamo_trtllm.planner.process import PlannerProcess
from dynamo_trtllm.protocol.errors import Unreachable
from dynamo_trtllm.protocol.frontend_usage import (
    FrontendUsage,
    ModelUsage,
    frontend_usage_subject,
)
from dynamo_trtllm.protocol.messages import encode
from tests.kit.instances import LAYOUT, elastic_instance


class LostDiscovery(MemoryDiscovery):
    """A discovery that answers at first, and then while `is_away` is false."""

    is_away = False

    async def try_to_lead(self, namespace: str, name: str) -> MemoryLeadership | None:
        if self.is_away:
            raise Unreachable("etcd is away")
        return await super().try_to_lead(namespace, name)


async def test_etcd_that_is_away_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dynamo_trtllm.planner")
    planner = PlannerProcess(PlannerConfig(slo_ttft_ms=2000, slo_itl_ms=100))
    discovery = LostDiscovery()
    discovery.is_away = True
    assert not await planner._leads(discovery)
    assert not await planner._leads(discovery)
    assert [record.getMessage() for record in caplog.records] == [
        "etcd does not answer, and the shares stay until it does: etcd is away"
    ]
    discovery.is_away = False
    assert await planner._leads(discovery)
    assert await planner._leads(discovery)
    assert [record.getMessage() for record in caplog.records[1:]] == [
        "etcd answers again",
        "this planner leads namespace dynamo, epoch 1",
    ]


async def test_planner_that_waits_for_another_one_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "dynamo_trtllm.planner")
    discovery = MemoryDiscovery()
    first = await discovery.try_to_lead("dynamo", "another")
    assert first is not None
    planner = PlannerProcess(PlannerConfig(slo_ttft_ms=2000, slo_itl_ms=100))
    assert not await planner._leads(discovery)
    assert not await planner._leads(discovery)
    assert planner._health.is_leader is False
    await first.aclose()
    assert await planner._leads(discovery)
    assert planner._health.is_leader is True
    assert [record.getMessage() for record in caplog.records] == [
        "another planner leads namespace dynamo, and this one waits",
        "this planner leads namespace dynamo, epoch 2",
    ]


async def test_planner_takes_the_reports_of_frontends() -> None:
    planner = PlannerProcess(PlannerConfig(slo_ttft_ms=2000, slo_itl_ms=100))
    one = elastic_instance(1)
    planner._view.add(one)
    observer = Observer(planner._view, 0.0)
    plane = RequestPlane(InprocTransport(), PlaneLimits())
    async with AsyncExitStack() as stack:
        stack.push_async_callback(plane.aclose)
        discovery = MemoryDiscovery()
        await planner._follow(discovery, plane, observer, stack)
        usage = ModelUsage((0, 0, 0), {}, {}, queued_choices=3, queued_tokens=50)
        subject = frontend_usage_subject("dynamo")
        plane.try_publish(subject, b"no report")
        plane.try_publish(subject, encode(FrontendUsage(1, 1, {one.card.name: usage}, {})))
        await asyncio.sleep(0)
        now = asyncio.get_running_loop().time()
        (observation,) = observer.observations(now).values()
    assert observation.queue == FrontendQueue(choices=3, tokens=50)


def test_pools_of_one_model_are_named_by_their_workers() -> None:
    planner = PlannerProcess(PlannerConfig(slo_ttft_ms=2000, slo_itl_ms=100))
    one = elastic_instance(1)
    key = PoolKey("tiny", pairing_key(one))
    planner._view.add(one)
    assert planner._name_of_pool(key) == "tiny"
    larger = msgspec.structs.replace(LAYOUT, block_tokens=32)
    for number in range(2, 8):
        planner._view.add(msgspec.structs.replace(elastic_instance(number), layout=larger))
    others = PoolKey("tiny", pairing_key(planner._view.instances()[-1]))
    assert planner._name_of_pool(key) == "tiny (1)"
    assert planner._name_of_pool(others) == "tiny (2, 3, 4, 5 and 2 more)"


async def test_missing_elastic_workers_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    planner = PlannerProcess(PlannerConfig(slo_ttft_ms=2000, slo_itl_ms=100))
    caplog.set_level("INFO", "dynamo_trtllm.planner")
    planner._report({})
    planner._report({})
    assert [record.getMessage() for record in caplog.records] == [
        "namespace dynamo: there is no elastic worker; start some with --disaggregation-mode elastic"
    ]
