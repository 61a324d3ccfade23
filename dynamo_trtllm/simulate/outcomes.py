"""What a simulation has measured: each request, and the figures of all of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# The workers are saturated if the requests of the second half wait much longer for their first
# token than those of the first half: by more than this factor, and by more than this time.
_SATURATED_RATIO: Final = 2.0
_SATURATED_S: Final = 1.0


@dataclass(slots=True)
class SimulatedRequest:
    """One request, with times in seconds since the beginning."""

    arrived_s: float
    input_tokens: int
    first_s: float = math.inf  # when the first token arrived
    last_s: float = 0.0  # when the newest token arrived
    end_s: float = math.inf
    worst_gap_s: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""  # code of the error with which the request has failed
    wanted_tokens: int = 0  # output tokens of the complete answer
    begun_s: float = math.inf  # when the request left the queue of the frontend
    computed_s: float = math.inf  # when a pair had computed the prompt
    path: str = ""  # the path, if it was chosen by predicted times

    @property
    def is_ok(self) -> bool:
        """Return whether the answer is complete."""
        return not self.error and math.isfinite(self.end_s)

    @property
    def ttft_s(self) -> float:
        """Return the time to first token."""
        return self.first_s - self.arrived_s

    @property
    def mean_gap_s(self) -> float:
        """Return the mean time between two tokens (TPOT)."""
        if self.output_tokens < 2:
            return 0.0
        return (self.last_s - self.first_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The limits of a good request, in seconds. A request that failed is not good."""

    ttft_s: float = 2.0
    mean_gap_s: float = math.inf
    worst_gap_s: float = math.inf

    def is_met(self, request: SimulatedRequest) -> bool:
        """Return whether a request kept all limits."""
        return (
            request.is_ok
            and request.ttft_s <= self.ttft_s
            and request.mean_gap_s <= self.mean_gap_s
            and request.worst_gap_s <= self.worst_gap_s
        )

    def scaled(self, ttft: float, mean_gap: float, worst_gap: float) -> Slo:
        """Return these limits, each multiplied by a factor."""
        return Slo(
            ttft_s=self.ttft_s * ttft,
            mean_gap_s=self.mean_gap_s * mean_gap,
            worst_gap_s=self.worst_gap_s * worst_gap,
        )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value at a quantile, or NaN if there are no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def waits_grow(ttfts_s: Sequence[float]) -> bool:
    """Return whether the wait for first tokens grew until the end, because the load is too high.

    Args:
        ttfts_s: time to first token of each request, in the order of their arrival.
    """
    half = len(ttfts_s) // 2
    before = quantile(ttfts_s[:half], 0.5)
    after = quantile(ttfts_s[half:], 0.5)
    return after > _SATURATED_RATIO * before and after - before > _SATURATED_S


class Outcome:
    """All requests of one simulation.

    Args:
        requests: the requests in the order of their arrival.
        num_gpus: number of GPUs of all workers.
        num_share_changes: how often a planner has changed shares.
        is_closed_loop: a request arrives whenever another one ends.
    """

    def __init__(
        self,
        requests: Sequence[SimulatedRequest],
        num_gpus: int,
        num_share_changes: int = 0,
        *,
        is_closed_loop: bool = False,
    ) -> None:
        self.requests = requests
        self.num_gpus = num_gpus
        self.num_share_changes = num_share_changes
        self.is_closed_loop = is_closed_loop
        self.completed = [request for request in requests if request.is_ok]

    @property
    def errors(self) -> Counter[str]:
        """Return how many requests failed, by the code of the error."""
        return Counter(request.error for request in self.requests if request.error)

    @property
    def seconds(self) -> float:
        """Return the time from the first arrival to the last end."""
        ends = [request.end_s for request in self.completed]
        return max(ends, default=0.0) - self.requests[0].arrived_s

    @property
    def rate(self) -> float:
        """Return the number of requests per second."""
        first_s = self.requests[0].arrived_s
        span_s = self.requests[-1].arrived_s - first_s
        if span_s and not self.is_closed_loop:
            return (len(self.requests) - 1) / span_s
        # Here the times of arrival do not give the rate. In a closed loop, the first requests
        # arrive at once, and none arrives while the last ones run.
        return len(self.requests) / self.seconds if self.completed else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        """Return the output tokens of all answers per second."""
        num_tokens = sum(request.output_tokens for request in self.completed)
        return num_tokens / max(1e-9, self.seconds)

    @property
    def is_saturated(self) -> bool:
        """Return whether the load is too high, see `waits_grow`."""
        return waits_grow([request.ttft_s for request in self.completed])

    def quantiles(self, of: Callable[[SimulatedRequest], float]) -> dict[str, float]:
        """Return the quantiles of a time of the completed requests, in ms."""
        values = [1000 * of(request) for request in self.completed]
        return {name: quantile(values, share) for name, share in QUANTILES.items()}

    def attainment(self, slo: Slo) -> float:
        """Return the share of the requests that kept the limits."""
        return sum(map(slo.is_met, self.requests)) / len(self.requests)

    def goodput_per_gpu(self, slo: Slo) -> float:
        """Return how many requests per second and GPU kept the limits."""
        return self.attainment(slo) * self.rate / self.num_gpus

    def figures(self) -> dict[str, Any]:
        """Return the figures of all requests, for tables and JSON."""
        return {
            "requests": len(self.requests),
            "errors": dict(self.errors),
            "seconds": self.seconds,
            "output_tokens_per_s": self.output_tokens_per_s,
            "output_tokens_per_s_per_gpu": self.output_tokens_per_s / self.num_gpus,
            "cached_share": _cached_share(self.completed),
            "is_saturated": self.is_saturated,
            "share_changes": self.num_share_changes,
            "ttft_ms": self.quantiles(lambda request: request.ttft_s),
            "tpot_ms": self.quantiles(lambda request: request.mean_gap_s),
            "worst_gap_ms": self.quantiles(lambda request: request.worst_gap_s),
        }


def _cached_share(requests: Sequence[SimulatedRequest]) -> float:
    """Return the share of the prompt tokens that came from a prefix cache."""
    total = sum(request.input_tokens for request in requests)
    return sum(request.cached_tokens for request in requests) / max(1, total)
