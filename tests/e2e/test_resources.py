"""Resident memory of real processes after they served: the bars a small machine sets."""

from __future__ import annotations

import httpx
import psutil
import pytest

from tests.e2e.cluster import TINY
from tests.e2e.conftest import AGGREGATED, TorchCluster

pytestmark = pytest.mark.timeout(120)  # the first test also starts the cluster

MB = 1_000_000
WORKER_BYTES = 700 * MB
FRONTEND_BYTES = 220 * MB


@pytest.fixture
def served(tiny: httpx.Client, torch_cluster: TorchCluster) -> TorchCluster:
    for name in (TINY, AGGREGATED):
        body = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
        assert tiny.post("/v1/chat/completions", json=body).status_code == 200
    return torch_cluster


def resident(pid: int) -> int:
    return psutil.Process(pid).memory_info().rss


def test_memory_when_a_worker_has_served_then_under_its_bar(served: TorchCluster) -> None:
    used = {
        role: resident(worker.pid) / MB
        for role, worker in (("prefill", served.prefill), ("decode", served.decode), ("whole", served.aggregated))
    }
    print("\nresident MB:", {role: round(size) for role, size in used.items()})
    assert max(used.values()) < WORKER_BYTES / MB, used


def test_memory_when_the_frontend_has_served_harmony_then_under_its_bar(served: TorchCluster) -> None:
    used = resident(served.cluster.frontend.pid)
    print(f"\nresident MB: {used / MB:.0f}")
    assert used < FRONTEND_BYTES, f"{used / MB:.0f} MB"
