"""Delays grow, stay under the cap and start again."""

from __future__ import annotations

from dynamo_trtllm.discovery.etcd_store import Backoff


def test_delays_when_tried_again_then_double_up_to_the_cap() -> None:
    backoff = Backoff()
    for full_s in (0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert full_s / 2 <= backoff.next_s() <= full_s
    backoff.reset()
    assert backoff.next_s() <= 0.05
