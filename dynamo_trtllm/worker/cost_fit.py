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
from itertools import chain, pairwise
from operator import mul
from statistics import median
from typing import Final, NamedTuple

import msgspec

from dynamo_trtllm.protocol.cost_model import (
    DECODE_SEGMENTS,
    FIRST_TOKEN_PRIOR,
    PREFILL_SEGMENTS,
    CostModel,
    EngineWork,
    Features,
    Fit,
    StepSample,
    first_token_features,
    kv_transfer_features,
)

log = logging.getLogger(__name__)

_MAX_KINDS = 48  # samples are kept of this number of kinds of steps: those that were seen last
_PER_KIND = 6  # the number of samples that are kept of each kind: the newest ones
_WARM_UP = 4  # this number of first samples is ignored
_MIN_SAMPLES = 24  # number of samples after which the fit replaces the prior
_RATIOS = 256  # the number of ratios of measured to predicted times that are kept
_FIRST_RATIOS = 20  # the interval is computed from the ratios if there are this many
_FIRST_INTERVAL = (0.5, 2.0)  # the interval before
# This number of the newest samples of known kinds decides whether the engine has changed. Each
# sample is compared with earlier samples of its kind. The engine has changed if all these samples
# but one are faster than the interval, or if all but one are slower.
_DECIDING_SAMPLES = 12
# Times must change at least by this factor. Steps of one kind differ by less: an engine that
# computes 9 requests as 16 (CUDA graphs) takes a third longer than the fit.
_LEAST_CHANGE = 1.4
# While at least half of the deciding samples are too fast, or too slow, the engine may have
# changed, and nothing is fitted again. This doubt lasts for at most this number of samples.
_MAX_DOUBTED = 64
_MISS_RATE: Final = 0.1  # share of the times that may be outside the interval
_ADAPT = 0.01  # how fast the quantiles of the interval follow the misses
# Limits of `RobustFit._quantile_rate`.
_LOWEST_MISS_RATE = 0.01
_HIGHEST_MISS_RATE = 0.2
_ROUNDS = 3  # rounds of a fit; each has new weights
_RIDGE = 1e-4  # weight of the prior, or of zero without a prior, relative to that of the samples
_TIES = 1e-3  # weight of equal slopes of adjacent segments, relative to that of the samples
_PRIOR_SAMPLES = 2.0  # a prior weighs as much as this number of samples


class _NumberedRatio(NamedTuple):
    """The ratio of the measured time of a sample to the expected one."""

    number: int  # number of the sample
    ratio: float


class _Sample(NamedTuple):
    """One measured time."""

    number: int  # samples are numbered from 1
    features: Features
    seconds: float


@dataclass(eq=False)
class RobustFit:
    """An online fit of one kind of time.

    Args:
        on_outcome: is called for each prediction that can be evaluated, with the ratio of the
            measured time to the predicted time, and whether the ratio was within the interval.
        prior: coefficients to use until enough samples were taken. If it is None, nothing is
            predicted until then.
        segments: the coefficients that are slopes of adjacent segments.
        can_change: True if the fit detects that the engine has changed; False for times that depend
            on more than the engine, such as the wait for a batch slot.
    """

    on_outcome: Callable[[float, bool], None]
    prior: Sequence[float] | None = None
    segments: range = range(0)
    _: KW_ONLY
    can_change: bool = False

    def __post_init__(self) -> None:
        # The newest samples of each kind. The kind that was seen last is the last.
        self._kinds: dict[Hashable, deque[_Sample]] = {}
        self._coefficients = self.prior
        self._is_prior = self.prior is not None  # True until the first fit
        self._ratios: deque[float] = deque(maxlen=_RATIOS)
        # The coefficients do not fit all kinds alike. So for each kind that had enough samples at
        # the last fit, this has the median ratio of its measured to its predicted times.
        self._kind_ratios: dict[Hashable, float] = {}
        # The ratios of measured to expected times of the newest samples of these kinds. The
        # expected time is the predicted time multiplied by the ratio of the kind.
        self._known_ratios: deque[_NumberedRatio] = deque(maxlen=_DECIDING_SAMPLES)
        self._quantile_rate = _MISS_RATE  # the part of `_ratios` that the interval leaves outside
        self._interval = _FIRST_INTERVAL
        # `num_samples` when the engine last looked unchanged.
        self._unchanged_at = 0
        self.num_fitted = 0  # the number of samples at the last `refit`
        self.num_samples = 0
        self.num_changes = 0

    def add(self, features: Features, kind: Hashable, seconds: float) -> None:
        """Take a sample. First evaluate what was predicted for it, if there were enough samples.

        Samples that are not finite, or took no time, are ignored.

        Args:
            features: the values on which the time depends.
            kind: equal for samples that are alike.
            seconds: the measured time.
        """
        is_usable = 0 < seconds < math.inf and all(map(math.isfinite, features))
        if not is_usable:
            return
        self.num_samples += 1
        if self.num_samples <= _WARM_UP:
            return
        samples = self._kinds.pop(kind, None)
        if self._coefficients is not None and self.num_samples > _MIN_SAMPLES:
            predicted_s = sum(map(mul, self._coefficients, features))
            ratio = seconds / max(1e-9, predicted_s)
            self._evaluate(ratio)
            # A prior has no ratios of kinds. As a prior may be far off, samples of all kinds count.
            kind_ratio = 1.0 if self._is_prior else self._kind_ratios.get(kind)
            if kind_ratio is not None:
                self._known_ratios.append(_NumberedRatio(self.num_samples, ratio / kind_ratio))
        if samples is None:
            samples = deque(maxlen=_PER_KIND)
            if len(self._kinds) >= _MAX_KINDS:
                oldest = next(iter(self._kinds))
                del self._kinds[oldest]
        samples.append(_Sample(self.num_samples, features, seconds))
        # The kind was removed above, so it is now the one that was seen last.
        self._kinds[kind] = samples

    def _evaluate(self, ratio: float) -> None:
        """Count the ratio of a measured time to the predicted one, and adapt the interval."""
        low, high = self._interval
        is_covered = low <= ratio <= high
        # A time outside the interval lowers the rate, which makes the interval wider. A time within
        # the interval raises the rate by a ninth of this step. The two balance if nine of ten times
        # are within the interval.
        missed = 0.0 if is_covered else 1.0
        rate = self._quantile_rate + _ADAPT * (_MISS_RATE - missed)
        self._quantile_rate = min(_HIGHEST_MISS_RATE, max(_LOWEST_MISS_RATE, rate))
        self._ratios.append(ratio)
        self.on_outcome(ratio, is_covered)

    def refit(self) -> Fit | None:
        """Compute the coefficients from the samples.

        Return None if there are too few samples and no prior.
        """
        self.num_fitted = self.num_samples
        has_enough_samples = self.num_samples >= _MIN_SAMPLES
        is_undecided = self._handle_change()
        if not is_undecided:
            if has_enough_samples:
                samples = list(chain.from_iterable(self._kinds.values()))
                self._coefficients = self._solved(samples)
                self._is_prior = False
                self._kind_ratios = self._ratios_of_kinds(self._coefficients)
            if len(self._ratios) >= _FIRST_RATIOS:
                self._interval = _quantiles(self._ratios, self._quantile_rate)
        if self._coefficients is None:
            return None
        low, high = self._interval
        num_samples = self.num_samples if has_enough_samples else 0
        return Fit(tuple(self._coefficients), low, high, num_samples)

    def _handle_change(self) -> bool:
        """Drop what was measured before a change of the engine, for example of its clock rate.

        Return True if it is undecided whether the engine has changed. Then the next samples decide.
        """
        low = min(self._interval[0], 1 / _LEAST_CHANGE)
        high = max(self._interval[1], _LEAST_CHANGE)
        ratios = [known.ratio for known in self._known_ratios]
        num_too_fast = sum(1 for ratio in ratios if ratio < low)
        num_too_slow = sum(1 for ratio in ratios if ratio > high)
        num_outside = max(num_too_fast, num_too_slow)
        can_decide = self.can_change and len(ratios) == _DECIDING_SAMPLES
        is_in_doubt = 2 * num_outside >= _DECIDING_SAMPLES
        if not can_decide or not is_in_doubt or self._coefficients is None:
            self._unchanged_at = self.num_samples
            return False
        if num_outside < _DECIDING_SAMPLES - 1:
            return self.num_samples - self._unchanged_at < _MAX_DOUBTED
        # The engine has changed. The first deciding sample may be older than the change.
        first_changed = self._known_ratios[1].number
        self._drop_before(first_changed, self._coefficients, median(ratios))
        return False

    def _drop_before(self, number: int, coefficients: Sequence[float], factor: float) -> None:
        """Drop the samples before number `number`. All times are assumed to change by `factor`."""
        self.num_changes += 1
        changed = [coefficient * factor for coefficient in coefficients]
        self._coefficients = changed
        self.prior = changed
        for kind, samples in list(self._kinds.items()):
            recent = [sample for sample in samples if sample.number >= number]
            self._kinds[kind] = deque(recent, _PER_KIND)
            if not recent:
                del self._kinds[kind]
        self._ratios.clear()
        self._kind_ratios.clear()
        self._known_ratios.clear()
        self._interval = _FIRST_INTERVAL

    def _ratios_of_kinds(self, coefficients: Sequence[float]) -> dict[Hashable, float]:
        """Return the median ratio of measured to predicted times of each kind with enough samples.

        If later ratios of one of these kinds differ from its median, the engine has changed. The
        ratios of a new kind can't show a change.
        """
        found: dict[Hashable, float] = {}
        for kind, samples in self._kinds.items():
            if 2 * len(samples) < _PER_KIND:
                continue
            ratios = [
                sample.seconds / max(1e-9, sum(map(mul, coefficients, sample.features)))
                for sample in samples
            ]
            found[kind] = median(ratios)
        return found

    def _solved(self, samples: Sequence[_Sample]) -> list[float]:
        """Return the coefficients with the least squares of relative errors.

        In each round, errors are relative to the times that the round before predicted, and samples
        with large errors weigh less.
        """
        features = [sample.features for sample in samples]
        columns = [list(column) for column in zip(*features, strict=True)]
        seconds = [sample.seconds for sample in samples]
        scales = seconds  # the times to which errors are relative
        weights = [1.0] * len(seconds)
        coefficients: list[float] = []
        for _ in range(_ROUNDS):
            factors = [
                math.sqrt(weight) / scale for weight, scale in zip(weights, scales, strict=True)
            ]
            scaled_columns = [list(map(mul, column, factors)) for column in columns]
            scaled_seconds = list(map(mul, seconds, factors))
            coefficients = self._least_squares(scaled_columns, scaled_seconds)
            predicted = _predicted(columns, coefficients)
            # Without the lower limit, a sample with a prediction near zero would outweigh others.
            scales = [
                max(prediction, measured / 5)
                for prediction, measured in zip(predicted, seconds, strict=True)
            ]
            errors = [
                abs(measured / scale - 1) for measured, scale in zip(seconds, scales, strict=True)
            ]
            weights = _huber_weights(errors)
        return coefficients

    def _least_squares(self, columns: list[list[float]], target: list[float]) -> list[float]:
        """Solve for coefficients that are not negative.

        Coefficients that the samples do not determine are near the prior, or near zero without a
        prior.
        """
        # The normal equations: matrix * coefficients = right.
        size = len(columns)
        prior = self.prior
        matrix = [[0.0] * size for _ in range(size)]
        for i, column in enumerate(columns):
            for j in range(i + 1):
                product = sum(map(mul, column, columns[j]))
                matrix[i][j] = product
                matrix[j][i] = product
        right = [sum(map(mul, column, target)) for column in columns]
        diagonal = [matrix[i][i] for i in range(size)]
        # The scale of features that are zero in all samples.
        least_scale = 1e-6 * max(diagonal)
        scales = [value if value else least_scale for value in diagonal]
        _tie_segments(matrix, self.segments, least_scale)
        # The ridge pulls each coefficient to the prior, or to zero.
        ridge = _RIDGE
        if prior is not None:
            ridge = max(_RIDGE, _PRIOR_SAMPLES / len(target))
        for i in range(size):
            weight = ridge * scales[i]
            matrix[i][i] += weight
            if prior is not None:
                right[i] += weight * prior[i]
        return _non_negative(matrix, right)


def _predicted(columns: list[list[float]], coefficients: Sequence[float]) -> list[float]:
    """Return the time that the coefficients predict for each sample."""
    predicted = [0.0] * len(columns[0])
    for coefficient, column in zip(coefficients, columns, strict=True):
        if coefficient:
            predicted = [
                total + coefficient * feature
                for total, feature in zip(predicted, column, strict=True)
            ]
    return predicted


def _huber_weights(errors: Sequence[float]) -> list[float]:
    """Return the weight 1 for usual errors, and less for larger errors, so that outliers count
    linearly and not by their squares.
    """
    limit = max(0.01, 2.0 * median(errors))
    return [1.0 if error <= limit else limit / error for error in errors]


def _tie_segments(matrix: list[list[float]], segments: range, least_scale: float) -> None:
    """Add a penalty on differences between the slopes of adjacent segments to the equations.

    A segment without samples then gets about the slope of its neighbor.
    """
    if not segments:
        return
    common = sum(matrix[i][j] for i in segments for j in segments)
    if not common:
        common = least_scale
    tie = _TIES * common
    for i, j in pairwise(segments):
        matrix[i][i] += tie
        matrix[j][j] += tie
        matrix[i][j] -= tie
        matrix[j][i] -= tie


def _non_negative(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a system of linear equations whose matrix is symmetric and positive definite. Unknowns
    that would be negative are 0.
    """
    used = list(range(len(right)))
    found = [0.0] * len(right)
    while used:
        used_matrix = [[matrix[i][j] for j in used] for i in used]
        used_right = [right[i] for i in used]
        solution = _solve(used_matrix, used_right)
        least = min(solution)
        if least >= 0:
            for i, value in zip(used, solution, strict=True):
                found[i] = value
            break
        del used[solution.index(least)]
    return found


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a system of linear equations whose matrix is symmetric and positive definite, by
    elimination. Changes both arguments.
    """
    size = len(right)
    for i in range(size):
        upper = matrix[i]
        for k in range(i + 1, size):
            row = matrix[k]
            factor = row[i] / upper[i]
            if factor:
                for j in range(i, size):
                    row[j] -= factor * upper[j]
                right[k] -= factor * right[i]
    for i in reversed(range(size)):
        known = sum(map(mul, matrix[i][i + 1 :], right[i + 1 :]))
        right[i] = (right[i] - known) / matrix[i][i]
    return right


def _quantiles(ratios: Iterable[float], miss_rate: float) -> tuple[float, float]:
    """Return an interval that the next ratio misses with the probability `miss_rate`.

    N sorted ratios divide the line into N + 1 gaps. The next ratio falls into each gap with the
    same probability.
    """
    ordered = sorted(ratios)
    count = len(ordered)
    low = math.floor((count + 1) * miss_rate / 2) - 1
    high = math.ceil((count + 1) * (1 - miss_rate / 2)) - 1
    return ordered[max(0, low)], ordered[min(count - 1, high)]


class CallSample(NamedTuple):
    """How long a call took until its first token."""

    seconds: float
    new_tokens: int  # tokens of the prompt that were computed
    cached_tokens: int
    work: EngineWork  # what the engine had to do when the call arrived
    fetches_kv: bool = False  # True for a decode call, which fetches the KV of its prompt
    # Prompt tokens of the other decode calls that had no first token yet when this one arrived.
    other_tokens: int = 0


_LEARN_EVERY_S = 1.0
_MAX_CALLS = 256  # newest calls that are kept until the model learns from them


def _ignore_outcome(name: str, ratio: float, is_covered: bool) -> None:
    """Do nothing."""


class CostFit:
    """The cost model of one worker, as far as it is known.

    Args:
        prior: the cost model of the configuration.
        steps: samples of the engine. `learn` removes them, and another thread may add some.
        on_outcome: is called as the `on_outcome` of `RobustFit` is, with the name of the fit as an
            additional first argument.
    """

    def __init__(
        self,
        prior: CostModel | None = None,
        steps: deque[StepSample] | None = None,
        on_outcome: Callable[[str, float, bool], None] = _ignore_outcome,
    ) -> None:
        self._steps: deque[StepSample] = deque() if steps is None else steps
        # The steps of the warm-up are removed, because they are unlike later steps.
        self._steps.clear()
        self._calls: deque[CallSample] = deque(maxlen=_MAX_CALLS)
        # The number of prompts that were computed here, and of their tokens that were not cached.
        self.computed_prompts = 0
        self.computed_tokens = 0
        self._learned_at = -math.inf
        if prior is None:
            prior = CostModel()
        self.model = prior
        self._has_step_tokens = prior.step_tokens > 0
        self.decode = RobustFit(
            partial(on_outcome, "decode_step"),
            None if prior.decode is None else prior.decode.coefficients,
            DECODE_SEGMENTS,
            can_change=True,
        )
        self.prefill = RobustFit(
            partial(on_outcome, "prefill_step"),
            None if prior.prefill is None else prior.prefill.coefficients,
            PREFILL_SEGMENTS,
            can_change=True,
        )
        self.first_token = RobustFit(partial(on_outcome, "first_token"), FIRST_TOKEN_PRIOR)
        self.kv_transfer = RobustFit(
            partial(on_outcome, "kv_transfer"),
            None if prior.kv_transfer is None else prior.kv_transfer.coefficients,
        )
        # The prior of first tokens needs the time of prefill steps.
        if prior.prefill is not None:
            self.model = msgspec.structs.replace(prior, first_token=self.first_token.refit())

    def add_call(self, call: CallSample) -> None:
        """Add a call from which the model learns later. It has its first token now."""
        self._calls.append(call)
        if not call.fetches_kv:
            self.computed_prompts += 1
            self.computed_tokens += call.new_tokens

    def learn(self, now: float) -> CostModel:
        """Return the model, after it has learned from what was measured, at most once a second.

        Args:
            now: seconds of a monotonic clock.
        """
        if now - self._learned_at >= _LEARN_EVERY_S:
            self._learned_at = now
            # Another thread may add steps meanwhile.
            steps = [self._steps.popleft() for _ in range(len(self._steps))]
            calls = [self._calls.popleft() for _ in range(len(self._calls))]
            try:
                self.take(steps, calls)
            except (ArithmeticError, ValueError):
                # Samples are damaged. The worker continues with the last model.
                log.exception(
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
            self._take_step(step)
        for call in calls:
            self._take_call(call)
        fits = {
            "decode": self.decode,
            "prefill": self.prefill,
            "first_token": self.first_token,
            "kv_transfer": self.kv_transfer,
        }
        changes = {
            name: fit.refit() for name, fit in fits.items() if fit.num_samples > fit.num_fitted
        }
        # The prior of first tokens needs the time of prefill steps.
        if "prefill" in changes and self.model.first_token is None:
            changes["first_token"] = self.first_token.refit()
        if changes:
            self.model = msgspec.structs.replace(self.model, **changes)
        return self.model

    def _take_step(self, step: StepSample) -> None:
        tokens = step.prefill_tokens
        if tokens > self.model.step_tokens and not self._has_step_tokens:
            self.model = msgspec.structs.replace(self.model, step_tokens=tokens)
        # Steps are of one kind if their numbers of requests have the same next power of two, and
        # their numbers of tokens, too: with CUDA graphs, engines compute 9 to 16 requests as 16.
        if tokens:
            # The number of decode requests beside prompts is divided more coarsely, so that there
            # are fewer kinds.
            kind = (tokens - 1).bit_length(), step.decode_requests.bit_length() // 2
            self.prefill.add(step.features, kind, step.seconds)
        else:
            kind = (step.decode_requests - 1).bit_length(), step.context_tokens.bit_length()
            self.decode.add(step.features, kind, step.seconds)

    def _take_call(self, call: CallSample) -> None:
        tokens = call.new_tokens
        if call.fetches_kv:
            features = kv_transfer_features(tokens, call.other_tokens)
            # With more kinds, the samples of rare kinds would become too old.
            kind = tokens.bit_length(), call.other_tokens > 0
            self.kv_transfer.add(features, kind, call.seconds)
            return
        predicted = self.model.prefill_steps_s(tokens, call.cached_tokens, call.work)
        if predicted is None:
            return
        running_s, steps_s = predicted
        features = first_token_features(tokens, running_s, steps_s)
        tenths_of_ms = int(1e4 * (running_s + steps_s))
        kind = tenths_of_ms.bit_length(), call.work.queued_tokens > 0
        self.first_token.add(features, kind, call.seconds)
