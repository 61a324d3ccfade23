"""Predict from fitted coefficients how long steps and first tokens of an engine take.

A worker fits the coefficients (see `worker.cost_fit`) and sends them with its load, so that every
frontend can predict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import Final, NamedTuple, TypeAlias

import msgspec

from dynamo_trtllm.protocol.mixed_steps import least_chunk_tokens
from dynamo_trtllm.protocol.number_types import Count

Features: TypeAlias = Sequence[float]

# Between two knots, the time of a step is linear.
_DECODE_KNOTS: Final = (0, 32, 128)  # requests
_PREFILL_KNOTS: Final = (0, 64, 256, 1024, 2048, 4096)  # prompt tokens
# The share of a layer's experts that a token does not use: 124 of 128 in gpt-oss-120b.
_UNUSED_EXPERTS: Final = 1 - 1 / 32
_PER_KI: Final = 1 / 1024
_PER_MI: Final = 1 / (1 << 20)
# The indexes of the coefficients that are slopes of adjacent segments.
DECODE_SEGMENTS: Final = range(1, 1 + len(_DECODE_KNOTS))
PREFILL_SEGMENTS: Final = range(1, 1 + len(_PREFILL_KNOTS))


def _slopes(name: str, knots: Sequence[int]) -> list[str]:
    ends = (*knots[1:], "more")
    return [f"{name}_{begin}_to_{end}" for begin, end in zip(knots, ends, strict=True)]


DECODE_TERMS: Final = ("step", *_slopes("requests", _DECODE_KNOTS), "context_ki", "all_experts")
PREFILL_TERMS: Final = (
    "step",
    *_slopes("tokens", _PREFILL_KNOTS),
    "decode_requests",
    "context_ki",
    "attention_mi",
)
FIRST_TOKEN_TERMS: Final = ("call", "prompt_ki", "running_step", "steps")
# The assumption until first tokens were measured: a call waits for half of the running step, and
# for all steps after it.
FIRST_TOKEN_PRIOR: Final = (0.0, 0.0, 0.5, 1.0)
KV_TRANSFER_TERMS: Final = ("call", "prompt_ki", "others_ki")


class StepSample(NamedTuple):
    """What one step of an engine computed, and how long it took."""

    seconds: float
    decode_requests: int = 0
    context_tokens: int = 0  # of the decode requests
    prefill_tokens: int = 0  # prompt tokens that the step computed
    attention_pairs: float = 0.0  # pairs of a prompt token of this step and a token before it

    @property
    def features(self) -> Features:
        """The values on which the time depends."""
        if self.prefill_tokens:
            return prefill_features(
                self.decode_requests,
                self.context_tokens,
                self.prefill_tokens,
                self.attention_pairs,
            )
        return decode_features(self.decode_requests, self.context_tokens)


def _segments(value: float, knots: Sequence[int]) -> list[float]:
    """Return how much of `value` lies after each knot and before the next.

    So each part has a slope of its own.
    """
    parts = [0.0] * len(knots)
    for index in reversed(range(len(knots))):
        knot = knots[index]
        if value > knot:
            parts[index] = value - knot
            value = knot
    return parts


def decode_features(requests: float, context_tokens: float) -> Features:
    """Return the values on which a step without prompt tokens depends.

    The last one is the part of a layer's experts that the requests use.
    """
    parts = _segments(requests, _DECODE_KNOTS)
    return 1.0, *parts, context_tokens * _PER_KI, _used_experts(requests)


def _used_experts(requests: float) -> float:
    """Return which part of the experts of a layer some requests use, on average."""
    return 1.0 - math.pow(_UNUSED_EXPERTS, requests)


def prefill_features(
    decode_requests: float, context_tokens: float, tokens: float, attention_pairs: float
) -> Features:
    """Return the values on which a step with prompt tokens depends.

    The parameters are those of `StepSample`.
    """
    parts = _segments(tokens, _PREFILL_KNOTS)
    return 1.0, *parts, decode_requests, context_tokens * _PER_KI, attention_pairs * _PER_MI


def decode_step_s(fit: Fit, requests: float, context_tokens: float) -> float:
    """Return the predicted seconds of a step without prompt tokens.

    Equal to `fit.predict(decode_features(...))`, in a fraction of the time: a selection of workers
    predicts many steps.
    """
    step_s, slope, next_slope, last_slope, context_s, experts_s = fit.coefficients
    seconds = step_s + context_s * context_tokens * _PER_KI
    seconds += experts_s * (1.0 - math.pow(_UNUSED_EXPERTS, requests))
    _, first, second = _DECODE_KNOTS
    if requests <= first:
        return seconds + slope * requests
    seconds += slope * first
    if requests <= second:
        return seconds + next_slope * (requests - first)
    seconds += next_slope * (second - first)
    return seconds + last_slope * (requests - second)


def prefill_step_s(
    fit: Fit,
    decode_requests: float,
    context_tokens: float,
    tokens: float,
    attention_pairs: float = 0.0,
) -> float:
    """Return the predicted seconds of a step with prompt tokens.

    Equal to `fit.predict(prefill_features(...))`, in a fraction of the time.
    """
    step_s, *slopes, request_s, context_s, attention_s = fit.coefficients
    seconds = step_s + request_s * decode_requests + context_s * context_tokens * _PER_KI
    seconds += attention_s * attention_pairs * _PER_MI
    _, first, second, third, fourth, fifth = _PREFILL_KNOTS
    if tokens <= first:
        return seconds + slopes[0] * tokens
    seconds += slopes[0] * first
    if tokens <= second:
        return seconds + slopes[1] * (tokens - first)
    seconds += slopes[1] * (second - first)
    if tokens <= third:
        return seconds + slopes[2] * (tokens - second)
    seconds += slopes[2] * (third - second)
    if tokens <= fourth:
        return seconds + slopes[3] * (tokens - third)
    seconds += slopes[3] * (fourth - third)
    if tokens <= fifth:
        return seconds + slopes[4] * (tokens - fourth)
    seconds += slopes[4] * (fifth - fourth)
    return seconds + slopes[5] * (tokens - fifth)


def first_token_features(new_tokens: float, running_s: float, steps_s: float) -> Features:
    """Return the values on which the time to first token of a prefill or aggregated call depends.

    The coefficient of the running step says how much of this step a call waits for: about half on
    average, and more where the engine schedules the next step before this one ends.

    Args:
        new_tokens: the prompt tokens of the call that are not cached.
        running_s: predicted time of the step that runs when it arrives.
        steps_s: predicted time of the steps after that, until its first token.
    """
    return 1.0, new_tokens * _PER_KI, running_s, steps_s


def kv_transfer_features(prompt_tokens: float, other_tokens: float) -> Features:
    """Return the values on which the time to first token of a decode call depends.

    The call fetches the KV of its prompt.

    Args:
        prompt_tokens: the tokens of this prompt.
        other_tokens: the tokens of the prompts whose KV the worker still fetches when the call
            arrives. All these transfers share the network of the worker.
    """
    return 1.0, prompt_tokens * _PER_KI, other_tokens * _PER_KI


# The coefficients of requests that decode in a step with prompt tokens, and of their context.
_DECODE_IN_PREFILL: Final = slice(
    PREFILL_TERMS.index("decode_requests"), PREFILL_TERMS.index("context_ki") + 1
)
_MAX_COEFFICIENT = 1e6  # a larger one is damaged


class Fit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The coefficients of one kind of time, and how far predictions with them were off.

    A reader checks `is_valid`.
    """

    coefficients: tuple[float, ...]
    low: float  # nine of ten measured times were between `low` and `high` times the predicted one
    high: float
    num_samples: Count  # 0: the coefficients are a prior from the configuration

    def is_valid(self, num_terms: int) -> bool:
        """Return True if no coefficient is missing, negative, too large or not a number."""
        if len(self.coefficients) != num_terms:
            return False
        if not all(0 <= coefficient <= _MAX_COEFFICIENT for coefficient in self.coefficients):
            return False
        return 0 <= self.low <= self.high <= _MAX_COEFFICIENT

    def predict(self, features: Features) -> float:
        """Return the predicted seconds."""
        return sum(map(mul, self.coefficients, features), 0.0)


_PRIOR_BOUNDS: Final = (0.5, 2.0)


def prior_fit(coefficients: Sequence[float]) -> Fit:
    """Return a prior of known coefficients."""
    return Fit(tuple(coefficients), *_PRIOR_BOUNDS, 0)


def linear_decode_fit(base_s: float, request_s: float = 0.0, context_token_s: float = 0.0) -> Fit:
    """Return a prior for decode steps: a time per step, per request and per token of context."""
    slopes = [request_s] * len(_DECODE_KNOTS)
    return prior_fit((base_s, *slopes, 1024 * context_token_s, 0.0))


def linear_prefill_fit(
    base_s: float, token_s: float, request_s: float = 0.0, context_token_s: float = 0.0
) -> Fit:
    """Return a prior for steps with prompt tokens.

    It has a time per step, per prompt token, per decoding request, and per token of the context of
    the decoding requests.
    """
    slopes = [token_s] * len(_PREFILL_KNOTS)
    return prior_fit((base_s, *slopes, request_s, 1024 * context_token_s, 0.0))


class EngineWork(NamedTuple):
    """The load of an engine when a request arrives."""

    decode_requests: int = 0
    context_tokens: int = 0  # of the decode requests
    queued_tokens: int = 0  # prompt tokens that wait for prefill or are in it
    queued_requests: int = 0  # requests whose prefill has not begun
    # The target time of steps with prompt tokens while requests decode: see `mixed_step_target_s`.
    # 0: the engine is not elastic, and has no target.
    mixed_step_s: float = 0.0


class CostModel(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The fits of one worker. None: too little has been measured."""

    decode: Fit | None = None  # fit of steps without prompt tokens
    prefill: Fit | None = None  # fit of steps with prompt tokens
    # time to first token of prefill and aggregated calls, from the predicted time of their steps
    first_token: Fit | None = None
    step_tokens: Count = 0  # most prompt tokens of one step
    kv_transfer: Fit | None = None  # fit of decode calls until their first token

    def readable(self) -> CostModel:
        """Return the model without fits that are damaged, or have other terms than in this release.

        Workers of another release may report such fits.
        """

        def checked(fit: Fit | None, terms: Sequence[str]) -> Fit | None:
            return fit if fit is not None and fit.is_valid(len(terms)) else None

        return CostModel(
            decode=checked(self.decode, DECODE_TERMS),
            prefill=checked(self.prefill, PREFILL_TERMS),
            first_token=checked(self.first_token, FIRST_TOKEN_TERMS),
            step_tokens=self.step_tokens,
            kv_transfer=checked(self.kv_transfer, KV_TRANSFER_TERMS),
        )

    @property
    def token_s(self) -> float:
        """Seconds per prompt token in a full step. 0: not known.

        Without prefill steps, this is a guess: the seconds per request in a decode step of 32.
        """
        if self.prefill is not None and self.step_tokens:
            full_step = prefill_features(0, 0, self.step_tokens, 0.0)
            return self.prefill.predict(full_step) / self.step_tokens
        if self.decode is not None:
            return self.decode.predict(decode_features(32, 32 * 1024)) / 32
        return 0.0

    def fits(self) -> dict[str, tuple[Sequence[str], Fit | None]]:
        """Return by name what the coefficients of a fit stand for, and the fit."""
        return {
            "decode_step": (DECODE_TERMS, self.decode),
            "prefill_step": (PREFILL_TERMS, self.prefill),
            "first_token": (FIRST_TOKEN_TERMS, self.first_token),
            "kv_transfer": (KV_TRANSFER_TERMS, self.kv_transfer),
        }

    def prefill_steps_s(
        self, new_tokens: int, cached_tokens: int, work: EngineWork
    ) -> tuple[float, float] | None:
        """Return the predicted times of the running step, and of those after it.

        The last one makes the first token of a prompt. Prompts are computed in the order of
        arrival, as many tokens per step as fit.

        Args:
            new_tokens: the tokens of the prompt that are not cached.
            cached_tokens: the tokens of the prompt that are in the prefix cache.
            work: the work of the engine.

        Returns:
            None: it is not known yet.
        """
        fit = self.prefill
        max_tokens = self._max_step_tokens(work)
        if fit is None or not max_tokens:
            return None
        decoding = work.decode_requests
        context = work.context_tokens
        queued_tokens = work.queued_tokens
        # Assume that the queued tokens are spread evenly over the requests that have not begun and
        # the one in the running step.
        running_tokens = min(queued_tokens // (work.queued_requests + 1), max_tokens)
        running_s = 0.0
        if running_tokens > 0:
            running_s = prefill_step_s(fit, decoding, context, running_tokens)
            queued_tokens -= running_tokens
        elif decoding and self.decode is not None:
            running_s = decode_step_s(self.decode, decoding, context)
        # The last token of a prompt is always computed.
        num_full, rest_tokens = divmod(queued_tokens + max(1, new_tokens), max_tokens)
        seconds = 0.0
        if num_full:
            seconds = num_full * prefill_step_s(fit, decoding, context, max_tokens)
        if rest_tokens:
            seconds += prefill_step_s(fit, decoding, context, rest_tokens)
        # The pairs of attention are added for all of these steps together. Their coefficient is the
        # last one.
        attention_pairs = new_tokens * (cached_tokens + new_tokens / 2)
        if work.queued_requests:
            mean_prompt = queued_tokens / work.queued_requests
            attention_pairs += queued_tokens * mean_prompt / 2
        attention_s = fit.coefficients[-1] * attention_pairs * _PER_MI
        return running_s, seconds + attention_s

    def first_token_s(self, new_tokens: int, cached_tokens: int, work: EngineWork) -> float:
        """Return the predicted time of a prefill or aggregated call until its first token.

        It includes the time in the queue. Infinity: not known.
        """
        predicted = self.prefill_steps_s(new_tokens, cached_tokens, work)
        if predicted is None or self.first_token is None:
            return math.inf
        running_s, steps_s = predicted
        call, prompt, running, steps = self.first_token.coefficients
        return call + prompt * new_tokens * _PER_KI + running * running_s + steps * steps_s

    def longest_step_s(self, new_tokens: int, cached_tokens: int, work: EngineWork) -> float:
        """Return the time of the longest step until the first token of a prompt.

        Requests that decode meanwhile get no token for so long. Infinity: not known.

        Args:
            new_tokens: the tokens of the prompt that are not cached.
            cached_tokens: the tokens of the prompt that are in the prefix cache.
            work: the work of the engine. Its queued prompts share the step.
        """
        fit = self.prefill
        max_tokens = self._max_step_tokens(work)
        if fit is None or not max_tokens:
            return math.inf
        requests = work.decode_requests
        context = work.context_tokens
        tokens = min(max_tokens, work.queued_tokens + max(1, new_tokens))
        # The last step of the prompt has the most pairs: its tokens attend to all before them.
        last_tokens = min(max_tokens, new_tokens)
        attention_pairs = last_tokens * (cached_tokens + new_tokens - last_tokens / 2)
        seconds = prefill_step_s(fit, requests, context, tokens, attention_pairs)
        return seconds + self._unfitted_decode_s(fit, requests, context)

    def _unfitted_decode_s(self, fit: Fit, requests: float, context_tokens: float) -> float:
        """Return what streams add to a step with prompts, if its fit does not include it; else 0.

        The fit does not include it if the worker has never decoded in such a step, or if the fit is
        that of another worker. The sum is rather too high: it counts twice what both steps have in
        common.
        """
        request_s, context_s = fit.coefficients[_DECODE_IN_PREFILL]
        if not requests or request_s or context_s or self.decode is None:
            return 0.0
        return decode_step_s(self.decode, requests, context_tokens)

    def _max_step_tokens(self, work: EngineWork) -> int:
        """Return how many prompt tokens a step has at most. 0: not known."""
        if work.mixed_step_s and work.decode_requests and self.step_tokens:
            return self.tokens_beside_streams(
                work.decode_requests, work.context_tokens, work.mixed_step_s
            )
        return self.step_tokens

    def tokens_beside_streams(self, requests: float, context_tokens: float, step_s: float) -> int:
        """Return how many prompt tokens a step of an elastic engine may have while streams run.

        Args:
            requests: the streams.
            context_tokens: of these.
            step_s: the target time of the step: see `mixed_step_target_s` and `engines.chunk_size`.
        """
        fit = self.prefill
        least = least_chunk_tokens(self.step_tokens)
        if fit is None:
            return least
        base_s = prefill_step_s(fit, requests, context_tokens, 0)
        left_s = step_s - base_s - self._unfitted_decode_s(fit, requests, context_tokens)
        if left_s <= 0:
            return least
        slopes = fit.coefficients[PREFILL_SEGMENTS.start : PREFILL_SEGMENTS.stop]
        ends = (*_PREFILL_KNOTS[1:], math.inf)
        for begin, end, slope in zip(_PREFILL_KNOTS, ends, slopes, strict=True):
            if begin >= self.step_tokens:
                break
            segment_s = slope * (min(end, self.step_tokens) - begin)
            if left_s < segment_s:
                return max(least, int(begin + left_s / slope))
            left_s -= segment_s
        return self.step_tokens

    def completed_by(self, other: CostModel) -> CostModel:
        """Return the model with the fits of an equal worker for those that are not known yet.

        A prefill worker has measured no decode steps before its first aggregated request, and a
        decode worker no steps with whole prompts.
        """
        prompt_source, rest = self, other
        is_other_better = other.has_computed_prompts and not self.has_computed_prompts
        if self.prefill is None or is_other_better:
            prompt_source, rest = other, self
        return CostModel(
            decode=self.decode or other.decode,
            prefill=prompt_source.prefill,
            first_token=prompt_source.first_token or rest.first_token,
            step_tokens=prompt_source.step_tokens,
            kv_transfer=self.kv_transfer or other.kv_transfer,
        )

    @property
    def has_computed_prompts(self) -> bool:
        """True if the times of prompts were measured, or come from the configuration.

        A decode worker that computes the last token of each prompt again has only measured steps
        with few prompt tokens.
        """
        if self.prefill is None or self.first_token is None:
            return False
        is_configured = self.prefill.num_samples == 0
        # Only prefill and aggregated calls, which compute whole prompts, give samples of the first
        # token.
        return is_configured or self.first_token.num_samples > 0

    @property
    def is_complete(self) -> bool:
        """True if the times of all steps are known. That of a KV transfer may be missing."""
        is_prefill_known = self.prefill is not None and self.first_token is not None
        return is_prefill_known and self.decode is not None and self.step_tokens > 0

    @property
    def suffices_alone(self) -> bool:
        """True if this model lacks nothing that it could take from that of an equal worker."""
        return self.is_complete and self.has_computed_prompts and self.kv_transfer is not None

    def kv_transfer_s(
        self, prompt_tokens: float, other_tokens: float = 0.0, after_s: float = 0.0
    ) -> float:
        """Return the predicted time of a decode call until its first token. 0: not known.

        The call fetches the KV of its prompt.

        Args:
            prompt_tokens: the tokens of the prompt.
            other_tokens: the tokens of the prompts whose KV the worker fetches before this one.
            after_s: time until the call begins. Meanwhile, the worker fetches KV of those prompts.
        """
        if self.kv_transfer is None:
            return 0.0
        call_s, prompt_s, others_s = self.kv_transfer.coefficients
        waiting_s = max(0.0, others_s * other_tokens * _PER_KI - after_s)
        return call_s + prompt_s * prompt_tokens * _PER_KI + waiting_s
