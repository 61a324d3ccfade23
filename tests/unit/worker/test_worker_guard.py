"""The KV transfer guard that a worker gives to its engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.capabilities import GuardsKvTransfers
from dynamo_trtllm.engines.engine_interface import EngineInfo
from dynamo_trtllm.kv_transfer.guard import TransferGuard
from dynamo_trtllm.kv_transfer.prefill_addresses import PrefillAddresses
from dynamo_trtllm.protocol.errors import EngineFailed, TransferRejected
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.worker import worker as worker_module
from dynamo_trtllm.worker.worker import Worker
from tests.kit.instances import make_transfer_params
from tests.unit.worker.test_service import TransferringEngine


class GuardedEngine(TransferringEngine, GuardsKvTransfers):
    """An engine that gets its guard, and does not start."""

    guard: TransferGuard

    def use_transfer_guard(self, guard: TransferGuard) -> None:
        self.guard = guard

    async def start(self) -> EngineInfo:
        raise EngineFailed("it does not start")


@pytest.mark.parametrize("role", Role)
async def test_guard_checks_addresses_where_kv_is_fetched(
    monkeypatch: pytest.MonkeyPatch, role: Role
) -> None:
    without_wait = partial(PrefillAddresses, wait_s=0.0)
    monkeypatch.setattr(worker_module, "PrefillAddresses", without_wait)
    engine = GuardedEngine()

    def create(config: WorkerConfig, *, instance_id: int) -> Any:
        return engine

    config = WorkerConfig(
        model_path="m",
        disaggregation_mode=role,
        etcd_endpoints="memory://guard",
        nats_server="inproc://guard",
    )
    with pytest.raises(EngineFailed, match="does not start"):
        await Worker(config, engine=create).serve()
    checked = engine.guard.check_address(make_transfer_params("t-1"), "10.0.0.1:22")
    if role in (Role.DECODE, Role.ELASTIC):
        with pytest.raises(TransferRejected, match="no prefill worker is registered"):
            await checked
    else:
        await checked
