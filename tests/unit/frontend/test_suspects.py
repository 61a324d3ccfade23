"""Which requests are charged with the death of a worker, given up and refused. Time is that of a test clock."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamo_trtllm.errors import QueryOfDeath
from dynamo_trtllm.frontend.generation import suspects
from dynamo_trtllm.frontend.generation.suspects import REFUSED_S, SETTLED_TOKENS, Call, Suspects, Suspicion
from dynamo_trtllm.messages import GenerateRequest, OutputFormat, Role, StructuredOutput, token_ids
from dynamo_trtllm.router.policy import WorkerSelection
from tests.instances import make_instance
from tests.unit.frontend.pipeline_helpers import request


def prompt(*ids: int, **sampling: Any) -> GenerateRequest:
    return msgspec.structs.replace(request(**sampling), token_ids=token_ids(ids))


class Fleet:
    """Suspects, a clock and workers by number."""

    def __init__(self) -> None:
        self.now = 0.0
        self.counted: list[str] = []
        self.suspects = Suspects(self.counted.append, lambda: self.now)

    def call(self, worker: int, suspicion: Suspicion | None = None) -> Call:
        call = Call(suspicion or Suspicion())
        self.suspects.begin(call, worker)
        return call

    def retry(self, call: Call, worker: int, *, is_prime: bool) -> None:
        """Run a suspect on another worker."""
        selection = WorkerSelection(None, make_instance(worker, role=Role.AGGREGATED))
        self.suspects.begin_trial(call, selection, is_prime=is_prime)
        self.suspects.begin(call, worker)

    def die(self, call: Call, num_tokens: int = 0, asked: GenerateRequest | None = None) -> QueryOfDeath | None:
        return self.suspects.record_death(call, asked or request(), num_tokens)

    def is_refused(self, asked: GenerateRequest) -> bool:
        try:
            self.suspects.check(asked)
        except QueryOfDeath:
            return True
        return False


FORMAT = StructuredOutput(alternatives=(OutputFormat(json_schema="{}"),))


def test_request_when_it_ended_two_workers_then_given_up_and_its_like_is_refused_for_a_while() -> None:
    fleet = Fleet()
    call = fleet.call(1)
    assert fleet.die(call, asked=prompt(1, 2)) is None
    fleet.suspects.begin(call, 2)
    error = fleet.die(call, asked=prompt(1, 2))
    assert error is not None
    assert "2 workers ended while they ran this request (1 and 2)" in error.message
    others = (prompt(1, 3), prompt(1, 2, guided=FORMAT), msgspec.structs.replace(prompt(1, 2), model="other"))
    assert [fleet.is_refused(other) for other in others] == [False] * 3
    assert fleet.is_refused(msgspec.structs.replace(prompt(1, 2, temperature=0.5), request_id="another"))
    fleet.now = REFUSED_S
    assert not fleet.is_refused(prompt(1, 2))
    assert fleet.counted == ["given_up", "refused"]


def test_requests_when_several_ran_on_both_dead_workers_then_their_like_is_refused_from_the_second_time_on() -> None:
    fleet = Fleet()

    def end_two_workers(first: int) -> None:
        deadly, innocent = fleet.call(first), fleet.call(first)
        fleet.die(deadly, 20, prompt(1))
        fleet.die(innocent, 30, prompt(2))
        fleet.suspects.begin(deadly, first + 1)
        fleet.suspects.begin(innocent, first + 1)
        assert fleet.die(deadly, 20, prompt(1)) is not None
        assert fleet.die(innocent, 30, prompt(2)) is not None

    end_two_workers(1)
    assert not fleet.is_refused(prompt(1))
    assert not fleet.is_refused(prompt(2))
    fleet.now = REFUSED_S - 1.0
    end_two_workers(3)
    assert fleet.is_refused(prompt(1))


def test_choices_when_they_are_given_up_together_then_that_counts_once() -> None:
    fleet = Fleet()
    shared = Suspicion(is_shared=True)
    calls = [fleet.call(1, shared), fleet.call(1, shared), fleet.call(1)]
    for call in calls:
        fleet.die(call, 20, prompt(1))
    for call in calls:
        fleet.suspects.begin(call, 2)
    for call, number in zip(calls, (1, 1, 2), strict=True):
        assert fleet.die(call, 20, prompt(number))
    assert fleet.counted == ["given_up"] * 2
    assert not fleet.is_refused(prompt(1))


def test_refusals_when_there_are_many_then_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "MOST_REFUSED", 2)
    fleet = Fleet()
    for number in range(3):
        call = fleet.call(10 * number)
        fleet.die(call, asked=prompt(number))
        fleet.suspects.begin(call, 10 * number + 1)
        assert fleet.die(call, asked=prompt(number)) is not None
    assert [fleet.is_refused(prompt(number)) for number in range(3)] == [False, True, True]


@pytest.mark.parametrize("is_first", [True, False])
def test_neighbor_when_a_prime_suspect_ends_its_second_worker_too_then_only_the_suspect_is_given_up(
    is_first: bool,
) -> None:
    fleet = Fleet()
    deadly, innocent = fleet.call(1), fleet.call(1)
    assert fleet.die(deadly) is None
    assert fleet.die(innocent, 100) is None
    fleet.retry(deadly, 2, is_prime=True)
    fleet.retry(innocent, 2, is_prime=False)
    if is_first:
        assert fleet.die(deadly) is not None
    assert fleet.die(innocent, 30) is None
    assert list(innocent.suspicion.deaths) == [1]
    if not is_first:
        assert fleet.die(deadly) is not None


@pytest.mark.parametrize(("before", "then"), [(20, 20), (20, 18)])
def test_suspect_when_it_acts_late_beside_a_prime_suspect_then_it_is_given_up_at_the_same_point(
    before: int, then: int
) -> None:
    fleet = Fleet()
    deadly, prime = fleet.call(1), fleet.call(1)
    fleet.die(deadly, before)
    fleet.die(prime)
    fleet.retry(deadly, 2, is_prime=False)
    fleet.retry(prime, 2, is_prime=True)
    assert fleet.die(deadly, then) is not None


def test_suspect_when_it_acts_late_then_it_is_given_up_all_the_same() -> None:
    fleet = Fleet()
    deadly = fleet.call(1)
    fleet.die(deadly, 100)
    fleet.retry(deadly, 2, is_prime=False)
    assert fleet.die(deadly, 100) is not None


def test_prime_suspect_when_it_has_settled_then_a_death_is_charged_to_its_neighbors_as_well() -> None:
    fleet = Fleet()
    settled = fleet.call(1)
    fleet.die(settled)
    fleet.retry(settled, 2, is_prime=True)
    fleet.suspects.end_trial(settled)
    neighbor = fleet.call(2)
    fleet.die(settled, SETTLED_TOKENS)
    fleet.die(neighbor)
    assert list(neighbor.suspicion.deaths) == [2]


def test_death_when_a_later_call_got_much_further_then_it_is_forgotten() -> None:
    fleet = Fleet()
    call = fleet.call(1)
    fleet.die(call, 10)
    fleet.suspects.begin(call, 2)
    assert fleet.die(call, 21 + SETTLED_TOKENS) is None
    assert list(call.suspicion.deaths) == [2]


def test_death_when_the_worker_works_again_then_it_was_only_cut_off() -> None:
    fleet = Fleet()
    call = fleet.call(1)
    fleet.die(call)
    fleet.suspects.succeeded(fleet.call(1))
    fleet.suspects.begin(call, 2)
    assert fleet.die(call) is None
    assert list(call.suspicion.deaths) == [2]


def test_death_when_an_answer_of_before_arrives_late_then_it_stays() -> None:
    fleet = Fleet()
    call, late = fleet.call(1), fleet.call(1)
    fleet.die(call)
    fleet.suspects.succeeded(late)
    fleet.suspects.begin(call, 2)
    assert fleet.die(call) is not None


def test_call_when_its_worker_had_died_before_then_it_is_not_charged() -> None:
    fleet = Fleet()
    fleet.die(fleet.call(1))
    late = fleet.call(1)
    fleet.die(late)
    assert not late.suspicion.deaths


def test_suspects_when_all_calls_have_ended_then_nothing_of_them_is_kept() -> None:
    fleet = Fleet()
    calls = [fleet.call(1) for _ in range(3)]
    for call in calls[:2]:
        fleet.die(call)
        fleet.retry(call, 2, is_prime=True)
    assert fleet.suspects.tried_on(Suspicion()) == {2}
    assert fleet.suspects.tried_on(calls[0].suspicion) == {2}  # the other one
    for call in calls:
        fleet.suspects.end(call)
        fleet.suspects.end_trial(call)
    assert fleet.suspects.tried_on(Suspicion()) == frozenset()
    assert not fleet.suspects._running
    assert not fleet.suspects._dying
