"""What a list or an event is news of."""

from __future__ import annotations

import logging

import msgspec
import pytest

from dynamo_trtllm import codec
from dynamo_trtllm.discovery.base import Down, Up
from dynamo_trtllm.discovery.keys import endpoint_of, instance_key
from dynamo_trtllm.discovery.mirror import Mirror
from dynamo_trtllm.messages import Instance
from tests.instances import make_instance


def entry(instance: Instance) -> tuple[str, bytes]:
    return instance_key(endpoint_of(instance), instance.id), codec.encode(instance)


ONE, TWO, THREE = (make_instance(number) for number in (1, 2, 3))
TWO_CHANGED = msgspec.structs.replace(TWO, version="2.0")


def test_relist_when_some_vanished_and_some_changed_then_exactly_the_difference() -> None:
    mirror = Mirror()
    assert mirror.relist(dict([entry(ONE), entry(TWO)])) == [Up(ONE), Up(TWO)]
    assert mirror.relist(dict([entry(TWO_CHANGED), entry(THREE)])) == [Down(1), Up(TWO_CHANGED), Up(THREE)]
    assert mirror.relist(dict([entry(TWO_CHANGED), entry(THREE)])) == []


def test_put_when_record_is_known_then_nothing() -> None:
    mirror = Mirror()
    assert mirror.put(*entry(ONE)) == [Up(ONE)]
    assert mirror.put(*entry(ONE)) == []


def test_removed_when_known_then_down_once() -> None:
    mirror = Mirror()
    key, record = entry(ONE)
    mirror.put(key, record)
    assert mirror.removed(key) == [Down(1)]
    assert mirror.removed(key) == []
    assert mirror.put(key, record) == [Up(ONE)]


def test_put_when_unreadable_then_skipped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    mirror = Mirror()
    with caplog.at_level(logging.WARNING):
        assert mirror.put("v1/instances/dynamo/a/b/1", b"\xc1") == []
        assert mirror.put("v1/instances/dynamo/a/b/1", b"\xc1") == []
        assert mirror.put("v1/instances/dynamo/odd", entry(ONE)[1]) == []
    assert len(caplog.records) == 2


def test_put_when_known_record_becomes_unreadable_then_down() -> None:
    mirror = Mirror()
    key, record = entry(ONE)
    mirror.put(key, record)
    assert mirror.put(key, b"\xc1") == [Down(1)]
    assert mirror.removed(key) == []
