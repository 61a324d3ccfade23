"""What /health and readiness say of a model: roles, pairs, instances that fit no other."""

from __future__ import annotations

import msgspec

from dynamo_trtllm.frontend.fleet.model_registry import mismatches, not_ready_reason, pair_rows, rejected_rows
from dynamo_trtllm.messages import Role
from dynamo_trtllm.router.policy import BreakerLimits, PairBreakers
from dynamo_trtllm.router.view import ModelView
from tests.instances import LAYOUT, make_instance

PREFILL, DECODE = make_instance(0xA, role=Role.PREFILL), make_instance(0xB)
ODD = msgspec.structs.replace(make_instance(0xC), layout=msgspec.structs.replace(LAYOUT, block_tokens=64))
PAIR = ModelView(prefill=(PREFILL,), decode=(DECODE,))


def test_lacking_when_roles_are_missing_then_names_them() -> None:
    assert not_ready_reason(ModelView(), "m", None) == "model m has no prefill worker and no decode worker"
    assert not_ready_reason(ModelView(prefill=(PREFILL,)), "m", None) == "model m has no decode worker"


def test_lacking_when_nothing_tries_pairs_then_the_roles_suffice() -> None:
    assert not_ready_reason(PAIR, "m", None) is None


def test_lacking_when_no_pair_has_worked_then_says_of_each_what_is_known() -> None:
    breakers = PairBreakers(BreakerLimits(failures=1))
    assert not_ready_reason(PAIR, "m", breakers) == "model m: KV transfer works for no pair now: pair a -> b is untried"
    breakers.record_failure((0xA, 0xB), "transfer: no route", 1.0)
    assert not_ready_reason(PAIR, "m", breakers) == (
        "model m: KV transfer works for no pair now: pair a -> b is quarantined (transfer: no route)"
    )
    breakers.record_success((0xA, 0xB), 2.0)
    assert not_ready_reason(PAIR, "m", breakers) is None


def test_lacking_when_no_prefill_fits_a_decode_then_names_the_field() -> None:
    why = not_ready_reason(ModelView(prefill=(PREFILL,), decode=(ODD,)), "m", PairBreakers())
    assert why is not None
    assert "layout.block_tokens is 16 at prefill and 64 at decode" in why


def test_mismatches_when_one_of_two_fits_then_only_the_other_is_told() -> None:
    assert mismatches(ModelView(prefill=(PREFILL,), decode=(DECODE, ODD))) == [
        "instance c (decode): layout.block_tokens is 64 at decode and 16 at prefill"
    ]


def test_pair_rows_when_shown_then_ids_state_reason_and_age() -> None:
    breakers = PairBreakers()
    view = ModelView(prefill=(PREFILL,), decode=(DECODE,), aggregated=(make_instance(0xD, role=Role.AGGREGATED),))
    breakers.record_failure((0xA, 0xB), "transfer: x", 10.0)
    assert pair_rows(view, "m", breakers, 12.5) == [
        {"model": "m", "prefill": "a", "decode": "b", "state": "failing", "reason": "transfer: x", "age_s": 2.5},
        {"model": "m", "prefill": None, "decode": "d", "state": "untried", "reason": "", "age_s": None},
    ]


def test_rejected_rows_when_there_are_very_many_then_the_first_hundred() -> None:
    rows = rejected_rows({f"key-{number:05}": f"reason {number}" for number in reversed(range(10_000))})
    assert len(rows) == 100
    assert rows[0] == {"key": "key-00000", "reason": "reason 0"}
    assert rejected_rows({}) == []
