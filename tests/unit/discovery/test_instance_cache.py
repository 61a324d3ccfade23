"""What a list or an event is news of."""

from __future__ import annotations

import logging

import msgspec
import pytest

from dynamo_trtllm import codec
from dynamo_trtllm.discovery import instance_cache as mirror_module
from dynamo_trtllm.discovery.base import Added, Rejected, Removed
from dynamo_trtllm.discovery.instance_cache import InstanceCache
from dynamo_trtllm.discovery.keys import EndpointId, endpoint_of, instance_key, subject
from dynamo_trtllm.messages import Instance
from tests.instances import make_instance


def entry(instance: Instance) -> tuple[str, bytes]:
    return instance_key(endpoint_of(instance), instance.id), codec.encode(instance)


ONE, TWO, THREE = (make_instance(number) for number in (1, 2, 3))
TWO_CHANGED = msgspec.structs.replace(TWO, version="2.0")


def test_relist_when_some_vanished_and_some_changed_then_exactly_the_difference() -> None:
    mirror = InstanceCache()
    assert mirror.relist(dict([entry(ONE), entry(TWO)])) == [Added(ONE), Added(TWO)]
    assert mirror.relist(dict([entry(TWO_CHANGED), entry(THREE)])) == [Removed(1), Added(TWO_CHANGED), Added(THREE)]
    assert mirror.relist(dict([entry(TWO_CHANGED), entry(THREE)])) == []


def test_relist_when_one_is_missing_then_down_after_the_grace_and_news_of_others_at_once() -> None:
    mirror = InstanceCache(grace_s=10)
    mirror.relist(dict([entry(ONE), entry(TWO)]), 100.0)
    assert mirror.due_s is None
    assert mirror.relist(dict([entry(TWO_CHANGED), entry(THREE)]), 101.0) == [Added(TWO_CHANGED), Added(THREE)]
    assert mirror.due_s == 111.0
    assert mirror.relist(dict([entry(THREE)]), 105.0) == []  # another cut does not begin the grace of ONE again
    assert mirror.due_s == 111.0
    assert mirror.relist(dict([entry(THREE)]), 111.0) == [Removed(1)]
    assert mirror.due_s == 115.0
    assert mirror.relist(dict([entry(THREE)]), 116.0) == [Removed(2)]
    assert mirror.due_s is None


@pytest.mark.parametrize("is_listed", [True, False])
def test_relist_when_the_missing_came_back_within_the_grace_then_nothing(is_listed: bool) -> None:
    mirror = InstanceCache(grace_s=10)
    mirror.relist(dict([entry(ONE)]), 0.0)
    mirror.relist({}, 1.0)
    assert (mirror.relist(dict([entry(ONE)]), 2.0) if is_listed else mirror.put(*entry(ONE))) == []
    assert mirror.due_s is None
    assert mirror.relist({}, 20.0) == []  # missing once more: a grace of its own
    assert mirror.due_s == 30.0


def test_removed_when_missing_then_down_at_once_and_once() -> None:
    mirror = InstanceCache(grace_s=10)
    mirror.relist(dict([entry(ONE)]), 0.0)
    mirror.relist({}, 1.0)
    assert mirror.removed(entry(ONE)[0]) == [Removed(1)]
    assert mirror.due_s is None
    assert mirror.relist({}, 20.0) == []


def test_wait_anew_when_some_are_missing_then_the_grace_begins_with_the_next_list() -> None:
    mirror = InstanceCache(grace_s=10)
    mirror.relist(dict([entry(ONE)]), 0.0)
    mirror.relist({}, 1.0)
    mirror.wait_anew()
    assert mirror.relist({}, 30.0) == []
    assert mirror.due_s == 40.0
    assert mirror.relist({}, 40.0) == [Removed(1)]


def test_put_when_record_is_known_then_nothing() -> None:
    mirror = InstanceCache()
    assert mirror.put(*entry(ONE)) == [Added(ONE)]
    assert mirror.put(*entry(ONE)) == []


def test_removed_when_known_then_down_once() -> None:
    mirror = InstanceCache()
    key, record = entry(ONE)
    mirror.put(key, record)
    assert mirror.removed(key) == [Removed(1)]
    assert mirror.removed(key) == []
    assert mirror.put(key, record) == [Added(ONE)]


ODD_KEY = "v1/instances/dynamo/a/b/1"


def reasons(news: list[Added | Removed | Rejected]) -> list[tuple[str, str | None]]:
    """Of what was rejected, and nothing else."""
    assert all(isinstance(each, Rejected) for each in news)
    return [(each.key, each.reason) for each in news if isinstance(each, Rejected)]


def test_put_when_unreadable_then_rejected_once_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    mirror = InstanceCache()
    with caplog.at_level(logging.WARNING):
        ((key, reason),) = reasons(mirror.put(ODD_KEY, b"\xc1"))
        assert mirror.put(ODD_KEY, b"\xc1") == []
        assert len(mirror.put("v1/instances/dynamo/odd", entry(ONE)[1])) == 1
    assert key == ODD_KEY
    assert reason is not None
    assert caplog.records[0].getMessage() == f"etcd record rejected: {ODD_KEY}: {reason}"
    assert len(caplog.records) == 2


def test_put_when_another_thing_is_wrong_with_it_now_then_rejected_again_with_no_second_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mirror = InstanceCache()
    mirror.put(ODD_KEY, b"\xc1")
    ((_, reason),) = reasons(mirror.put(ODD_KEY, b""))
    assert reason is not None
    assert "truncated" in reason
    assert len(caplog.records) == 1


def test_put_when_a_key_holds_anything_then_the_log_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    ((key, _),) = reasons(InstanceCache().put("v1/instances/dynamo/\n\x1b[2J\udcff" + "x" * 1_000_000, b""))
    assert key.startswith(r"v1/instances/dynamo/\n\x1b[2J\udcffxxx")
    (record,) = caplog.records
    assert len(record.getMessage()) < 500
    assert record.getMessage().isprintable()


def test_put_when_known_record_becomes_unreadable_then_down_and_rejected() -> None:
    mirror = InstanceCache()
    key, record = entry(ONE)
    mirror.put(key, record)
    down, rejected = mirror.put(key, b"\xc1")
    assert down == Removed(1)
    assert isinstance(rejected, Rejected)
    assert mirror.put(key, record) == [Rejected(key, None), Added(ONE)]


def test_removed_when_rejected_then_it_is_over_and_nothing_is_down() -> None:
    mirror = InstanceCache()
    mirror.put(ODD_KEY, b"\xc1")
    assert mirror.removed(ODD_KEY) == [Rejected(ODD_KEY, None)]
    assert mirror.removed(ODD_KEY) == []


def test_relist_when_a_rejected_key_is_listed_no_more_then_it_is_over_at_once() -> None:
    mirror = InstanceCache(grace_s=10)
    mirror.relist({ODD_KEY: b"\xc1", **dict([entry(TWO)])})
    assert mirror.relist({ODD_KEY: b"\xc1"}, 1.0) == []
    assert mirror.relist({}, 2.0) == [Rejected(ODD_KEY, None)]
    assert mirror.relist({}, 11.0) == [Removed(2)]


def test_put_when_the_record_is_of_another_id_then_it_stands_for_no_instance_and_takes_none_down() -> None:
    """The key of a ghost with the record of a real worker, and a ghost at the key of a real worker."""
    mirror = InstanceCache()
    mirror.put(*entry(ONE))
    ghost_key = entry(THREE)[0]
    ((_, reason),) = reasons(mirror.put(ghost_key, entry(ONE)[1]))
    assert reason == "id is 3 in the key and 1 in the record"
    assert reasons(mirror.removed(ghost_key)) == [(ghost_key, None)]
    assert mirror.put(*entry(ONE)) == []  # it stands as before


def moved(instance: Instance, component: str = "zzz") -> Instance:
    """The same id at another endpoint, with the key and the subject of that endpoint."""
    endpoint = EndpointId(instance.namespace, component, instance.endpoint)
    return msgspec.structs.replace(instance, component=component, subject=subject(endpoint, instance.id))


def test_put_when_its_id_stands_under_another_key_then_rejected_until_that_one_goes() -> None:
    mirror = InstanceCache()
    mirror.put(*entry(ONE))
    second_key, third_key = entry(moved(ONE))[0], entry(moved(ONE, "zzzz"))[0]
    for second in (moved(ONE), moved(ONE, "zzzz")):
        ((_, reason),) = reasons(mirror.put(*entry(second)))
        assert reason == f"instance id 1 is already registered under the key {entry(ONE)[0]}"
        assert mirror.put(*entry(second)) == []
    assert mirror.put(*entry(ONE)) == []
    assert mirror.removed(entry(ONE)[0]) == [
        Removed(1),
        Rejected(second_key, None),
        Added(moved(ONE)),
        Rejected(third_key, f"instance id 1 is already registered under the key {second_key}"),
    ]
    assert mirror.removed(third_key) == [Rejected(third_key, None)]
    assert mirror.removed(second_key) == [Removed(1)]


def test_put_when_the_first_key_of_an_id_becomes_unreadable_then_the_second_stands() -> None:
    mirror = InstanceCache()
    first_key, second_key = entry(ONE)[0], entry(moved(ONE))[0]
    mirror.put(*entry(ONE))
    mirror.put(*entry(moved(ONE)))
    down, over, up, rejected = mirror.put(first_key, b"\xc1")
    assert [down, over, up] == [Removed(1), Rejected(second_key, None), Added(moved(ONE))]
    assert isinstance(rejected, Rejected)
    assert rejected.key == first_key


@pytest.mark.parametrize("is_listed", [True, False])
def test_relist_when_the_first_key_of_an_id_is_missing_then_the_second_waits_for_its_grace(is_listed: bool) -> None:
    mirror = InstanceCache(grace_s=10)
    mirror.relist(dict([entry(ONE), entry(moved(ONE))]))
    second = dict([entry(moved(ONE))])
    over = Rejected(entry(moved(ONE))[0], None)
    assert mirror.relist(second, 1.0) == []
    expected = [over, Removed(1)] if not is_listed else [Removed(1), over, Added(moved(ONE))]
    assert mirror.relist(second if is_listed else {}, 11.0) == expected


def test_put_when_the_second_key_of_an_id_left_meanwhile_then_it_never_stands() -> None:
    mirror = InstanceCache()
    mirror.put(*entry(ONE))
    mirror.put(*entry(moved(ONE)))
    mirror.removed(entry(moved(ONE))[0])
    assert mirror.removed(entry(ONE)[0]) == [Removed(1)]


def test_put_when_more_are_rejected_than_are_remembered_then_no_news_and_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "MOST_REJECTED", 3)
    mirror = InstanceCache()
    odd = [f"v1/instances/dynamo/odd-{number}" for number in range(6)]
    assert [len(mirror.put(key, b"")) for key in odd] == [1, 1, 1, 0, 0, 0]
    assert len(caplog.records) == 4
    assert "3 etcd records rejected; further ones are not logged or listed" in caplog.text
    assert mirror.removed(odd[5]) == []
    mirror.removed(odd[0])
    assert len(mirror.put(odd[5], b"")) == 1  # there is a place again
    assert mirror.put(*entry(ONE)) == [Added(ONE)]


def test_put_when_too_many_bytes_would_wait_then_the_next_list_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "MOST_WAITING_BYTES", 0)
    mirror = InstanceCache()
    mirror.put(*entry(ONE))
    second = dict([entry(moved(ONE))])
    assert len(mirror.relist(dict([entry(ONE)]) | second)) == 1
    assert mirror.removed(entry(ONE)[0]) == [Removed(1)]
    assert mirror.relist(second) == [Rejected(*second, None), Added(moved(ONE))]
