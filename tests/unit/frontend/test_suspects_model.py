"""Many requests, workers and queries of death at random: whom a frontend gives up.

A model of workers that generate a token per step for each of their calls. It does with suspects
what the router does. A seed gives the same run each time.
"""

from __future__ import annotations

import random

import pytest

from dynamo_trtllm.frontend.routing.pairs import WorkerSelection
from dynamo_trtllm.frontend.routing.suspects import (
    SETTLED_TOKENS,
    RequestProgress,
    Suspects,
    Suspicion,
    TrackedCall,
)
from dynamo_trtllm.protocol.messages import Role
from tests.kit.instances import make_instance
from tests.kit.routing import request

NUM_TOKENS = 40  # of an answer
MOST_STEPS = 300  # until a request has ended


class ModelRequest:
    """A request. `kills_at`: the number of tokens of a call after which it ends its worker."""

    def __init__(self, kills_at: int | None = None) -> None:
        self.kills_at = kills_at
        self.num_tokens = 0  # of the call
        self.num_before = 0  # of the calls before
        self.tokens_to_settle = 0
        self.is_prime = False
        self.num_ended = 0  # workers
        self.is_given_up = False
        self.call = TrackedCall(Suspicion(), self.progress)

    @property
    def is_done(self) -> bool:
        return self.is_given_up or self.num_before + self.num_tokens >= NUM_TOKENS

    def progress(self) -> RequestProgress:
        return RequestProgress(self.num_tokens, self.num_before + self.num_tokens)


class Model:
    """A frontend and its workers. A worker that dies is replaced at once by one with a new id."""

    def __init__(self, seed: int, num_workers: int) -> None:
        self.random = random.Random(seed)
        self.suspects = Suspects()
        self.calls: dict[int, list[ModelRequest]] = {number: [] for number in range(num_workers)}
        self.waiting: list[ModelRequest] = []
        self.all: list[ModelRequest] = []

    def send(self, sent: ModelRequest) -> None:
        self.all.append(sent)
        self.start(sent, self.random.choice(list(self.calls)))

    def start(self, started: ModelRequest, worker: int) -> None:
        suspicion = started.call.suspicion
        started.num_before += started.num_tokens
        started.num_tokens = 0
        started.tokens_to_settle = suspicion.tokens_to_settle()
        if started.tokens_to_settle:
            selection = WorkerSelection(None, make_instance(worker, role=Role.AGGREGATED))
            self.suspects.begin_trial(started.call, selection, is_prime=started.is_prime)
        self.suspects.begin(started.call, worker)
        self.calls[worker].append(started)

    def step(self) -> None:
        """Start the suspects whose turn it is, then generate a token for each call."""
        for waiting in self.random.sample(self.waiting, len(self.waiting)):
            free = set(self.calls)
            if waiting.call.suspicion.unexplained():
                free -= self.suspects.workers_of_other_trials(waiting.call.suspicion)
            if free:
                self.waiting.remove(waiting)
                self.start(waiting, self.random.choice(sorted(free)))
        for worker in list(self.calls):
            self.step_worker(worker)

    def step_worker(self, worker: int) -> None:
        for running in self.random.sample(self.calls[worker], len(self.calls[worker])):
            if running.num_tokens == running.kills_at:
                running.num_ended += 1
                self.die(worker)
                return
        for running in list(self.calls[worker]):
            running.num_tokens += 1
            if running.num_tokens == running.tokens_to_settle:
                self.suspects.end_trial(running.call)
            if running.is_done:
                self.calls[worker].remove(running)
                self.end(running)

    def end(self, ended: ModelRequest) -> None:
        self.suspects.end(ended.call)
        self.suspects.end_trial(ended.call)

    def die(self, worker: int) -> None:
        failed = self.calls.pop(worker)
        self.calls[max([worker, *self.calls]) + 1000] = []
        for lost in self.random.sample(failed, len(failed)):
            error = self.suspects.record_death(lost.call, worker, request())
            self.end(lost)
            if error is not None:
                lost.is_given_up = True
                continue
            unexplained = lost.call.suspicion.unexplained()
            is_charged = any(death.instance_id == worker for death in unexplained)
            has_just_begun = is_charged and lost.num_tokens < SETTLED_TOKENS
            lost.is_prime = has_just_begun or len(unexplained) > 1
            if lost.is_prime:
                self.waiting.append(lost)
            else:
                self.start(lost, self.random.choice(list(self.calls)))

    def run(self, deadly: list[ModelRequest]) -> None:
        """Send deadly requests among others, each after the one before was given up."""
        for _ in range(NUM_TOKENS):
            self.send(ModelRequest())
            self.step()
        for sent in deadly:
            self.send(sent)
            for _ in range(MOST_STEPS):
                if sent.is_done:
                    break
                self.send(ModelRequest())
                self.step()
                self.step()
        for _ in range(MOST_STEPS):
            self.step()
        assert all(sent.is_done for sent in self.all), "a request never ended"


@pytest.mark.parametrize("num_workers", [1, 2, 6])
@pytest.mark.parametrize("seed", range(2))
def test_early_queries_of_death_give_up_no_other_request(num_workers: int, seed: int) -> None:
    """The condition: each is sent after the one before was given up, and ends workers early."""
    model = Model(seed, num_workers)
    deadly = [ModelRequest(model.random.randrange(SETTLED_TOKENS)) for _ in range(4)]
    model.run(deadly)
    assert {sent for sent in model.all if sent.is_given_up} == set(deadly)
    assert [sent.num_ended for sent in deadly] == [2] * 4


@pytest.mark.parametrize("num_workers", [1, 2, 6])
@pytest.mark.parametrize("seed", range(2))
def test_queries_of_death_at_any_point_end_two_workers(num_workers: int, seed: int) -> None:
    """The condition: each is sent after the one before was given up, and ends workers at the same
    token of its call.
    """
    model = Model(seed, num_workers)
    deadly = [ModelRequest(model.random.randrange(NUM_TOKENS // 2)) for _ in range(4)]
    model.run(deadly)
    assert [sent.num_ended for sent in deadly] == [2] * 4
