"""Fit a worker's cost model to the steps and calls that it measures.

Samples are fitted by least squares of relative errors, with weights against outliers and without
negative coefficients. The newest samples of each kind of step stay, so that a load of one kind does
not displace what is known of the others.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import pairwise
from operator import mul
from statistics import median
from typing import Final, NamedTuple

import msgspec

from dynamo_trtllm.cost_model import (
    DECODE_SEGMENTS,
    PREFILL_SEGMENTS,
    CostModel,
    EngineWork,
    Features,
    Fit,
    StepSample,
    first_token_features,
    kv_transfer_features,
)

_log = logging.getLogger(__name__)

_MOST_KINDS = 24  # of steps; those that were seen last
_PER_KIND = 12  # samples
_WARM_UP = 4  # samples to ignore at first
_MIN_SAMPLES = 24  # after which the fit replaces the prior
_RATIOS = 256  # of measured to predicted times
_FIRST_RATIOS = 20  # after which the interval comes from them
_FIRST_INTERVAL = (0.5, 2.0)
# samples of known kinds: if all but one are too fast, or too slow, older samples are dropped
_CHANGED = 12
# samples for which the coefficients stay until it is clear that the engine has changed
_MOST_DOUBTED = 64
_MISS_RATE: Final = 0.1
_ADAPT = 0.01
_ROUNDS = 3
_RIDGE = 1e-4  # weight of the prior (or of zero), relative to that of the samples
_TIES = 1e-3  # weight of equal slopes of adjacent segments, likewise
_PRIOR_SAMPLES = 2.0


class _Sample(NamedTuple):
    number: int
    features: Features
    seconds: float


@dataclass(eq=False)
class RobustFit:
    """An online fit of one kind of time.

    Args:
        on_outcome: is called for each prediction that can be evaluated, with the ratio of the
            measured time to the predicted one, and whether it was within the interval.
        prior: coefficients to use until enough samples were taken; None: there is no prediction
            until then.
        segments: the coefficients that are slopes of adjacent segments.
        can_change: an engine that has changed is detected. Not in times that depend on more than
            the engine, such as the wait for a batch slot.
    """

    on_outcome: Callable[[float, bool], None]
    prior: Sequence[float] | None = None
    segments: range = range(0)
    _: KW_ONLY
    can_change: bool = False

    def __post_init__(self) -> None:
        self._kinds: dict[Hashable, deque[_Sample]] = {}
        self._coefficients = self.prior
        self._ratios: deque[float] = deque(maxlen=_RATIOS)
        # with the numbers of the samples
        self._known_ratios: deque[tuple[int, float]] = deque(maxlen=_CHANGED)
        self._miss_rate = _MISS_RATE
        self._interval = _FIRST_INTERVAL
        # number of the last sample before the samples that may be of a changed engine
        self._doubted_at = 0
        self.num_fitted = 0  # samples at the last `refit`
        self.num_samples = self.num_changes = 0

    def add(self, features: Features, kind: Hashable, seconds: float) -> None:
        """Take a sample. Evaluate the prediction before it, if there were enough samples.

        Samples that are not finite are ignored.

        Args:
            features: on which the time depends.
            kind: equal for samples that are alike.
            seconds: that were measured.
        """
        if not (0 < seconds < math.inf and all(map(math.isfinite, features))):
            return
        self.num_samples += 1
        if self.num_samples <= _WARM_UP:
            return
        samples = self._kinds.pop(kind, None)
        if self._coefficients is not None and self.num_samples > _MIN_SAMPLES:
            ratio = seconds / max(1e-9, sum(map(mul, self._coefficients, features)))
            self._evaluate(ratio, is_known=samples is not None and len(samples) * 2 >= _PER_KIND)
        if samples is None:
            samples = deque(maxlen=_PER_KIND)
            if len(self._kinds) >= _MOST_KINDS:
                del self._kinds[next(iter(self._kinds))]
        samples.append(_Sample(self.num_samples, features, seconds))
        self._kinds[kind] = samples  # as the last one

    def _evaluate(self, ratio: float, *, is_known: bool) -> None:
        low, high = self._interval
        is_covered = low <= ratio <= high
        # If more or fewer than one of ten times are outside the interval, it gets wider or
        # narrower.
        self._miss_rate = min(
            0.2, max(0.01, self._miss_rate + _ADAPT * (_MISS_RATE - (not is_covered)))
        )
        self._ratios.append(ratio)
        if is_known:
            self._known_ratios.append((self.num_samples, ratio))
        self.on_outcome(ratio, is_covered)

    def refit(self) -> Fit | None:
        """Compute the coefficients from the samples.

        Return None as long as there are too few of them, and no prior.
        """
        self.num_fitted = self.num_samples
        is_fitted = self.num_samples >= _MIN_SAMPLES
        if not self._may_have_changed():
            if is_fitted:
                self._coefficients = self._solved(
                    [sample for kind in self._kinds.values() for sample in kind]
                )
            if len(self._ratios) >= _FIRST_RATIOS:
                self._interval = _quantiles(self._ratios, self._miss_rate)
        if self._coefficients is None:
            return None
        return Fit(tuple(self._coefficients), *self._interval, self.num_samples if is_fitted else 0)

    def _may_have_changed(self) -> bool:
        """Return True if the next samples decide whether the engine has changed, for example its
        clock rate.

        If it has changed, drop what was measured before.
        """
        low, high = self._interval
        ratios = [ratio for _, ratio in self._known_ratios]
        num_out = max(sum(ratio < low for ratio in ratios), sum(ratio > high for ratio in ratios))
        has_few = len(ratios) < _CHANGED or 2 * num_out < _CHANGED
        if not self.can_change or has_few or self._coefficients is None:
            self._doubted_at = self.num_samples
            return False
        if num_out < _CHANGED - 1:
            return self.num_samples - self._doubted_at < _MOST_DOUBTED
        self._drop_before(self._known_ratios[1][0], self._coefficients, median(ratios))
        return False

    def _drop_before(self, number: int, coefficients: Sequence[float], change: float) -> None:
        """Drop older samples. Other kinds are assumed to have changed by the same factor."""
        self.num_changes += 1
        self._coefficients = self.prior = [each * change for each in coefficients]
        for kind, samples in list(self._kinds.items()):
            recent = [sample for sample in samples if sample.number >= number]
            self._kinds[kind] = deque(recent, _PER_KIND)
            if not recent:
                del self._kinds[kind]
        self._ratios.clear()
        self._known_ratios.clear()
        self._interval = _FIRST_INTERVAL

    def _solved(self, samples: Sequence[_Sample]) -> list[float]:
        columns = [
            list(column) for column in zip(*(each.features for each in samples), strict=True)
        ]
        seconds = [each.seconds for each in samples]
        scale, weights, coefficients = seconds, [1.0] * len(seconds), list[float]()
        for _ in range(_ROUNDS):
            factors = [
                math.sqrt(weight) / each for weight, each in zip(weights, scale, strict=True)
            ]
            scaled = [list(map(mul, column, factors)) for column in columns]
            coefficients = self._least_squares(scaled, list(map(mul, seconds, factors)))
            predicted = [0.0] * len(seconds)
            for coefficient, column in zip(coefficients, columns, strict=True):
                if coefficient:
                    predicted = [
                        total + coefficient * each
                        for total, each in zip(predicted, column, strict=True)
                    ]
            scale = [
                max(each, measured / 5) for each, measured in zip(predicted, seconds, strict=True)
            ]
            errors = [
                abs(measured / each - 1) for measured, each in zip(seconds, scale, strict=True)
            ]
            limit = max(0.01, 2.0 * median(errors))
            weights = [1.0 if error <= limit else limit / error for error in errors]
        return coefficients

    def _least_squares(self, columns: list[list[float]], target: list[float]) -> list[float]:
        """Solve for coefficients that are not negative, near the prior as far as the samples leave
        it open.
        """
        count, size, prior = len(target), len(columns), self.prior
        matrix = [[0.0] * size for _ in range(size)]
        for i, column in enumerate(columns):
            for j in range(i + 1):
                matrix[i][j] = matrix[j][i] = sum(map(mul, column, columns[j]))
        right = [sum(map(mul, column, target)) for column in columns]
        whole = max(matrix[i][i] for i in range(size))
        scales = [matrix[i][i] or 1e-6 * whole for i in range(size)]
        if segments := self.segments:
            common = sum(matrix[i][j] for i in segments for j in segments) or 1e-6 * whole
            for i, j in pairwise(segments):
                tie = _TIES * common
                matrix[i][i] += tie
                matrix[j][j] += tie
                matrix[i][j] -= tie
                matrix[j][i] -= tie
        ridge = _RIDGE if prior is None else max(_RIDGE, _PRIOR_SAMPLES / count)
        for i in range(size):
            matrix[i][i] += ridge * scales[i]
            if prior is not None:
                right[i] += ridge * scales[i] * prior[i]
        return _non_negative(matrix, right)


def _non_negative(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a symmetric positive system, without the unknowns that would be negative."""
    used, found = list(range(len(right))), [0.0] * len(right)
    while used:
        solution = _solve([[matrix[i][j] for j in used] for i in used], [right[i] for i in used])
        least = min(solution)
        if least >= 0:
            for i, value in zip(used, solution, strict=True):
                found[i] = value
            break
        del used[solution.index(least)]
    return found


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a symmetric positive system by elimination."""
    size = len(right)
    for i in range(size):
        pivot = matrix[i][i]
        for k in range(i + 1, size):
            factor = matrix[k][i] / pivot
            if factor:
                row, upper = matrix[k], matrix[i]
                for j in range(i, size):
                    row[j] -= factor * upper[j]
                right[k] -= factor * right[i]
    for i in reversed(range(size)):
        right[i] = (right[i] - sum(map(mul, matrix[i][i + 1 :], right[i + 1 :]))) / matrix[i][i]
    return right


def _quantiles(ratios: Iterable[float], miss_rate: float) -> tuple[float, float]:
    ordered = sorted(ratios)
    count = len(ordered)
    low = math.floor((count + 1) * miss_rate / 2) - 1
    high = math.ceil((count + 1) * (1 - miss_rate / 2)) - 1
    return ordered[max(0, low)], ordered[min(count - 1, high)]


class CallSample(NamedTuple):
    """How long a call took until its first token."""

    seconds: float
    new_tokens: int  # of its prompt, which were computed
    cached_tokens: int
    work: EngineWork  # when it arrived
    fetches_kv: bool = False  # a decode call, which fetches the KV of its prompt


_LEARN_EVERY_S = 1.0
_MOST_CALLS = 256  # from which the model has not learned yet


class CostFit:
    """The cost model of one worker, as far as it is known.

    Args:
        prior: from the configuration.
        steps: of the engine; `learn` removes them. Another thread may add some.
        on_outcome: is called as by `RobustFit`, with the name of the fit first.
    """

    def __init__(
        self,
        prior: CostModel | None = None,
        steps: deque[StepSample] | None = None,
        on_outcome: Callable[[str, float, bool], None] = lambda name, ratio, is_covered: None,
    ) -> None:
        self._steps: deque[StepSample] = deque() if steps is None else steps
        self._steps.clear()  # those of the warm-up
        self.calls: deque[CallSample] = deque(maxlen=_MOST_CALLS)  # that the caller has measured
        self._learned_at = -math.inf
        self.model = prior = prior or CostModel()
        self._has_step_tokens = bool(prior.step_tokens)
        decode, prefill = (
            None if fit is None else fit.coefficients for fit in (prior.decode, prior.prefill)
        )
        self.decode = RobustFit(
            partial(on_outcome, "decode_step"), decode, DECODE_SEGMENTS, can_change=True
        )
        self.prefill = RobustFit(
            partial(on_outcome, "prefill_step"), prefill, PREFILL_SEGMENTS, can_change=True
        )
        self.first_token = RobustFit(partial(on_outcome, "first_token"), (0.0, 0.0, 0.5, 1.0))
        self.kv_transfer = RobustFit(partial(on_outcome, "kv_transfer"))
        if prior.prefill is not None:
            self.model = msgspec.structs.replace(prior, first_token=self.first_token.refit())

    def learn(self, now: float) -> CostModel:
        """Return the model, after it has learned from what was measured, at most once a second.

        Args:
            now: seconds of a monotonic clock.
        """
        if now - self._learned_at >= _LEARN_EVERY_S:
            self._learned_at = now
            steps = [self._steps.popleft() for _ in range(len(self._steps))]
            calls = [self.calls.popleft() for _ in range(len(self.calls))]
            try:
                self.take(steps, calls)
            # of damaged samples: the worker goes on with the last model
            except (ArithmeticError, ValueError):
                _log.exception(
                    "the cost model could not learn from %d steps and %d calls",
                    len(steps),
                    len(calls),
                )
        return self.model

    def take(self, steps: Iterable[StepSample], calls: Iterable[CallSample] = ()) -> CostModel:
        """Take samples, and return the model.

        Each call refits the kinds of times that have new samples.
        """
        for step in steps:
            tokens, requests, context = (
                step.prefill_tokens,
                step.decode_requests,
                step.context_tokens,
            )
            if tokens > self.model.step_tokens and not self._has_step_tokens:
                self.model = msgspec.structs.replace(self.model, step_tokens=tokens)
            if tokens:
                self.prefill.add(
                    step.features, (tokens.bit_length(), requests.bit_length() // 2), step.seconds
                )
            else:
                self.decode.add(
                    step.features, (requests.bit_length(), context.bit_length()), step.seconds
                )
        for call in calls:
            tokens, work = call.new_tokens, call.work
            if call.fetches_kv:
                self.kv_transfer.add(
                    kv_transfer_features(tokens), tokens.bit_length(), call.seconds
                )
            elif (
                steps_s := self.model.prefill_steps_s(tokens, call.cached_tokens, work)
            ) is not None:
                kind = int(1e4 * sum(steps_s)).bit_length(), work.queued_tokens > 0
                self.first_token.add(first_token_features(tokens, *steps_s), kind, call.seconds)
        fits = {
            name: getattr(self, name)
            for name in ("decode", "prefill", "first_token", "kv_transfer")
        }
        changes = {
            name: fit.refit() for name, fit in fits.items() if fit.num_samples > fit.num_fitted
        }
        if "prefill" in changes and self.model.first_token is None:
            changes["first_token"] = self.first_token.refit()
        if changes:
            self.model = msgspec.structs.replace(self.model, **changes)
        return self.model
