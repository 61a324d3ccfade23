"""Which requests are charged with the death of a worker, given up and rejected.

Time is that of a test clock.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamo_trtllm.frontend.requests.choice import Choice, share_suspicions
from dynamo_trtllm.frontend.routing import suspects
from dynamo_trtllm.frontend.routing.pairs import WorkerSelection
from dynamo_trtllm.frontend.routing.suspects import (
    MAX_UNSETTLED_TOKENS,
    REJECTED_S,
    SETTLED_TOKENS,
    RequestProgress,
    Suspects,
    Suspicion,
    TrackedCall,
)
from dynamo_trtllm.protocol.errors import QueryOfDeath
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    OutputFormat,
    Role,
    StructuredOutput,
    token_ids,
)
from tests.kit.generation_plans import harmony_model, text
from tests.kit.instances import make_instance
from tests.kit.routing import request


def prompt(*ids: int, **sampling: Any) -> GenerateRequest:
    return msgspec.structs.replace(request(**sampling), token_ids=token_ids(ids))


class Request:
    """A request of a client: what it asks for, its call, and how far it is."""

    def __init__(self, asked: GenerateRequest, suspicion: Suspicion | None = None) -> None:
        self.asked = asked
        self.num_tokens = 0  # of the call
        self.num_before = 0  # of the calls before
        self.call = TrackedCall(suspicion or Suspicion(), self.progress)

    def progress(self) -> RequestProgress:
        return RequestProgress(self.num_tokens, self.num_before + self.num_tokens)

    @property
    def deaths(self) -> list[int]:
        return [death.instance_id for death in self.call.suspicion.deaths]


class Fleet:
    """Suspects, a clock and workers by number."""

    def __init__(self) -> None:
        self.now = 0.0
        self.counted: list[str] = []
        self.suspects = Suspects(self.counted.append, lambda: self.now)

    def start(
        self,
        worker: int,
        asked: GenerateRequest | None = None,
        suspicion: Suspicion | None = None,
        kv_holder: int | None = None,
    ) -> Request:
        started = Request(asked or request(), suspicion)
        self.suspects.begin(started.call, worker, kv_holder)
        return started

    def retry(self, failed: Request, worker: int, *, is_prime: bool) -> None:
        """Run a suspect on another worker."""
        failed.num_before += failed.num_tokens
        failed.num_tokens = 0
        selection = WorkerSelection(None, make_instance(worker, role=Role.AGGREGATED))
        self.suspects.begin_trial(failed.call, selection, is_prime=is_prime)
        self.suspects.begin(failed.call, worker)

    def die(self, worker: int, num_tokens: dict[Request, int]) -> list[Request]:
        """End a worker when its calls have returned so many tokens.

        Return the requests that are given up.
        """
        for failed, count in num_tokens.items():
            failed.num_tokens = count
        return [
            failed
            for failed in num_tokens
            if isinstance(
                self.suspects.record_death(failed.call, worker, failed.asked), QueryOfDeath
            )
        ]

    def is_rejected(self, asked: GenerateRequest) -> bool:
        try:
            self.suspects.check(asked)
        except QueryOfDeath:
            return True
        return False


FORMAT = StructuredOutput(alternatives=(OutputFormat(json_schema="{}"),))


def test_query_of_death_then_neighbors_are_cleared() -> None:
    """The example in the docstring of the module."""
    fleet = Fleet()
    deadly = fleet.start(1, prompt(1))
    waiting = fleet.start(1, prompt(2))
    late = fleet.start(1, prompt(3))
    assert fleet.die(1, {deadly: 2, waiting: 2, late: 50}) == []
    fleet.retry(late, 2, is_prime=False)
    late.num_tokens = late.call.suspicion.tokens_to_settle()
    assert late.num_tokens == 58
    fleet.suspects.end_trial(late.call)
    fleet.retry(deadly, 2, is_prime=True)
    assert fleet.die(2, {deadly: 2, late: 60}) == [deadly]
    assert not waiting.call.suspicion.unexplained_deaths()
    assert late.deaths == []


def test_request_that_ended_two_workers_is_rejected_later() -> None:
    fleet = Fleet()
    deadly = fleet.start(1, prompt(1, 2))
    assert fleet.suspects.record_death(deadly.call, 1, deadly.asked) is None
    fleet.retry(deadly, 2, is_prime=True)
    error = fleet.suspects.record_death(deadly.call, 2, deadly.asked)
    assert error is not None
    assert "2 workers ended while they ran this request (1 and 2)" in error.message
    others = (
        prompt(1, 3),
        prompt(1, 2, guided=FORMAT),
        msgspec.structs.replace(prompt(1, 2), model="other"),
    )
    assert [fleet.is_rejected(other) for other in others] == [False] * 3
    assert fleet.is_rejected(
        msgspec.structs.replace(prompt(1, 2, temperature=0.5), request_id="another")
    )
    fleet.now = REJECTED_S
    assert not fleet.is_rejected(prompt(1, 2))
    assert fleet.counted == ["given_up", "rejected"]


def test_requests_on_both_dead_workers_are_rejected_later() -> None:
    fleet = Fleet()

    def end_two_workers(first: int) -> None:
        deadly = fleet.start(first, prompt(1))
        innocent = fleet.start(first, prompt(2))
        fleet.die(first, {deadly: 20, innocent: 30})
        fleet.retry(deadly, first + 1, is_prime=False)
        fleet.retry(innocent, first + 1, is_prime=False)
        assert fleet.die(first + 1, {deadly: 20, innocent: 30}) == [deadly, innocent]

    end_two_workers(1)
    assert not fleet.is_rejected(prompt(1))
    assert not fleet.is_rejected(prompt(2))
    fleet.now = REJECTED_S - 1.0
    end_two_workers(3)
    assert fleet.is_rejected(prompt(1))


def test_suspect_beside_new_requests_is_not_given_up() -> None:
    """One of the new ones may be the cause."""
    fleet = Fleet()
    suspect = fleet.start(1)
    fleet.die(1, {suspect: 30})
    fleet.retry(suspect, 2, is_prime=False)
    newcomer = fleet.start(2)
    assert fleet.die(2, {suspect: 10, newcomer: 0}) == []
    assert (suspect.deaths, newcomer.deaths) == ([1, 2], [2])


def test_only_suspect_on_a_dead_worker_is_given_up() -> None:
    fleet = Fleet()
    deadly = fleet.start(1, prompt(1))
    fleet.die(1, {deadly: 30})
    fleet.retry(deadly, 2, is_prime=False)
    settled = fleet.start(2)
    assert fleet.die(2, {deadly: 10, settled: 100}) == [deadly]
    assert settled.deaths == []
    assert fleet.is_rejected(prompt(1))


def test_suspect_beside_requests_just_begun_is_rejected_later() -> None:
    """They are charged as well, but it failed at the same point before."""
    fleet = Fleet()
    suspect = fleet.start(1, prompt(1))
    fleet.die(1, {suspect: 30})
    fleet.retry(suspect, 2, is_prime=False)
    newcomer = fleet.start(2, prompt(2))
    assert fleet.die(2, {suspect: 30, newcomer: 0}) == [suspect]
    assert newcomer.deaths == [2]
    assert fleet.is_rejected(prompt(1))


@pytest.mark.parametrize("is_prime", [True, False])
def test_new_request_beside_suspects_is_charged_with_each_death(is_prime: bool) -> None:
    fleet = Fleet()
    suspects_of_another = [fleet.start(1), fleet.start(1)]
    fleet.die(1, dict.fromkeys(suspects_of_another, 0))
    for worker, suspect in enumerate(suspects_of_another, start=2):
        fleet.retry(suspect, worker, is_prime=is_prime)
    deadly = fleet.start(2)
    fleet.die(2, {suspects_of_another[0]: 0, deadly: 0})
    assert deadly.deaths == [2]
    fleet.retry(deadly, 3, is_prime=is_prime)
    assert deadly in fleet.die(3, {suspects_of_another[1]: 0, deadly: 0})


def test_choices_given_up_together_count_once() -> None:
    fleet = Fleet()
    shared = Suspicion(is_shared=True)
    requests = [
        fleet.start(1, prompt(1), shared),
        fleet.start(1, prompt(1), shared),
        fleet.start(1, prompt(2)),
    ]
    fleet.die(1, dict.fromkeys(requests, 20))
    for failed in requests:
        fleet.retry(failed, 2, is_prime=False)
    assert fleet.die(2, dict.fromkeys(requests, 20)) == requests
    assert fleet.counted == ["given_up"] * 2
    assert not fleet.is_rejected(prompt(1))


def test_choices_with_equal_prompts_share_one_suspicion() -> None:
    plan = text(harmony_model(), prompt=["a", "b", "a"], n=2)
    choices = [Choice(choice_request) for choice_request in plan.choices]
    share_suspicions(choices, plan.candidates)
    shared = [choice.timeline.suspicion for choice in choices]
    assert [shared.index(suspicion) for suspicion in shared] == [0, 0, 2, 2, 0, 0]


def test_prompts_of_a_request_run_on_two_pairs_at_most() -> None:
    plan = text(harmony_model(), prompt=["a", "b", "c", "a", "d", "e"])
    choices = [Choice(choice_request) for choice_request in plan.choices]
    share_suspicions(choices, plan.candidates)
    shared = [choice.timeline.suspicion for choice in choices]
    assert [shared.index(suspicion) for suspicion in shared] == [0, 1, 0, 0, 1, 0]
    assert [shared[0].num_prompts, shared[1].num_prompts] == [3, 2]


def test_prompts_given_up_together_are_rejected_the_second_time() -> None:
    """Only one of them may have ended the workers."""
    fleet = Fleet()
    asked = [prompt(1), prompt(2)]
    is_rejected = []
    for worker in (1, 3):
        suspicion = Suspicion(is_shared=True)
        suspicion.num_prompts = 2
        requests = [fleet.start(worker, one, suspicion) for one in asked]
        fleet.die(worker, dict.fromkeys(requests, 0))
        for failed in requests:
            fleet.retry(failed, worker + 1, is_prime=True)
        assert fleet.die(worker + 1, dict.fromkeys(requests, 0)) == requests
        is_rejected.append([fleet.is_rejected(one) for one in asked])
    assert is_rejected == [[False, False], [True, True]]
    assert fleet.counted.count("given_up") == 2


def test_rejections_over_limit_drop_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "MAX_REJECTED", 2)
    fleet = Fleet()
    for number in range(3):
        deadly = fleet.start(10 * number, prompt(number))
        fleet.die(10 * number, {deadly: 0})
        fleet.retry(deadly, 10 * number + 1, is_prime=True)
        assert fleet.die(10 * number + 1, {deadly: 0}) == [deadly]
    assert [fleet.is_rejected(prompt(number)) for number in range(3)] == [False, True, True]


@pytest.mark.parametrize("num_tokens", [3, 30, 100])
def test_neighbor_of_a_prime_suspect_is_not_given_up(num_tokens: int) -> None:
    """Even if the neighbor is, by chance, at the point at which it failed before."""
    fleet = Fleet()
    deadly = fleet.start(1)
    neighbor = fleet.start(1)
    assert fleet.die(1, {deadly: 0, neighbor: 100}) == []
    fleet.retry(deadly, 2, is_prime=True)
    fleet.retry(neighbor, 2, is_prime=False)
    assert fleet.die(2, {neighbor: num_tokens, deadly: 0}) == [deadly]
    assert neighbor.deaths == [1]


@pytest.mark.parametrize(
    ("num_tokens", "then"),
    [
        pytest.param(100, 100, id="after as many tokens of a call"),
        pytest.param(100, 98, id="the last tokens were lost"),
        pytest.param(100, 1, id="at the same token of the answer"),
        pytest.param(99, 0, id="in the last step"),
    ],
)
def test_suspect_that_kills_late_is_given_up_alone(num_tokens: int, then: int) -> None:
    fleet = Fleet()
    deadly = fleet.start(1)
    neighbor = fleet.start(1)
    assert fleet.die(1, {neighbor: 50, deadly: num_tokens}) == []
    fleet.retry(neighbor, 2, is_prime=False)
    fleet.retry(deadly, 2, is_prime=False)
    bystander = fleet.start(2)
    ends = {neighbor: 30, deadly: then, bystander: SETTLED_TOKENS}
    assert fleet.die(2, ends) == [deadly]
    assert neighbor.deaths == [1]
    assert bystander.deaths == []


def test_settled_suspect_is_given_up_at_its_late_point() -> None:
    fleet = Fleet()
    deadly = fleet.start(1)
    fleet.die(1, {deadly: 1000})
    fleet.retry(deadly, 2, is_prime=False)
    deadly.num_tokens = MAX_UNSETTLED_TOKENS
    fleet.suspects.end_trial(deadly.call)
    newcomer = fleet.start(2)
    assert fleet.die(2, {deadly: 1000, newcomer: 0}) == [deadly]


def test_suspect_at_its_point_is_given_up_before_a_tried_one() -> None:
    fleet = Fleet()
    deadly = fleet.start(1)
    tried = fleet.start(1)
    fleet.die(1, {deadly: 20, tried: 0})
    fleet.retry(deadly, 2, is_prime=False)
    fleet.retry(tried, 2, is_prime=True)
    assert fleet.die(2, {deadly: 20, tried: 4}) == [deadly]
    assert tried.call.suspicion.unexplained_deaths() == set()


def test_suspects_at_other_points_are_tried_alone() -> None:
    fleet = Fleet()
    deadly = fleet.start(1)
    neighbor = fleet.start(1)
    fleet.die(1, {neighbor: 50, deadly: 100})
    fleet.retry(neighbor, 2, is_prime=False)
    fleet.retry(deadly, 2, is_prime=False)
    assert fleet.die(2, {neighbor: 30, deadly: 70}) == []
    fleet.retry(deadly, 3, is_prime=True)
    assert fleet.die(3, {deadly: 20}) == [deadly]


@pytest.mark.parametrize("on_worker", [1, 2])
def test_neighbor_is_cleared_when_the_cause_is_given_up(on_worker: int) -> None:
    """`on_worker`: which of the two that the query of death ended."""
    fleet = Fleet()
    deadly = fleet.start(1)
    neighbor = fleet.start(on_worker)
    fleet.die(1, {deadly: 0, neighbor: 0})
    fleet.retry(deadly, 2, is_prime=True)
    assert fleet.die(2, {deadly: 0, neighbor: 0}) == [deadly]
    assert neighbor.deaths == [on_worker]
    assert neighbor.call.suspicion.unexplained_deaths() == set()
    # Another query of death meets the neighbor at the point at which it failed before.
    fleet.suspects.begin(neighbor.call, 3)
    another = fleet.start(3)
    assert fleet.die(3, {neighbor: 0, another: 0}) == []
    fleet.retry(another, 4, is_prime=True)
    assert fleet.die(4, {another: 0}) == [another]
    assert neighbor.call.suspicion.unexplained_deaths() == set()


def test_all_choices_of_a_deadly_prompt_are_given_up_at_once() -> None:
    """Also those that are past the point at which the worker died."""
    fleet = Fleet()
    shared = Suspicion(is_shared=True)
    choices = [fleet.start(1, prompt(1), shared) for _ in range(2)]
    fleet.die(1, dict.fromkeys(choices, 0))
    fleet.retry(choices[0], 2, is_prime=True)
    fleet.retry(choices[1], 2, is_prime=False)
    assert fleet.die(2, {choices[0]: 0, choices[1]: 4}) == choices


def test_prime_suspect_settled_charges_its_neighbors() -> None:
    fleet = Fleet()
    settled = fleet.start(1)
    fleet.die(1, {settled: 0})
    fleet.retry(settled, 2, is_prime=True)
    fleet.suspects.end_trial(settled.call)
    neighbor = fleet.start(2)
    fleet.die(2, {settled: SETTLED_TOKENS, neighbor: 0})
    assert neighbor.deaths == [2]


def test_death_is_forgotten_after_a_later_call_passes() -> None:
    fleet = Fleet()
    cleared = fleet.start(1)
    fleet.die(1, {cleared: 10})
    fleet.retry(cleared, 2, is_prime=False)
    assert fleet.die(2, {cleared: 10 + SETTLED_TOKENS}) == []
    assert cleared.deaths == [2]


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, SETTLED_TOKENS), (20, 20 + SETTLED_TOKENS), (1000, MAX_UNSETTLED_TOKENS)],
)
def test_suspect_that_failed_settles_soon_after(num_tokens: int, expected: int) -> None:
    fleet = Fleet()
    suspect = fleet.start(1)
    assert suspect.call.suspicion.tokens_to_settle() == 0
    fleet.die(1, {suspect: num_tokens})
    assert suspect.call.suspicion.tokens_to_settle() == expected


def test_death_of_busy_worker_with_unsent_tokens_counts() -> None:
    fleet = Fleet()
    deadly = fleet.start(1)
    fleet.die(1, {deadly: 0})
    fleet.retry(deadly, 2, is_prime=True)
    assert fleet.die(2, {deadly: 4}) == [deadly]


def test_completed_similar_request_prevents_rejection() -> None:
    fleet = Fleet()
    for worker in (1, 3):
        innocent = fleet.start(worker, prompt(1))
        other = fleet.start(worker, prompt(2))
        fleet.die(worker, {innocent: 20, other: 20})
        fleet.retry(innocent, worker + 1, is_prime=False)
        fleet.retry(other, worker + 1, is_prime=False)
        assert fleet.die(worker + 1, {innocent: 20, other: 20}) == [innocent, other]
        fleet.suspects.completed(prompt(1))
    assert not fleet.is_rejected(prompt(1))
    assert fleet.is_rejected(prompt(2))


def test_death_of_worker_that_works_again_is_forgotten() -> None:
    fleet = Fleet()
    cut_off = fleet.start(1)
    fleet.die(1, {cut_off: 0})
    fleet.suspects.succeeded(fleet.start(1).call)
    fleet.retry(cut_off, 2, is_prime=True)
    assert fleet.die(2, {cut_off: 0}) == []
    assert cut_off.deaths == [2]


def test_death_is_not_forgotten_by_a_late_answer() -> None:
    fleet = Fleet()
    deadly = fleet.start(1)
    late = fleet.start(1)
    fleet.die(1, {deadly: 0})
    fleet.suspects.succeeded(late.call)
    fleet.retry(deadly, 2, is_prime=True)
    assert fleet.die(2, {deadly: 0}) == [deadly]


def test_call_to_an_already_dead_worker_is_not_charged() -> None:
    fleet = Fleet()
    fleet.die(1, {fleet.start(1): 0})
    late = fleet.start(1)
    fleet.die(1, {late: 0})
    assert late.deaths == []


def test_dead_prefill_worker_charges_requests_that_read_kv() -> None:
    fleet = Fleet()
    reading = fleet.start(2, kv_holder=1)
    finished = fleet.start(2, kv_holder=1)
    fleet.suspects.kv_arrived(finished.call)
    fleet.die(1, {reading: 0, finished: 5})
    assert (reading.deaths, finished.deaths) == ([1], [])
    fleet.suspects.begin(reading.call, 4, kv_holder=3)
    assert fleet.die(3, {reading: 0}) == [reading]


def test_suspects_are_forgotten_when_all_calls_ended() -> None:
    fleet = Fleet()
    requests = [fleet.start(1) for _ in range(3)]
    fleet.die(1, dict.fromkeys(requests[:2], 0))
    for failed in requests[:2]:
        fleet.retry(failed, 2, is_prime=True)
    assert fleet.suspects.workers_of_other_trials(Suspicion()) == {2}
    assert fleet.suspects.workers_of_other_trials(requests[0].call.suspicion) == {
        2
    }  # the other one
    for ended in requests:
        fleet.suspects.end(ended.call)
        fleet.suspects.end_trial(ended.call)
    assert fleet.suspects.workers_of_other_trials(Suspicion()) == frozenset()
    assert not fleet.suspects._running
    assert not fleet.suspects._deaths[1].charged
