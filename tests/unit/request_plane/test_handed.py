"""Tickets that were sent and not released."""

from __future__ import annotations

from dynamo_trtllm.request_plane.handed import Handed, StreamKey
from tests.instances import make_transfer_params


def test_handed_when_released_by_id_or_stream_then_forgotten_once() -> None:
    handed = Handed()
    first, second = StreamKey("a", 1), StreamKey("b", 1)
    handed.put(first, make_transfer_params("t1"), 1)
    handed.put(second, make_transfer_params("t2"), 1)
    assert handed.key_of("t2") == second
    assert handed.of("a") == [first]
    taken = handed.pop(first)
    assert taken is not None
    assert taken.transfer_id == "t1"
    assert handed.pop(first) is None
    assert handed.key_of("t1") is None
    assert handed.keys() == [second]


def test_handed_when_time_passes_then_the_oldest_have_expired() -> None:
    handed = Handed()
    keys = [StreamKey("a", number) for number in range(3)]
    for key, ttl_s in zip(keys, (-2.0, -1.0, 60.0), strict=True):
        kv_params = make_transfer_params(f"t{key.stream}", ttl_s=ttl_s)
        handed.put(key, kv_params, 1)
    assert handed.expired(make_transfer_params("now", ttl_s=0.0).expires_at) == keys[:2]
    assert len(handed) == 3
