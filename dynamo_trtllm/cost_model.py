"""Predict from fitted coefficients how long an engine's steps take, and how long a prompt takes
until its first token.

A worker fits the coefficients (see `worker.cost_fit`) and sends them with its load, so that every
frontend can predict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import Final, NamedTuple, TypeAlias

import msgspec

from dynamo_trtllm.number_types import Count

Features: TypeAlias = Sequence[float]

_DECODE_KNOTS: Final = (0, 32, 128)  # requests; between them, the time of a decode step is linear
_PREFILL_KNOTS: Final = (0, 64, 256, 1024, 4096)  # prompt tokens
_KI: Final = 1 / 1024
_MI: Final = 1 / (1 << 20)
# coefficients that are slopes of adjacent segments
DECODE_SEGMENTS: Final = range(1, 1 + len(_DECODE_KNOTS))
PREFILL_SEGMENTS: Final = range(1, 1 + len(_PREFILL_KNOTS))


def _slopes(name: str, knots: Sequence[int]) -> list[str]:
    return [
        f"{name}_{low}_to_{high}" for low, high in zip(knots, (*knots[1:], "more"), strict=True)
    ]


DECODE_TERMS: Final = ("step", *_slopes("requests", _DECODE_KNOTS), "context_ki", "sqrt_requests")
PREFILL_TERMS: Final = (
    "step",
    *_slopes("tokens", _PREFILL_KNOTS),
    "decode_requests",
    "context_ki",
    "attention_mi",
)
FIRST_TOKEN_TERMS: Final = ("call", "prompt_ki", "running_step", "steps")
KV_TRANSFER_TERMS: Final = ("call", "prompt_ki")


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
            return prefill_features(*self[1:])
        return decode_features(self.decode_requests, self.context_tokens)


def _segments(value: float, knots: Sequence[int]) -> list[float]:
    """Return how much of `value` lies after each knot and before the next, so that each part has a
    slope of its own.
    """
    parts = [0.0] * len(knots)
    for at in reversed(range(len(knots))):
        if value > knots[at]:
            parts[at] = value - knots[at]
            value = knots[at]
    return parts


def decode_features(requests: float, context_tokens: float) -> Features:
    """Return the values on which a step without prompt tokens depends.

    The root stands for what grows more slowly with each further request, such as the experts of a
    layer that are used.
    """
    return 1.0, *_segments(requests, _DECODE_KNOTS), context_tokens * _KI, math.sqrt(requests)


def prefill_features(
    decode_requests: float, context_tokens: float, tokens: float, attention_pairs: float
) -> Features:
    """Return the values on which a step with prompt tokens depends.

    The parameters are those of `StepSample`.
    """
    parts = _segments(tokens, _PREFILL_KNOTS)
    return 1.0, *parts, decode_requests, context_tokens * _KI, attention_pairs * _MI


def first_token_features(prompt_tokens: float, running_s: float, steps_s: float) -> Features:
    """Return the values on which the time of a prefill or aggregated call until its first token
    depends.

    The coefficient of the running step says how much of it a call waits for: about half on average,
    and more where the engine schedules the next step before it ends.

    Args:
        prompt_tokens: of the call.
        running_s: predicted time of the step that runs when it arrives.
        steps_s: predicted time of the steps after that, until its first token.
    """
    return 1.0, prompt_tokens * _KI, running_s, steps_s


def kv_transfer_features(prompt_tokens: float) -> Features:
    """Return the values on which the time of a decode call until its first token depends: it
    fetches the KV.
    """
    return 1.0, prompt_tokens * _KI


_MOST = 1e6  # of a coefficient that is not damaged, in seconds


class Fit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The coefficients of one kind of time, and how far predictions with them were off.

    A reader checks `is_valid`.
    """

    coefficients: tuple[float, ...]
    low: float  # nine of ten measured times were between `low` and `high` times the predicted one
    high: float
    num_samples: Count  # 0: the coefficients are a prior from the configuration

    def is_valid(self, num_terms: int) -> bool:
        """Return True if it has so many coefficients, and none is negative, too large or not a
        number.
        """
        return (
            len(self.coefficients) == num_terms
            and all(0 <= each <= _MOST for each in self.coefficients)
            and 0 <= self.low <= self.high <= _MOST
        )

    def predict(self, features: Features) -> float:
        """Return the predicted seconds."""
        return sum(map(mul, self.coefficients, features), 0.0)


_PRIOR_BOUNDS: Final = (0.5, 2.0)


def linear_decode_fit(base_s: float, request_s: float = 0.0, context_token_s: float = 0.0) -> Fit:
    """Return a prior for decode steps: a time per step, per request and per token of context."""
    slopes = [request_s] * len(_DECODE_KNOTS)
    return Fit((base_s, *slopes, context_token_s / _KI, 0.0), *_PRIOR_BOUNDS, 0)


def linear_prefill_fit(
    base_s: float, token_s: float, request_s: float = 0.0, context_token_s: float = 0.0
) -> Fit:
    """Return a prior for steps with prompt tokens: a time per step and prompt token, and as for
    decode steps.
    """
    slopes = [token_s] * len(_PREFILL_KNOTS)
    return Fit((base_s, *slopes, request_s, context_token_s / _KI, 0.0), *_PRIOR_BOUNDS, 0)


_TICK_S: Final = 1e-4
_MOST_TICKS: Final = (1 << 21) - 1


class Prediction(NamedTuple):
    """A predicted time in seconds.

    Nine of ten measured times are expected between `low_s` and `high_s`.
    """

    seconds: float
    low_s: float
    high_s: float

    @classmethod
    def of(cls, fit: Fit, features: Features) -> Prediction | None:
        """Return the prediction of a fit. None: the time is not finite."""
        seconds = fit.predict(features)
        return (
            cls(seconds, seconds * fit.low, seconds * fit.high) if math.isfinite(seconds) else None
        )

    @classmethod
    def total(cls, parts: Sequence[Prediction | None]) -> Prediction | None:
        """Return the time of parts that follow each other. None: one of them is not known."""
        known = [part for part in parts if part is not None]
        return cls(*map(sum, zip(*known, strict=True))) if 0 < len(known) == len(parts) else None

    def packed(self) -> int:
        """Return the prediction in a number of 64 bits."""
        seconds, low, high = (min(round(each / _TICK_S) + 1, _MOST_TICKS) for each in self)
        return seconds << 42 | low << 21 | high

    @classmethod
    def unpacked(cls, number: int) -> Prediction:
        ticks = number >> 42, number >> 21 & _MOST_TICKS, number & _MOST_TICKS
        return cls(*((each - 1) * _TICK_S for each in ticks))


class EngineWork(NamedTuple):
    """The load of an engine when a request arrives."""

    decode_requests: int = 0
    context_tokens: int = 0  # of the decode requests
    queued_tokens: int = 0  # prompt tokens that wait for prefill or are in it
    queued_requests: int = 0  # of these, those that have not begun


class CostModel(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The fits of one worker. None: too little has been measured."""

    decode: Fit | None = None  # of steps without prompt tokens
    prefill: Fit | None = None  # of steps with prompt tokens
    # of prefill and aggregated calls until it, from the predicted time of their steps
    first_token: Fit | None = None
    step_tokens: Count = 0  # most prompt tokens of one step
    kv_transfer: Fit | None = None  # of decode calls until their first token

    @property
    def is_valid(self) -> bool:
        """True if this release can read the coefficients, which may come from another release."""
        return all(fit is None or fit.is_valid(len(terms)) for terms, fit in self.fits().values())

    @property
    def token_s(self) -> float:
        """Seconds per prompt token in a full step; without these, per request in a decode step of
        32. 0: not known.
        """
        if self.prefill is not None and self.step_tokens:
            return (
                self.prefill.predict(prefill_features(0, 0, self.step_tokens, 0.0))
                / self.step_tokens
            )
        return (
            0.0 if self.decode is None else self.decode.predict(decode_features(32, 32 * 1024)) / 32
        )

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
        """Return the predicted time of the step that runs, and of those after it until the first
        token of a prompt.

        Prompts are computed in the order of arrival, as many tokens per step as fit.

        Args:
            new_tokens: of the prompt, to compute.
            cached_tokens: of the prompt, in the prefix cache.
            work: of the engine.

        Returns:
            None: it is not known yet.
        """
        fit, decoding, context, queued = (
            self.prefill,
            work.decode_requests,
            work.context_tokens,
            work.queued_tokens,
        )
        if fit is None or not self.step_tokens:
            return None
        others, running_s = work.queued_requests, 0.0
        # tokens in the step: of a request that has begun
        running = min(queued // (others + 1), self.step_tokens)
        if running > 0:
            running_s = fit.predict(prefill_features(decoding, context, running, 0.0))
            queued -= running
        elif decoding and self.decode is not None:
            running_s = self.decode.predict(decode_features(decoding, context))
        steps, rest = divmod(queued + max(1, new_tokens), self.step_tokens)
        seconds = 0.0
        if steps:
            seconds = steps * fit.predict(
                prefill_features(decoding, context, self.step_tokens, 0.0)
            )
        if rest:
            seconds += fit.predict(prefill_features(decoding, context, rest, 0.0))
        pairs = new_tokens * (cached_tokens + new_tokens / 2)
        if others:
            pairs += queued * (queued / others) / 2
        return running_s, seconds + fit.coefficients[-1] * pairs * _MI

    def predict_first_token(
        self, new_tokens: int, cached_tokens: int, work: EngineWork
    ) -> Prediction | None:
        """Predict the time of a prefill or aggregated call until its first token, with its time in
        the queue.
        """
        steps_s = self.prefill_steps_s(new_tokens, cached_tokens, work)
        if steps_s is None or self.first_token is None:
            return None
        return Prediction.of(self.first_token, first_token_features(new_tokens, *steps_s))

    def predict_kv_transfer(self, prompt_tokens: int) -> Prediction | None:
        """Predict the time of a decode call until its first token: it fetches the KV of the
        prompt.
        """
        if self.kv_transfer is None:
            return None
        return Prediction.of(self.kv_transfer, kv_transfer_features(prompt_tokens))
