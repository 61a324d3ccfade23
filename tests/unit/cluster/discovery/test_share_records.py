"""Share tables: what is written, what is rejected, and what stays then."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.cluster.discovery.discovery_interface import Added, Rejected, SharesChanged
from dynamo_trtllm.cluster.discovery.instance_cache import InstanceCache
from dynamo_trtllm.cluster.discovery.records import (
    BadRecord,
    endpoint_of,
    instance_key,
    read_instance,
    written,
)
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
    "too long": record({number: {"prefill": 1.0, "decode": 1.0} for number in range(20_000)}),
}


def test_share_table_is_read_as_written() -> None:
    assert read_share_table(written_share_table(TABLE)) == TABLE


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
    assert isinstance(event, Rejected)
    assert event.reason
    good = msgspec.structs.replace(TABLE, revision=8)
    assert cache.put(KEY, written_share_table(good)) == [
        Rejected(KEY, None),
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
