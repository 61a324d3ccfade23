"""Steps from statistics: a simulated executor writes rows as TensorRT-LLM does, and a cost model
learns from them.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from statistics import median
from typing import Any

import pytest

from dynamo_trtllm.engines.trtllm.reports.steps import StepReader
from dynamo_trtllm.protocol.cost_model import CostModel, StepSample
from dynamo_trtllm.worker.cost_fit import CostFit
from tests.kit.cases import each_case

_START = datetime(2026, 11, 23, 23, 59, 58)  # as the executor's
_MAX_TOKENS = 2048  # of one step


def gpu_s(step: StepSample) -> float:
    """Return how long the simulated GPU computes a step."""
    decodes = 0.006 + 5e-5 * step.decode_requests + 2e-8 * step.context_tokens
    return decodes + 2e-5 * step.prefill_tokens + 1e-9 * step.attention_pairs


@dataclass
class Request:
    arrives: float
    prompt: int
    output: int
    computed: int = 0  # prompt tokens
    generated: int = 0


@dataclass
class Batch:
    row: dict[str, Any]
    step: StepSample
    decodes: list[Request]
    prompts: list[tuple[Request, bool]]  # with whether it is computed to its end
    begun: float = 0.0
    ended: float = 0.0


@dataclass
class Executor:
    """The loops `_executor_loop` and `_executor_loop_overlap` of
    tensorrt_llm/_torch/pyexecutor/py_executor.py.

    The order of what they do, what they count and when they look at the clock are those of a copy
    of about 1.2 and of one of main (1.3 candidates). They differ in `iter`, which is that of the
    loop that reads the results or begins the batch, and in the fields of a row.
    """

    requests: list[Request]
    overlaps: bool = True
    is_new: bool = False  # as in main
    seed: int = 1
    now: float = 0.0
    gpu_ended: float = 0.0
    number: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    true: list[StepSample] = field(default_factory=list)  # of each row
    active: list[Request] = field(default_factory=list)
    previous: Batch | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.waiting = deque(sorted(self.requests, key=lambda request: request.arrives))

    def run(self) -> list[dict[str, Any]]:
        """Return the rows."""
        while self.waiting or self.active:
            self._iterate()
        return self.rows

    def _iterate(self) -> None:
        begun = self.now
        # `_fetch_new_requests` blocks, also while the results of the last batch are there
        if not self.active:
            self.now = max(self.now, self.waiting[0].arrives)
        self.now += self.random.uniform(0.0002, 0.0008)  # requests are sent to the other ranks
        new = []
        while self.waiting and self.waiting[0].arrives <= self.now:
            new.append(self.waiting.popleft())
        self.active += new
        batch = self._schedule(len(new))  # `_get_init_iter_stats` looks at the clock here
        launched = self.now
        batch.begun = begun
        self.now += 0.012 if batch.prompts else 0.001
        started = max(launched, self.gpu_ended)
        batch.ended = self.gpu_ended = max(self.now, started + batch.step.seconds)
        batch.step = batch.step._replace(seconds=batch.ended - started)
        if not self.overlaps:
            self._read(batch)
            # the next one can't begin before
            batch.step = batch.step._replace(seconds=self.now - launched)
        elif self.previous is not None:
            self._read(self.previous)
        self.true.append(batch.step)
        self.previous = batch
        self.now += 0.0004
        self.number += 1

    def _schedule(self, num_new: int) -> Batch:
        decodes = [request for request in self.active if request.computed == request.prompt]
        left = _MAX_TOKENS - len(decodes)
        prompts = list[tuple[Request, bool]]()
        pairs = 0.0
        cached = 0
        for request in self.active:
            if request.computed < request.prompt and left:
                chunk = min(left, request.prompt - request.computed)
                pairs += chunk * (request.computed + chunk / 2)
                cached = cached + request.computed
                left = left - chunk
                request.computed += chunk
                prompts.append((request, request.computed == request.prompt))
        context = sum(request.prompt + request.generated for request in decodes)
        step = StepSample(0.0, len(decodes), context, _MAX_TOKENS - len(decodes) - left, pairs)
        step = step._replace(seconds=gpu_s(step) * self.random.uniform(0.97, 1.03))
        counts = {
            "numScheduledRequests": len(decodes) + len(prompts),
            "numContextRequests": len(prompts),
            "numGenRequests": len(decodes),
            "numPausedRequests": 0,
            "numCtxTokens": step.prefill_tokens,
            "microBatchId": 0,
            "avgNumDecodedTokensPerIter": 0.0,
        }
        if self.is_new:
            counts |= {"numCtxKvTokens": cached, "numGenKvTokens": context}
        row = {
            "timestamp": (_START + timedelta(seconds=self.now)).strftime("%m-%d-%Y %H:%M:%S.%f"),
            "iter": self.number,
            "numNewActiveRequests": num_new,
            "numActiveRequests": len(self.active),
            "inflightBatchingStats": (
                counts
                | ({"numCtxKvTokens": cached, "numGenKvTokens": context} if self.is_new else {})
            ),
        }
        return Batch(row, step, decodes, prompts)

    def _read(self, batch: Batch) -> None:
        self.now = max(self.now, batch.ended) + 0.0002
        for ready in [
            *batch.decodes,
            *(request for request, is_whole in batch.prompts if is_whole),
        ]:
            ready.generated += 1
        self.active = [request for request in self.active if request.generated < request.output]
        row = batch.row | {"iterLatencyMS": (self.now - batch.begun) * 1000}
        if self.is_new:
            row["gpuForwardTimeMS"] = batch.step.seconds * 900  # without sampling
        else:
            row["iter"] = self.number
        self.rows.append(row)


def load(seed: int = 7) -> list[Request]:
    """Return requests of a quiet time, in which most of them are alone, and of busy ones."""
    draw = random.Random(seed)
    now = 0.5
    requests = list[Request]()
    for gap_s, count in ((0.6, 25), (0.05, 60), (0.012, 120), (0.5, 10)):
        for _ in range(count):
            now += draw.expovariate(1 / gap_s)
            requests.append(
                Request(now, draw.choice((60, 400, 1500, 5000)), draw.choice((3, 30, 90)))
            )
        now += 3.0
    return requests


def read(executor: Executor, *, rows_per_poll: int = 60) -> list[StepSample]:
    """Return the steps that are read from an executor's rows.

    Its mean context is known as of each poll.
    """
    rows = executor.run()
    steps = deque[StepSample]()
    seen = list[StepSample]()
    position = 0

    def running() -> tuple[float, int]:
        decodes = [
            step
            for step in executor.true[position : position + rows_per_poll]
            if step.decode_requests
        ]
        context = decodes[-1].context_tokens / decodes[-1].decode_requests if decodes else 0.0
        return context, max(request.prompt for request in executor.requests)

    reader = StepReader(steps, running, full_step=lambda: _MAX_TOKENS)
    for position in range(0, len(rows), rows_per_poll):
        reader.read(rows[position : position + rows_per_poll])
        seen += steps
        steps.clear()
    return seen


def fitted(steps: list[StepSample]) -> CostModel:
    fit = CostFit()
    for begin in range(0, len(steps), 60):
        fit.take(steps[begin : begin + 60])
    return fit.model


def errors(model: CostModel, executor: Executor) -> tuple[float, float]:
    """Return the median relative errors for decode steps and for steps with prompt tokens, which it
    has not seen.
    """
    found: tuple[list[float], list[float]] = [], []
    for step in executor.true:
        fit = model.prefill if step.prefill_tokens else model.decode
        assert fit is not None
        found[step.prefill_tokens > 0].append(abs(fit.predict(step.features) / step.seconds - 1))
    return median(found[0]), median(found[1])


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
def test_model_learned_from_rows_predicts_within_a_tenth(overlaps: bool, is_new: bool) -> None:
    executor = Executor(load(), overlaps, is_new)
    other = Executor(load(seed=11), overlaps, is_new, seed=2)
    steps = read(executor)
    assert len(steps) > 0.8 * len(executor.rows)
    other.run()
    assert max(errors(fitted(steps), other)) < 0.1


def test_rows_of_overlapping_schedules_give_single_steps() -> None:
    executor = Executor(load())
    steps = read(executor)
    rows = executor.rows
    true = executor.true
    latencies = [
        row["iterLatencyMS"] / 1000 / step.seconds for row, step in zip(rows, true, strict=False)
    ]
    assert median(latencies) > 1.8
    # the results were read after an idle time
    assert max(row["iterLatencyMS"] for row in rows) > 2000
    assert max(step.seconds for step in steps) <= 1.1 * max(step.seconds for step in true)


@pytest.mark.parametrize("overlaps", [False, True])
def test_prompts_at_idle_executor_use_only_newer_rows(overlaps: bool) -> None:
    def prompts(*, is_new: bool) -> list[StepSample]:
        executor = Executor([Request(number, 1500, 1) for number in range(1, 20)], overlaps, is_new)
        return [step for step in read(executor, rows_per_poll=4) if step.prefill_tokens]

    assert not prompts(is_new=False)
    steps = prompts(is_new=True)
    assert len(steps) >= 12
    assert median(step.seconds for step in steps) == pytest.approx(0.9 * gpu_s(steps[0]), rel=0.05)


@pytest.mark.parametrize(
    ("prompt", "before"),
    [(_MAX_TOKENS, [0]), (3 * _MAX_TOKENS, [0, _MAX_TOKENS, 2 * _MAX_TOKENS])],
)
def test_chunk_places_come_from_earlier_rows(prompt: int, before: list[int]) -> None:
    executor = Executor([Request(0.5, prompt, 1) for _ in range(12)], overlaps=False)
    steps = read(executor, rows_per_poll=3)
    assert {step.attention_pairs for step in steps} == {
        _MAX_TOKENS * (step + _MAX_TOKENS / 2) for step in before
    }


DAMAGES: dict[str, Any] = {
    "no latency": lambda row: row.pop("iterLatencyMS"),
    "no counts": lambda row: row.pop("inflightBatchingStats"),
    "counts that are null": lambda row: row.update(inflightBatchingStats=None),
    "a latency that is text": lambda row: row.update(iterLatencyMS="soon"),
    "no timestamp, as in old releases": lambda row: row.update(timestamp=""),
    "no number of active requests": lambda row: row.pop("numActiveRequests"),
    "a negative count": lambda row: row["inflightBatchingStats"].update(numGenRequests=-1),
    "empty": lambda row: row.clear(),
}


@each_case("overlaps", [False, True])
@each_case("damage", [None, *DAMAGES])
def test_damaged_row_drops_only_its_neighbors(damage: str | None, overlaps: bool) -> None:
    rows = Executor([Request(0.1, 60, 60)], overlaps).run()

    def samples(rows: list[dict[str, Any]]) -> list[StepSample]:
        steps = deque[StepSample]()
        reader = StepReader(steps, lambda: (80.0, 60))
        reader.read(rows[:10])
        reader.read(rows[10:])
        return list(steps)

    whole = samples([dict(row) for row in rows])
    assert len(whole) >= 45
    if damage is None:
        del rows[30]
    else:
        DAMAGES[damage](rows[30])
    left = samples(rows)
    assert set(left) < set(whole)
    assert len(left) >= len(whole) - 6


def test_rows_ignore_a_changed_clock() -> None:
    rows = Executor([Request(0.1, 60, 60)]).run()
    for shift_h in (-1, 1):
        changed = [dict(row) for row in rows]
        for row in changed[30:]:
            at = datetime.strptime(row["timestamp"], "%m-%d-%Y %H:%M:%S.%f") + timedelta(
                hours=shift_h
            )
            row["timestamp"] = at.strftime("%m-%d-%Y %H:%M:%S.%f")
        steps = deque[StepSample]()
        reader = StepReader(steps, lambda: (80.0, 60))
        for row in changed:
            reader.read([row])
        assert len(steps) >= 45
        assert max(step.seconds for step in steps) < 0.02


@pytest.mark.parametrize("overlaps", [False, True])
def test_rows_after_a_clock_step_are_unchanged(overlaps: bool) -> None:
    def samples(rows: list[dict[str, Any]]) -> list[tuple[float, ...]]:
        steps = deque[StepSample]()
        reader = StepReader(steps, lambda: (80.0, 60))
        for row in rows:
            reader.read([row])
        return [(round(step.seconds, 6), *step[1:]) for step in steps]

    rows = Executor(load(), overlaps).run()[:400]
    whole = samples(rows)
    for row in rows[200:]:
        at = datetime.strptime(row["timestamp"], "%m-%d-%Y %H:%M:%S.%f") + timedelta(seconds=5)
        row["timestamp"] = at.strftime("%m-%d-%Y %H:%M:%S.%f")
    left = samples(rows)
    assert set(left) <= set(whole)
    assert len(left) >= len(whole) - 8


@pytest.mark.parametrize("reporting", [4, 3, 1])
def test_rows_of_ranks_include_requests_of_silent_ranks(reporting: int) -> None:
    rows = Executor([Request(0.1, 60, 40)], is_new=True).run()
    ranks = [row | {"attentionDpRank": rank} for row in rows for rank in range(reporting)]
    steps = deque[StepSample]()
    reader = StepReader(steps, lambda: (0.0, 0), num_ranks=4)
    for begin in range(0, len(ranks), 7):  # polls end between the rows of one iteration
        reader.read(ranks[begin : begin + 7])
    decodes = [step for step in steps if not step.prefill_tokens]
    assert len(decodes) >= 25
    assert {step.decode_requests for step in decodes} == {4}
    contexts = [step.context_tokens for step in decodes]
    assert contexts == list(range(contexts[0], contexts[0] + 4 * len(contexts), 4))
    assert 4 * 60 <= contexts[0] <= 4 * 70
