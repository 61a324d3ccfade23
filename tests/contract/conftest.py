"""Fixtures: tiny models with random weights, trtllm engines on the fake TensorRT-LLM, and pairs of
request planes.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.cluster.request_plane.client import PlaneClient
from dynamo_trtllm.cluster.request_plane.inproc import InprocBus, InprocPlane
from dynamo_trtllm.cluster.request_plane.nats import NatsPlane
from dynamo_trtllm.cluster.request_plane.server import PlaneServer
from tests.kit.engines import models_loaded_once
from tests.kit.fake_packages import fake_tensorrt_llm, shorten_waits
from tests.kit.request_planes import LIMITS, Network, PlanePair
from tests.kit.tiny_models import save_tiny_gpt_oss, save_tiny_llama
from tests.kit.trtllm_engines import TrtllmEngines, start_engines


@pytest.fixture(scope="session")
def loaded_once() -> Iterator[None]:
    """Let the torch engines of all tests share the weights of a model folder."""
    with models_loaded_once():
        yield


@pytest.fixture(scope="session")
def gpt_oss(loaded_once: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gpt_oss(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def llama(loaded_once: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import the fake `tensorrt_llm`, and shorten the adapter's timeouts."""
    shorten_waits(monkeypatch)
    with fake_tensorrt_llm() as found:
        yield found


@pytest.fixture
async def engines(package: Any, gpt_oss: Path) -> AsyncIterator[TrtllmEngines]:
    async with start_engines(package, gpt_oss) as found:
        yield found


@pytest.fixture(params=["inproc", "nats"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[PlanePair]:
    tasks_before = asyncio.all_tasks()
    if request.param == "inproc":
        bus = InprocBus()
        planes = PlanePair(InprocPlane(LIMITS, bus), InprocPlane(LIMITS, bus))
    else:
        url = request.getfixturevalue("nats_server")
        planes = PlanePair(
            await NatsPlane.connect(url, LIMITS), await NatsPlane.connect(url, LIMITS)
        )
    yield planes
    await planes.caller.aclose()
    await planes.worker.aclose()
    await asyncio.sleep(0.01)
    here = {asyncio.current_task()}
    assert {task.get_name() for task in asyncio.all_tasks() - tasks_before - here} == set()


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """Intercept messages of request planes. Must be requested before the planes."""
    network = Network()
    take_at_caller = PlaneClient._on_message
    take_at_worker = PlaneServer._on_message

    def at_caller(plane: PlaneClient, data: bytes, reply: str) -> None:
        for message in network.to_caller(data):
            take_at_caller(plane, message, reply)

    def at_worker(serving: PlaneServer, data: bytes, reply: str) -> None:
        for message in network.to_worker(data):
            take_at_worker(serving, message, reply)

    monkeypatch.setattr(PlaneClient, "_on_message", at_caller)
    monkeypatch.setattr(PlaneServer, "_on_message", at_worker)
    return network
