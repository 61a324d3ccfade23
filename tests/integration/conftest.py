"""Workers in this process, whose engines a test may look into."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from dynamo_trtllm.cluster.request_plane.nats import NatsPlane
from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.engines.factory import EngineKind
from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.worker import worker as worker_module
from tests.kit.waiting import SOON_S
from tests.kit.workers import RunningWorkers


@pytest.fixture(scope="module", autouse=True)
def without_fastokens() -> Iterator[None]:
    """Let frontends of this process not load fastokens for long prompts, or after some time.

    That takes 3 s of CPU time, and prompts here are short.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HarmonyRenderer, "preload", lambda renderer: None)
        yield


@pytest.fixture
async def running_workers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningWorkers]:
    """Stopped at the end, which none may have come before."""
    engines: list[Engine] = []
    create = EngineKind.create

    def creating(kind: EngineKind, *args: Any, **named: Any) -> Engine:
        engines.append(create(kind, *args, **named))
        return engines[-1]

    planes: list[NatsPlane] = []
    connect = worker_module.connect_plane

    async def connecting(*args: Any) -> NatsPlane:
        plane = await connect(*args)
        assert isinstance(plane, NatsPlane)
        planes.append(plane)
        return plane

    monkeypatch.setattr(EngineKind, "create", creating)
    monkeypatch.setattr(worker_module, "connect_plane", connecting)
    made = RunningWorkers(engines, planes)
    yield made
    for worker in made.workers:
        worker.stop()
    async with asyncio.timeout(3 * SOON_S):
        await asyncio.gather(*made.tasks)
