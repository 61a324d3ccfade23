"""Resident memory of real processes after they served a chat: the bars a small machine sets."""

from __future__ import annotations

import pytest

from tests.e2e.demo_model.torch_cluster import TorchCluster

pytestmark = pytest.mark.timeout(240)  # the first test also starts the cluster

MB = 1_000_000
BARS = {"prefill": 700 * MB, "decode": 700 * MB, "aggregated": 700 * MB, "frontend": 220 * MB}


@pytest.mark.parametrize("role", BARS)
def test_memory_when_a_process_has_served_then_under_its_bar(
    torch_cluster: TorchCluster, role: str
) -> None:
    used = torch_cluster.resident_bytes[role]
    print(f"\nresident MB of {role}: {used / MB:.0f}")
    assert used < BARS[role]
