"""What is known of pairs: breakers, and which pair a probe tries when."""

from __future__ import annotations

from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.pair_breakers import (
    MAX_STATUSES,
    BreakerLimits,
    FleetHealth,
    PairBreakers,
    PairState,
)
from dynamo_trtllm.frontend.routing.pairs import format_pair
from dynamo_trtllm.frontend.routing.probe_schedule import pairs_of
from dynamo_trtllm.protocol.messages import Role
from tests.kit.instances import CARD, elastic_instance, make_instance

PAIR = (1, 2)
LIMITS = BreakerLimits(failures=2, open_s=10.0, max_open_s=35.0)


def test_failures_in_a_row_open_the_breaker_ever_longer() -> None:
    breakers = PairBreakers(LIMITS)
    assert not breakers.record_failure(PAIR, "x", 0.0)
    assert breakers.status(PAIR).state is PairState.FAILING
    assert not breakers.is_open(PAIR)
    assert breakers.record_failure(PAIR, "y", 1.0)
    assert breakers.is_open(PAIR)
    assert (breakers.status(PAIR).reason, breakers.status(PAIR).open_until) == ("y", 11.0)
    for now, until in ((11.0, 31.0), (31.0, 66.0), (66.0, 101.0)):
        assert not breakers.record_failure(PAIR, "z", now)
        assert breakers.status(PAIR).open_until == until


def test_passed_probe_ends_quarantine_and_forgets_failures() -> None:
    breakers = PairBreakers(LIMITS)
    for now in (0.0, 1.0, 11.0):
        breakers.record_failure(PAIR, "x", now)
    assert breakers.record_success(PAIR, 40.0)
    assert not breakers.is_open(PAIR)
    assert not breakers.any_open
    assert not breakers.record_success(PAIR, 41.0)
    breakers.record_failure(PAIR, "x", 50.0)
    assert breakers.status(PAIR).state is PairState.FAILING
    assert breakers.record_failure(PAIR, "x", 51.0)
    assert breakers.status(PAIR).open_until == 61.0


def test_due_times_depend_on_the_state() -> None:
    breakers = PairBreakers(BreakerLimits(failures=1, open_s=10.0))
    assert breakers.due_at(PAIR, 30.0) <= 0.0
    breakers.record_success(PAIR, 100.0, is_probe=True)
    assert breakers.due_at(PAIR, 30.0) > 129.0
    assert breakers.due_at(PAIR, 30.0) <= 130.0
    breakers.record_failure(PAIR, "x", 200.0)
    assert breakers.due_at(PAIR, 30.0) > 209.0
    assert breakers.due_at(PAIR, 30.0) == 210.0
    assert breakers.due_at(PAIR, 30.0) <= 210.0


def test_record_success_stores_a_limited_number_of_pairs() -> None:
    breakers = PairBreakers(LIMITS)
    for number in range(MAX_STATUSES):
        assert breakers.record_success((number, PAIR[1]), 0.0)
    other = (MAX_STATUSES, PAIR[1])
    assert not breakers.record_success(other, 0.0)
    assert (breakers.status(other).state, breakers.is_open(other)) == (PairState.UNTRIED, False)
    assert breakers.record_success(other, 0.0, is_probe=True)
    for now in (1.0, 2.0):
        breakers.record_failure((-1, PAIR[1]), "x", now)
    assert breakers.is_open((-1, PAIR[1]))


def test_keep_only_forgets_pairs_of_a_gone_instance() -> None:
    breakers = PairBreakers(BreakerLimits(failures=1))
    breakers.record_failure(PAIR, "x", 0.0)
    breakers.record_failure((None, 3), "x", 0.0)
    breakers.keep_only({1, 3})
    assert not breakers.is_open(PAIR)
    assert breakers.is_open((None, 3))


def test_formatted_when_printed_then_ids_are_those_of_subjects() -> None:
    assert (format_pair((0xA, 0xB)), format_pair((None, 0xB))) == ("pair a -> b", "instance b")


def test_postpone_of_busy_quarantined_pair_tries_later() -> None:
    breakers = PairBreakers(BreakerLimits(failures=1, open_s=10.0))
    breakers.record_failure(PAIR, "x", 0.0)
    breakers.defer(PAIR, 10.0)
    assert breakers.is_open(PAIR)
    assert breakers.due_at(PAIR, 30.0) > 19.0
    assert breakers.due_at(PAIR, 30.0) <= 20.0


def test_failed_for_days_stays_quarantined() -> None:
    breakers = PairBreakers(LIMITS)
    for now in range(0, 200_000, 100):
        breakers.record_failure(PAIR, "x", float(now))
    assert breakers.status(PAIR).open_until == 199_900.0 + 35.0


def test_failed_calls_at_once_open_the_breaker_once() -> None:
    breakers = PairBreakers(LIMITS)
    assert [breakers.record_failure(PAIR, "x", 0.0) for _ in range(2000)].count(True) == 1
    assert (breakers.status(PAIR).num_openings, breakers.status(PAIR).open_until) == (1, 10.0)


def test_reopen_failure_closes_the_pair_for_longer() -> None:
    breakers = PairBreakers(BreakerLimits(failures=1, open_s=10.0))
    breakers.record_failure(PAIR, "x", 0.0)
    breakers.half_open(9.0)
    assert breakers.is_open(PAIR)
    breakers.half_open(10.0)
    assert not breakers.is_open(PAIR)
    breakers.record_failure(PAIR, "x", 11.0)
    assert (breakers.is_open(PAIR), breakers.status(PAIR).open_until) == (True, 31.0)


def test_half_open_pair_opens_again_after_an_unreachable_call() -> None:
    """A call that was not accepted says nothing about KV transfers, and the failure after it does."""
    breakers = PairBreakers(BreakerLimits(failures=1, open_s=10.0))
    breakers.record_failure(PAIR, "x", 0.0)
    breakers.half_open(10.0)
    breakers.record_unreachable(PAIR, "y", 11.0)
    assert not breakers.is_open(PAIR)
    breakers.record_failure(PAIR, "x", 12.0)
    assert (breakers.is_open(PAIR), breakers.status(PAIR).open_until) == (True, 32.0)


def test_withhold_new_pair_until_a_probe() -> None:
    breakers = PairBreakers(LIMITS)
    breakers.record_success((1, 3), 0.0, is_probe=True)
    breakers.withhold([PAIR, (1, 3)])
    assert (breakers.is_open(PAIR), breakers.is_open((1, 3)), breakers.any_open) == (
        True,
        False,
        True,
    )
    assert not breakers.record_success(PAIR, 1.0)  # by a request
    assert breakers.is_open(PAIR)
    assert breakers.record_success(PAIR, 2.0, is_probe=True)
    assert not breakers.any_open
    breakers.keep_only({1, 3})
    breakers.withhold([PAIR])
    assert breakers.is_open(PAIR)
    breakers.keep_only({1, 3})
    assert not breakers.any_open


def test_postpone_of_busy_new_pair_lets_requests_decide() -> None:
    breakers = PairBreakers(LIMITS)
    breakers.withhold([PAIR])
    breakers.defer(PAIR, 0.0)
    assert not breakers.is_open(PAIR)
    assert breakers.record_success(PAIR, 0.5)
    breakers.record_success(PAIR, 1.4)
    assert breakers.due_at(PAIR, 30.0) > 1.4
    assert breakers.due_at(PAIR, 30.0) <= 1.5
    breakers.defer(PAIR, 1.5)
    assert breakers.due_at(PAIR, 30.0) > 2.4
    assert breakers.due_at(PAIR, 30.0) <= 2.5
    breakers.record_success(PAIR, 2.5, is_probe=True)
    assert breakers.due_at(PAIR, 30.0) > 32.4


def test_failed_with_wrong_answers_needs_a_probe_to_close() -> None:
    breakers = PairBreakers(LIMITS)
    breakers.record_success(PAIR, 0.0, is_probe=True)
    assert breakers.record_failure(PAIR, "wrong", 1.0, is_wrong=True)
    breakers.record_failure(PAIR, "late", 12.0)
    assert not breakers.record_success(PAIR, 13.0)
    assert breakers.is_open(PAIR)
    assert breakers.record_success(PAIR, 14.0, is_probe=True)
    assert (breakers.is_open(PAIR), breakers.status(PAIR).reason) == (False, "")
    assert not breakers.record_success(PAIR, 15.0)


def test_model_lacks_pairs_if_all_are_quarantined() -> None:
    view = ClusterView()
    for number in (1, 2):
        view.add(elastic_instance(number))
    view.add(make_instance(3, role=Role.AGGREGATED))
    breakers = PairBreakers(BreakerLimits(failures=1))
    health = FleetHealth(view, breakers)
    found = [health.lacks_pairs(CARD.name)]
    for pair in ((1, 2), (2, 1)):
        breakers.record_failure(pair, "x", 0.0)
        found.append(health.lacks_pairs(CARD.name))
    assert found == [False, False, True]
    assert not health.lacks_pairs("another model")
    # A new worker has no probe yet, so its pairs are no help.
    view.add(elastic_instance(4))
    assert not health.lacks_pairs(CARD.name)
    breakers.withhold(pairs_of(view.model(CARD.name)))
    assert health.lacks_pairs(CARD.name)
    breakers.record_success((1, 2), 40.0, is_probe=True)
    assert not health.lacks_pairs(CARD.name)
