"""What /health and readiness say of a model: roles, pairs, instances that fit no other."""

from __future__ import annotations

import time

import msgspec

from dynamo_trtllm.cluster.discovery.memory import InstanceRecords, MemoryDiscovery
from dynamo_trtllm.cluster.request_plane.inproc import InprocPlane
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.model_registry import (
    ModelRegistry,
    mismatches,
    not_ready_reason,
)
from dynamo_trtllm.frontend.routing.pair_breakers import BreakerLimits, PairBreakers
from dynamo_trtllm.protocol.messages import Role
from tests.kit.instances import LAYOUT, make_instance, model_view

PREFILL = make_instance(0xA, role=Role.PREFILL)
DECODE = make_instance(0xB)
ODD = msgspec.structs.replace(
    make_instance(0xC), layout=msgspec.structs.replace(LAYOUT, block_tokens=64)
)
PAIR = model_view(prefill=(PREFILL,), decode=(DECODE,))


def test_lacking_when_roles_are_missing_then_names_them() -> None:
    assert (
        not_ready_reason(model_view(), "m", None)
        == "model m has no prefill worker and no decode worker"
    )
    assert (
        not_ready_reason(model_view(prefill=(PREFILL,)), "m", None)
        == "model m has no decode worker"
    )


def test_lacking_when_nothing_tries_pairs_then_the_roles_suffice() -> None:
    assert not_ready_reason(PAIR, "m", None) is None


def test_readiness_without_a_working_pair_reports_each() -> None:
    breakers = PairBreakers(BreakerLimits(failures=1))
    assert (
        not_ready_reason(PAIR, "m", breakers)
        == "model m: KV transfer works for no pair now: pair a -> b is untried"
    )
    breakers.record_failure((0xA, 0xB), "transfer: no route", 1.0)
    assert (
        not_ready_reason(PAIR, "m", breakers)
        == "model m: KV transfer works for no pair now: pair a -> b is quarantined (transfer: no"
        " route)"
    )
    breakers.record_success((0xA, 0xB), 2.0)
    assert not_ready_reason(PAIR, "m", breakers) is None


def test_readiness_without_fitting_prefill_names_the_field() -> None:
    why = not_ready_reason(model_view(prefill=(PREFILL,), decode=(ODD,)), "m", PairBreakers())
    assert why is not None
    assert "layout.block_tokens is 16 at prefill and 64 at decode" in why


def test_mismatches_report_only_the_unfit_one() -> None:
    assert list(mismatches(model_view(prefill=(PREFILL,), decode=(DECODE, ODD)))) == [
        "instance c (decode): layout.block_tokens is 64 at decode and 16 at prefill"
    ]


def test_readiness_of_many_pairs_lists_quarantined_first() -> None:
    breakers = PairBreakers(BreakerLimits(failures=2))
    view = ClusterView()
    for instance_id in range(16, 56):
        view.add(make_instance(instance_id, role=Role.PREFILL if instance_id % 2 else Role.DECODE))
    view.add(ODD)
    for _ in range(2):
        breakers.record_failure((39, 38), "transfer: x", time.monotonic())
    breakers.record_failure((17, 18), "transfer: y", time.monotonic())
    registry = ModelRegistry(
        view, MemoryDiscovery(InstanceRecords()), InprocPlane(), "dynamo", breakers
    )
    report = registry.readiness(limit=3)
    assert (report["num_pairs"], report["num_quarantined"]) == (400, 1)
    worst, *others = report["pairs"]
    assert (worst["prefill"], worst["decode"], worst["state"], worst["reason"]) == (
        "27",
        "26",
        "quarantined",
        "transfer: x",
    )
    assert len(others) == 2
    assert worst not in others
    assert len(registry.readiness(limit=1000)["pairs"]) == 400
    (failing,) = [
        row for row in registry.readiness(limit=1000)["pairs"] if row["state"] == "failing"
    ]
    assert failing["reason"] == "transfer: y"
    assert failing["age_s"] is not None
    assert len(report["mismatched"]) == 1
