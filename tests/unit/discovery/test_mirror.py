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


def test_relist_when_one_is_missing_then_down_after_the_grace_and_news_of_others_at_once() -> None:
    mirror = Mirror(grace_s=10)
    mirror.relist(dict([entry(ONE), entry(TWO)]), 100.0)
    assert mirror.due_s is None
    assert mirror.relist(dict([entry(TWO_CHANGED), entry(THREE)]), 101.0) == [Up(TWO_CHANGED), Up(THREE)]
    assert mirror.due_s == 111.0
    assert mirror.relist(dict([entry(THREE)]), 105.0) == []  # another cut does not begin the grace of ONE again
    assert mirror.due_s == 111.0
    assert mirror.relist(dict([entry(THREE)]), 111.0) == [Down(1)]
    assert mirror.due_s == 115.0
    assert mirror.relist(dict([entry(THREE)]), 116.0) == [Down(2)]
    assert mirror.due_s is None


@pytest.mark.parametrize("is_listed", [True, False])
def test_relist_when_the_missing_came_back_within_the_grace_then_nothing(is_listed: bool) -> None:
    mirror = Mirror(grace_s=10)
    mirror.relist(dict([entry(ONE)]), 0.0)
    mirror.relist({}, 1.0)
    assert (mirror.relist(dict([entry(ONE)]), 2.0) if is_listed else mirror.put(*entry(ONE))) == []
    assert mirror.due_s is None
    assert mirror.relist({}, 20.0) == []  # missing once more: a grace of its own
    assert mirror.due_s == 30.0


def test_removed_when_missing_then_down_at_once_and_once() -> None:
    mirror = Mirror(grace_s=10)
    mirror.relist(dict([entry(ONE)]), 0.0)
    mirror.relist({}, 1.0)
    assert mirror.removed(entry(ONE)[0]) == [Down(1)]
    assert mirror.due_s is None
    assert mirror.relist({}, 20.0) == []


def test_wait_anew_when_some_are_missing_then_the_grace_begins_with_the_next_list() -> None:
    mirror = Mirror(grace_s=10)
    mirror.relist(dict([entry(ONE)]), 0.0)
    mirror.relist({}, 1.0)
    mirror.wait_anew()
    assert mirror.relist({}, 30.0) == []
    assert mirror.due_s == 40.0
    assert mirror.relist({}, 40.0) == [Down(1)]


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
