"""Share tables: what is written, what is rejected, and what stays then."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.cluster.discovery.discovery_interface import (
    Added,
    RejectionChanged,
    SharesChanged,
    StoredShares,
)
from dynamo_trtllm.cluster.discovery.instance_cache import InstanceCache
from dynamo_trtllm.cluster.discovery.records import (
    MAX_RECORD_BYTES,
    BadRecord,
    endpoint_of,
    instance_key,
    read_instance,
    written,
)
from dynamo_trtllm.cluster.discovery.share_changes import changed_table
from dynamo_trtllm.cluster.discovery.share_records import (
    is_share_key,
    read_share_table,
    share_key,
    stored_shares,
    written_share_table,
)
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import WIRE_VERSION, Instance, Role, decode
from dynamo_trtllm.protocol.shares import Shares, ShareTable
from tests.kit.cases import each_case
from tests.kit.instances import elastic_instance, make_instance

KEY = share_key("dynamo")
TABLE = ShareTable(
    epoch=3, revision=7, workers={1: Shares(1.0, 0.25)}, reason="more prompts", wire=WIRE_VERSION
)


def record(workers: Mapping[Any, Any], **fields: Any) -> bytes:
    return msgspec.msgpack.encode({"workers": workers, "wire": WIRE_VERSION} | fields)


BAD_TABLES = {
    "not a number": record({1: {"prefill": math.nan, "decode": 1.0}}),
    "infinite": record({1: {"prefill": math.inf, "decode": 1.0}}),
    "negative": record({1: {"prefill": -0.1, "decode": 1.0}}),
    "above 1": record({1: {"prefill": 1.0, "decode": 1.01}}),
    "a text": record({1: {"prefill": "1", "decode": 1.0}}),
    "none": record({1: {"prefill": None, "decode": 1.0}}),
    "both are 0": record({1: {"prefill": 0.0, "decode": 0.0}}),
    "one is missing": record({1: {"prefill": 1.0}}),
    "no shares": record({1: 0.5}),
    "a name for an id": record({"one": {"prefill": 1.0, "decode": 1.0}}),
    "no table": b"shares",
    "a newer wire version": record({}, wire=WIRE_VERSION + 2),
    "an older wire version": record({}, wire=WIRE_VERSION - 2),
    "a negative revision": record({}, revision=-1),
    "a long reason": record({}, reason="x" * 401),
    "a long reason before": record({}, history=[{"reason": "x" * 401}]),
    "a long name of a writer": record({}, history=[{"writer": "x" * 201}]),
    "a long history": record({}, history=[{}] * 51),
    "a share of before that is no number": record(
        {}, history=[{"before": {1: {"prefill": math.nan, "decode": 1.0}}}]
    ),
    "a time that is no number": record({}, since={1: math.nan}),
    "too long": record({number: {"prefill": 1.0, "decode": 1.0} for number in range(20_000)}),
}


def test_share_table_is_read_as_written() -> None:
    assert read_share_table(written_share_table(TABLE)) == TABLE


def table_after(num_changes: int, num_workers: int = 1) -> ShareTable:
    """Return a table that was changed so often, each time for all workers."""
    table = ShareTable()
    workers = range(1 << 62, (1 << 62) + num_workers)
    for number in range(num_changes):
        shares = dict.fromkeys(workers, Shares(1.0, number / num_changes))
        changed = changed_table(
            StoredShares(table), shares, registered=shares, reason=str(number), now=float(number)
        )
        assert changed is not None
        table = changed
    return table


def test_history_has_the_latest_changes() -> None:
    table = table_after(num_changes=60)
    assert [change.reason for change in table.history] == [str(number) for number in range(10, 60)]
    assert table.history[-1].before == {1 << 62: Shares(1.0, 58 / 60)}
    assert table.history[-1].after == table.workers


def test_history_of_many_workers_leaves_space_for_their_shares() -> None:
    for num_workers, num_changes in ((200, 3), (1000, 1)):
        table = table_after(num_changes=60, num_workers=num_workers)
        assert len(table.history) == num_changes
        assert len(written_share_table(table)) <= MAX_RECORD_BYTES
        # Of very many workers, it is known when and why they changed.
        assert table.history[-1].reason == "59"


def test_times_are_those_at_which_shares_changed() -> None:
    present = {1: Shares(1.0, 1.0), 2: Shares(1.0, 1.0)}
    stored = StoredShares(None)
    for now, changes in ((10.0, {1: Shares(1.0, 0.0)}), (20.0, {1: Shares(1.0, 0.0)})):
        table = changed_table(stored, changes, registered=present, now=now)
        assert table is not None
        stored = StoredShares(table)
    assert stored.table is not None
    assert stored.table.since == {1: 10.0}
    gone = changed_table(stored, {2: Shares(0.0, 1.0)}, registered={2: Shares(1.0, 1.0)}, now=30.0)
    assert gone is not None
    assert gone.since == {2: 30.0}


def test_share_key_is_no_key_of_an_instance() -> None:
    instance = make_instance(1)
    assert is_share_key(KEY)
    assert not is_share_key(instance_key(endpoint_of(instance), 1))
    odd = msgspec.structs.replace(instance, component="shares", endpoint="shares")
    assert not is_share_key(instance_key(endpoint_of(odd), 1))


@each_case("name", BAD_TABLES)
def test_bad_table_is_rejected_and_old_shares_stay(name: str) -> None:
    cache = InstanceCache()
    assert cache.put(KEY, written_share_table(TABLE)) == [SharesChanged(TABLE)]
    (event,) = cache.put(KEY, BAD_TABLES[name])
    assert isinstance(event, RejectionChanged)
    assert event.reason
    good = msgspec.structs.replace(TABLE, revision=8)
    assert cache.put(KEY, written_share_table(good)) == [
        RejectionChanged(KEY, None),
        SharesChanged(good),
    ]


def test_bad_table_is_not_written() -> None:
    with pytest.raises(ConfigError, match="worker 1: both shares are 0"):
        written_share_table(ShareTable(workers={1: Shares(0.0, 0.0)}, wire=WIRE_VERSION))


def test_stored_bad_table_says_its_problem() -> None:
    stored = stored_shares(BAD_TABLES["both are 0"], 5)
    assert stored.table is None
    assert stored.version == 5
    assert "both shares are 0" in stored.problem


def test_unchanged_table_is_no_event() -> None:
    cache = InstanceCache()
    table = written_share_table(TABLE)
    assert cache.relist({KEY: table}) == [SharesChanged(TABLE)]
    assert cache.relist({KEY: table}) == []
    assert cache.put(KEY, table) == []


def test_missing_table_counts_until_the_grace_time_is_over() -> None:
    cache = InstanceCache(grace_s=10.0)
    cache.relist({KEY: written_share_table(TABLE)})
    assert cache.relist({}, now_s=1.0) == []
    assert cache.next_list_s == 11.0
    assert cache.relist({}, now_s=11.0) == [SharesChanged(None)]


def test_deleted_table_is_gone() -> None:
    cache = InstanceCache()
    cache.put(KEY, written_share_table(TABLE))
    assert cache.delete(KEY) == [SharesChanged(None)]
    assert cache.delete(KEY) == []


def test_table_and_instances_are_in_one_list() -> None:
    instance = elastic_instance(1)
    key, encoded = written(instance)
    events = InstanceCache().relist({key: encoded, KEY: written_share_table(TABLE)})
    assert events[-2:] == [Added(instance), SharesChanged(TABLE)]


def test_elastic_worker_is_aggregated_for_earlier_frontends() -> None:
    """They decode the role, and skip fields that they do not know."""

    class EarlierInstance(msgspec.Struct):
        role: str
        serves_whole: bool

    _, encoded = written(elastic_instance(1))
    earlier = decode(encoded, EarlierInstance)
    assert earlier.role == Role.AGGREGATED
    assert earlier.serves_whole


def test_elastic_worker_is_read_as_written() -> None:
    instance = elastic_instance(1, Shares(0.0, 0.5))
    assert read_instance(*written(instance)) == instance


@each_case(
    ("changes", "reason"),
    [
        ({"role": Role.ELASTIC}, "role is elastic"),
        ({"role": Role.AGGREGATED, "can_aggregate": False}, "serves_whole is false"),
        ({"role": Role.AGGREGATED, "shares": Shares(0.0, 0.0)}, "both shares are 0"),
        ({"role": Role.AGGREGATED, "shares": Shares(-1.0, 1.0)}, "shares.prefill"),
        ({"role": Role.AGGREGATED, "shares": Shares(math.nan, 1.0)}, "shares.prefill"),
    ],
)
def test_bad_elastic_record_is_rejected(changes: dict[str, Any], reason: str) -> None:
    instance: Instance = msgspec.structs.replace(elastic_instance(1), **changes)
    with pytest.raises(BadRecord, match=reason):
        read_instance(instance_key(endpoint_of(instance), 1), msgspec_encode(instance))


def msgspec_encode(instance: Instance) -> bytes:
    return msgspec.msgpack.encode(instance)
