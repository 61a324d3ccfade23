"""What a worker does before and while its engine loads, on real etcd and NATS, with an engine that
judges itself.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from dynamo_trtllm.cluster.discovery.etcd import EtcdDiscovery
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.capabilities import ReportsProgress, RunsPreflight
from dynamo_trtllm.engines.engine_interface import EngineInfo, Finding
from dynamo_trtllm.engines.mock import engine as mock_engine
from dynamo_trtllm.engines.mock.engine import MockEngine
from dynamo_trtllm.protocol.errors import ConfigError, Unreachable
from dynamo_trtllm.protocol.messages import Instance, Role
from dynamo_trtllm.worker import Worker
from tests.kit.cluster import PLAIN
from tests.kit.instances import make_instance
from tests.kit.waiting import SOON_S


class JudgingEngine(MockEngine, RunsPreflight, ReportsProgress):
    """An engine that does not start beside a decode worker with blocks of 16 tokens."""

    def __init__(self, config: WorkerConfig, *, instance_id: int) -> None:
        super().__init__(config, instance_id=instance_id)
        self.peers: Sequence[Instance] | None = None
        self.loading = asyncio.Event()
        self.loaded = asyncio.Event()

    def preflight(self, peers: Sequence[Instance]) -> list[Finding]:
        self.peers = peers
        return [clash(peer) for peer in peers if peer.layout.block_tokens == 16]

    def progress(self) -> str:
        return "" if self.loaded.is_set() else "reading weights"

    async def start(self) -> EngineInfo:
        self.loading.set()
        await self.loaded.wait()
        return await super().start()


def clash(peer: Instance) -> Finding:
    return Finding(
        severity="error",
        rule="peer-layout",
        field="layout.block_tokens",
        value="32",
        other=f"decode worker {peer.id:x}: 16",
        why="blocks are copied as they are",
        fix="set both to the same",
    )


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[JudgingEngine]:
    """The engines that workers of this test made."""
    made: list[JudgingEngine] = []

    def create(config: WorkerConfig, *, instance_id: int) -> JudgingEngine:
        made.append(JudgingEngine(config, instance_id=instance_id))
        return made[-1]

    monkeypatch.setattr(mock_engine, "MockEngine", create)
    return made


def config(etcd: str, nats: str, **fields: Any) -> WorkerConfig:
    values = {"model_path": "tiny", "engine": "mock", "namespace": f"t{uuid.uuid4().hex}"}
    given = {**values, "disaggregation_mode": Role.PREFILL, **fields}
    return WorkerConfig(etcd_endpoints=etcd, nats_server=nats, **given)


async def test_serve_when_live_peer_does_not_fit_then_not_loaded(
    etcd_server: str, nats_server: str, engines: list[JudgingEngine]
) -> None:
    chosen = config(etcd_server, nats_server)
    discovery = EtcdDiscovery(ConnectionConfig(etcd_endpoints=etcd_server))
    await discovery.register(make_instance(0xABC, namespace=chosen.namespace))
    try:
        with pytest.raises(
            ConfigError, match=r"layout.block_tokens 32 against decode worker abc: 16"
        ) as caught:
            await Worker(chosen).serve()
    finally:
        await discovery.aclose()
    assert caught.value.field == "layout.block_tokens"
    assert not engines[0].loading.is_set()


async def test_serve_without_etcd_is_unreachable_before_loading(
    nats_server: str, engines: list[JudgingEngine]
) -> None:
    with pytest.raises(Unreachable, match="localhost:1"):
        await Worker(config("localhost:1", nats_server)).serve()
    assert engines[0].peers is None
    assert not engines[0].loading.is_set()


async def test_health_during_load_shows_its_stage(
    etcd_server: str,
    nats_server: str,
    engines: list[JudgingEngine],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    serving_worker = Worker(config(etcd_server, nats_server, system_port=0))
    async with asyncio.timeout(3 * SOON_S), httpx.AsyncClient(**PLAIN) as client:
        serving = asyncio.create_task(serving_worker.serve())
        await logged(caplog, "reading weights")
        found = re.search(r"health at (http://localhost:\d+)", caplog.text)
        assert found is not None
        before = await client.get(f"{found[1]}/health")
        assert before.status_code == 503
        instance_id = f"{serving_worker.instance_id:x}"
        said = {"phase": "loading", "reason": "reading weights", "instance_id": instance_id}
        assert before.json() == {"status": "notready"} | said
        ready = await client.get(f"{found[1]}/ready")
        said = {"status": "loading", "reason": "reading weights", "instance_id": instance_id}
        assert (ready.status_code, ready.json()) == (503, said)
        engines[0].loaded.set()
        await logged(caplog, "serving as instance")
        after = await client.get(f"{found[1]}/health")
        assert (after.status_code, after.json()["reason"]) == (200, "")
        serving_worker.stop()
        await serving
    assert engines[0].peers == []


async def test_ready_after_load_shows_registering(
    etcd_server: str,
    nats_server: str,
    engines: list[JudgingEngine],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    registering = asyncio.Event()
    go_on = asyncio.Event()
    register = EtcdDiscovery.register

    async def held(self: EtcdDiscovery, instance: Instance) -> Any:
        registering.set()
        await go_on.wait()
        return await register(self, instance)

    monkeypatch.setattr(EtcdDiscovery, "register", held)
    serving_worker = Worker(config(etcd_server, nats_server, system_port=0))
    async with asyncio.timeout(3 * SOON_S), httpx.AsyncClient(**PLAIN) as client:
        serving = asyncio.create_task(serving_worker.serve())
        await logged(caplog, "reading weights")
        engines[0].loaded.set()
        await registering.wait()
        found = re.search(r"health at (http://localhost:\d+)", caplog.text)
        assert found is not None
        ready = await client.get(f"{found[1]}/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "registering")
        go_on.set()
        await logged(caplog, "serving as instance")
        serving_worker.stop()
        await serving


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    while text not in caplog.text:  # noqa: ASYNC110  # a log has no event
        await asyncio.sleep(0.01)
