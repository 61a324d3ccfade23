"""A worker's life on real etcd and NATS, in one process."""

from __future__ import annotations

import asyncio
import threading
import uuid
from contextlib import aclosing
from typing import Any

import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.discovery.base import Down, Up
from dynamo_trtllm.discovery.etcd import EtcdDiscovery
from dynamo_trtllm.engine.mock.engine import MockEngine
from dynamo_trtllm.errors import Unreachable
from dynamo_trtllm.worker import Worker


def config(etcd: str, nats: str, **fields: Any) -> WorkerConfig:
    values = {"model_path": "tiny", "engine": "mock", "namespace": f"t{uuid.uuid4().hex}", "drain_timeout_s": 2.0}
    return WorkerConfig(etcd_endpoints=etcd, nats_server=nats, **{**values, **fields})


async def test_serve_when_stopped_then_it_appeared_and_left(etcd_server: str, nats_server: str) -> None:
    chosen = config(etcd_server, nats_server)
    worker, discovery = Worker(chosen), EtcdDiscovery(etcd_server)
    async with asyncio.timeout(15), asyncio.TaskGroup() as group:
        serving = group.create_task(worker.serve())
        async with aclosing(discovery.watch(chosen.namespace)) as events:
            seen = []
            async for event in events:
                if isinstance(event, Up):
                    seen.append(event.instance.id)
                    worker.stop()
                if isinstance(event, Down):
                    break
        await serving
    await discovery.aclose()
    assert seen == [worker.instance_id]


async def test_serve_when_stopped_while_loading_then_it_ends_at_once(
    etcd_server: str, nats_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = asyncio.Event()

    async def load(_: MockEngine) -> None:
        loading.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(MockEngine, "start", load)
    worker = Worker(config(etcd_server, nats_server))
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(worker.serve())
        await loading.wait()
        worker.stop()


async def test_serve_when_nats_is_not_there_then_unreachable_names_it(etcd_server: str) -> None:
    with pytest.raises(Unreachable, match="localhost:1"):
        await Worker(config(etcd_server, "nats://localhost:1")).serve()


def test_run_when_not_on_the_main_thread_then_says_so() -> None:
    said: list[str] = []

    def run() -> None:
        try:
            Worker(WorkerConfig(model_path="tiny", engine="mock")).run()
        except RuntimeError as exc:
            said.append(str(exc))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert said == ["Worker.run takes signals and needs the main thread; elsewhere await Worker.serve"]
