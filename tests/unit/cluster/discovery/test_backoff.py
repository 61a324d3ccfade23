"""Delays grow and stay under the cap."""

from __future__ import annotations

from dynamo_trtllm.cluster.discovery.etcd_store import backoff


def test_delays_when_tried_again_then_double_up_to_the_cap() -> None:
    for full_s, delay_s in zip((0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0), backoff(), strict=False):
        assert full_s / 2 <= delay_s <= full_s
