"""Count which requests a frontend gives up, and how many workers end, if requests end workers.

    python -m benchmarks.suspects

This is a model of workers that generate a token per step for each of their calls. It does with
suspects (`dynamo_trtllm/frontend/routing/suspects.py`) what the router does, but lets them wait for
their turn without a time limit. In each run, four queries of death are sent among other requests of
40 tokens, of which 20 run at the same time. A seed gives the same run each time.

  at        when they end a worker: early (after 0 to 7 tokens of a call), late (8 to 29 tokens of a
            call), or at a token of their answer (8 to 34)
  sent      one by one, each after the one before was given up, or overlapping
  workers   number of workers
  ended     most workers that one query of death ended, and the mean
  innocent  other requests that were given up, per query of death
"""

from __future__ import annotations

import logging
import random
import statistics
import sys
from collections.abc import Sequence

from dynamo_trtllm.cluster.discovery.records import EndpointId, subject
from dynamo_trtllm.frontend.routing.pairs import WorkerSelection
from dynamo_trtllm.frontend.routing.suspects import (
    SETTLED_TOKENS,
    RequestProgress,
    Suspects,
    Suspicion,
    TrackedCall,
)
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    Instance,
    KvLayout,
    ModelDeploymentCard,
    Role,
    Sampling,
    token_ids,
)

NUM_TOKENS = 40  # of an answer
MAX_STEPS = 1000  # until a request must have ended
OVERLAP_STEPS = 3  # other requests between two deadly ones


class ModelRequest:
    """A request.

    Args:
        kills_at: the number of tokens of a call after which it ends its worker.
        kills_at_answer: the number of tokens of its answer from which on it ends its worker.
    """

    def __init__(self, kills_at: int | None = None, kills_at_answer: int | None = None) -> None:
        self._kills_at = kills_at
        self._kills_at_answer = kills_at_answer
        self.num_tokens = 0  # tokens of the call that runs now
        self.num_before = 0  # tokens of the calls before it
        self.tokens_to_settle = 0
        self.is_prime = False
        self.num_ended = 0  # workers that it has ended
        self.is_given_up = False
        self.call = TrackedCall(Suspicion(), self.progress)

    @property
    def kills_now(self) -> bool:
        """Return whether the next step ends its worker."""
        if self._kills_at_answer is not None:
            return self.num_before + self.num_tokens >= self._kills_at_answer
        return self.num_tokens == self._kills_at

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
            selection = WorkerSelection(None, _worker(worker))
            self.suspects.begin_trial(started.call, selection, is_prime=started.is_prime)
        self.suspects.begin(started.call, worker)
        self.calls[worker].append(started)

    def step(self) -> None:
        """Start the suspects whose turn it is, then generate a token for each call."""
        for waiting in self.random.sample(self.waiting, len(self.waiting)):
            free = set(self.calls)
            if waiting.call.suspicion.unexplained_deaths():
                free -= self.suspects.workers_of_other_trials(waiting.call.suspicion)
            if free:
                self.waiting.remove(waiting)
                self.start(waiting, self.random.choice(sorted(free)))
        for worker in list(self.calls):
            self.step_worker(worker)

    def step_worker(self, worker: int) -> None:
        for running in self.random.sample(self.calls[worker], len(self.calls[worker])):
            if running.kills_now:
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
            error = self.suspects.record_death(lost.call, worker, _REQUEST)
            self.end(lost)
            if error is not None:
                lost.is_given_up = True
                continue
            unexplained = lost.call.suspicion.unexplained_deaths()
            is_charged = any(death.instance_id == worker for death in unexplained)
            has_just_begun = is_charged and lost.num_tokens < SETTLED_TOKENS
            lost.is_prime = has_just_begun or len(unexplained) > 1
            if lost.is_prime:
                self.waiting.append(lost)
            else:
                self.start(lost, self.random.choice(list(self.calls)))

    def run(self, deadly: Sequence[ModelRequest], *, overlap: bool = False) -> None:
        """Send deadly requests among others.

        Args:
            deadly: the deadly requests.
            overlap: send each shortly after the one before. Otherwise, each is sent after the one
                before was given up.
        """
        for _ in range(NUM_TOKENS):
            self.send(ModelRequest())
            self.step()
        for sent in deadly:
            self.send(sent)
            self.send_others(OVERLAP_STEPS if overlap else MAX_STEPS, until_done=[sent])
        self.send_others(MAX_STEPS, until_done=deadly)
        for _ in range(MAX_STEPS):
            self.step()
        if not all(sent.is_done for sent in self.all):
            raise RuntimeError("a request never ended")

    def send_others(self, count: int, *, until_done: Sequence[ModelRequest]) -> None:
        """Send this many other requests, one in two steps, or fewer if these are done before."""
        for _ in range(count):
            if all(sent.is_done for sent in until_done):
                return
            self.send(ModelRequest())
            self.step()
            self.step()


_REQUEST = GenerateRequest(
    request_id="r",
    model="m",
    token_ids=token_ids([1]),
    sampling=Sampling(max_tokens=NUM_TOKENS),
    deadline=0.0,
)


def _worker(number: int) -> Instance:
    """Return an aggregated worker."""
    endpoint = EndpointId("bench", "worker", "generate")
    return Instance(
        id=number,
        **endpoint._asdict(),
        subject=subject(endpoint, number),
        role=Role.AGGREGATED,
        engine="mock",
        card=ModelDeploymentCard(
            name="m", context_length=64, vocab_size=8, eos_token_ids=(), renderer="harmony"
        ),
        layout=KvLayout(dtype="float32", block_tokens=16, num_layers=1, num_kv_heads=1, head_dim=8),
    )


NUM_SEEDS = 30
NUM_DEADLY = 4


def _deadly(at: str, choose: random.Random) -> ModelRequest:
    """Return a query of death."""
    match at:
        case "early":
            return ModelRequest(choose.randrange(SETTLED_TOKENS))
        case "late":
            return ModelRequest(choose.randrange(SETTLED_TOKENS, 30))
        case _:
            return ModelRequest(kills_at_answer=choose.randrange(SETTLED_TOKENS, 35))


def measure(at: str, num_workers: int, *, overlap: bool) -> str:
    """Run all seeds. Return the row."""
    ended: list[int] = []
    innocent = 0
    for seed in range(NUM_SEEDS):
        model = Model(seed, num_workers)
        deadly = [_deadly(at, model.random) for _ in range(NUM_DEADLY)]
        model.run(deadly, overlap=overlap)
        ended += [sent.num_ended for sent in deadly]
        for sent in model.all:
            if sent.is_given_up and sent not in deadly:
                innocent += 1
    order = "overlapping" if overlap else "one by one"
    return (
        f"at {at:6}  sent {order:11}  workers {num_workers}  ended {max(ended)}"
        f" (mean {statistics.mean(ended):.1f})  innocent {innocent / len(ended):.1f}"
    )


def main() -> None:
    logging.disable(logging.CRITICAL)  # each request that is given up is logged
    for overlap in (False, True):
        for at in ("early", "late", "answer"):
            for num_workers in (1, 2, 6):
                sys.stdout.write(measure(at, num_workers, overlap=overlap) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
