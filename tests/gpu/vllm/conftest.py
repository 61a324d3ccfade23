"""Real vLLM engines on the GPUs that nvidia-smi lists: gpt-oss-120b's shape with few layers and
dummy weights.

VLLM_TEST_MODEL names a model folder instead. VLLM_TEST_GPUS=0,0 lets two workers share a GPU; then
limit the memory of each with VLLM_TEST_ARGUMENTS='{"gpu_memory_utilization": 0.4}'. Without GPUs
the engines run on the CPU if vLLM's build does.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu.deployment import GpuDeployment
from benchmarks.gpu.machine import gpu_names
from benchmarks.gpu.model import write_model
from benchmarks.gpu.parity import Reference, reference
from benchmarks.gpu.plan import Plan, disaggregated, replicas
from benchmarks.gpu.scenario import Sizes

_LAYERS = 4
_READY_S = 480.0
SIZES = Sizes(
    parity_prompts=12,
    longest=6000,
    parity_osl=16,
    parity_concurrency=6,
    cancel_requests=60,
    cancel_isl=2000,
    kill_s=_READY_S,
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    named = os.environ.get("VLLM_TEST_MODEL")
    return named or str(write_model(tmp_path_factory.mktemp("model") / "bench", layers=_LAYERS))


def plan_for(model: str, count: int, first: int | None = None) -> Plan:
    """On so many GPUs."""
    named = os.environ.get("VLLM_TEST_GPUS")
    gpus = tuple(map(int, named.split(","))) if named else tuple(range(len(gpu_names())))
    if gpus and len(gpus) < count:
        pytest.skip(f"needs {count} GPUs, there are {len(gpus)}")
    return Plan(
        engine="vllm",
        model=model,
        gpus=gpus[:count],
        first=first,
        layers=_LAYERS,
        is_eager=True,
        ready_s=_READY_S,
        extra={"jit_monitor_verbose": True}
        | json.loads(os.environ.get("VLLM_TEST_ARGUMENTS", "{}")),
    )


@pytest.fixture(scope="module", params=[2, 4], ids=["tp1-tp1", "tp2-tp2"])
def plan(request: pytest.FixtureRequest, model: str) -> Plan:
    return plan_for(model, request.param)


@pytest.fixture(scope="module")
def aggregated(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What two aggregated workers answer. They are gone when this returns."""
    deployed = GpuDeployment(
        plan, replicas(plan), tmp_path_factory.mktemp("log") / "aggregated.log"
    )
    try:
        deployed.start()
        return asyncio.run(reference(deployed.url, SIZES))
    finally:
        deployed.stop()


@pytest.fixture(scope="module")
def pair(
    aggregated: Reference, plan: Plan, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GpuDeployment]:
    """A prefill and a decode worker, started when the aggregated ones have left the GPUs."""
    yield from started(plan, tmp_path_factory.mktemp("log") / "disaggregated.log")


def started(plan: Plan, log: Path) -> Iterator[GpuDeployment]:
    deployed = GpuDeployment(plan, disaggregated(plan), log)
    try:
        deployed.start()
        yield deployed
    finally:
        deployed.stop()
