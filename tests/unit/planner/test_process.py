"""What a planner says while etcd is away. Integration tests run planners with a real etcd."""

from __future__ import annotations

import pytest

from dynamo_trtllm.cluster.discovery.memory import MemoryDiscovery, MemoryLeadership
from dynamo_trtllm.config.planner import PlannerConfig
from dynamo_trtllm.planner.process import PlannerProcess
from dynamo_trtllm.protocol.errors import Unreachable


class LostDiscovery(MemoryDiscovery):
    """A discovery that answers at first, and then while `is_away` is false."""

    is_away = False

    async def lead_planners(self, namespace: str, name: str) -> MemoryLeadership | None:
        if self.is_away:
            raise Unreachable("etcd is away")
        return await super().lead_planners(namespace, name)


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


async def test_missing_elastic_workers_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    planner = PlannerProcess(PlannerConfig(slo_ttft_ms=2000, slo_itl_ms=100))
    caplog.set_level("INFO", "dynamo_trtllm.planner")
    planner._report({})
    planner._report({})
    assert [record.getMessage() for record in caplog.records] == [
        "namespace dynamo: there is no elastic worker; start some with --disaggregation-mode elastic"
    ]
