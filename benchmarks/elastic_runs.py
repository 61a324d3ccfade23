"""The simulations that `elastic_planner` compares, and what is counted of each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final, NamedTuple

from dynamo_trtllm.config.deployment import checked_deployment
from dynamo_trtllm.planner.predict import TimeLimits
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.simulate.cluster import SimulatedDeployment, simulate
from dynamo_trtllm.simulate.constants import find_constants, known_constants
from dynamo_trtllm.simulate.deployments import simulated_deployment
from dynamo_trtllm.simulate.outcomes import Outcome, SimulatedRequest, Slo
from dynamo_trtllm.simulate.topologies import Comparison, WorkerCounts
from dynamo_trtllm.simulate.workload import Arrival, Shape, arrivals_at

from .slo_paths import FIXED, SCHEDULE, Part, poisson_times

MODEL: Final = "gpt-oss-120b"
NUM_GPUS: Final = 4
TTFT_S: Final = 2.0
SHAPES: Final = tuple(part.shape for part in SCHEDULE)
MODES: Final = ("least-loaded", "slo")  # of fixed topologies
# For this long, the load of one part turns into that of the next one.
RAMP_S: Final = 20.0


class Limits(NamedTuple):
    """The limits of good requests, and the limit of gaps that router and planner get."""

    slo: Slo
    itl_s: float


LIMITS: Final = {
    "mean": Limits(Slo(ttft_s=TTFT_S, mean_gap_s=0.025), 0.025),
    "worst": Limits(Slo(ttft_s=TTFT_S, worst_gap_s=0.1), 0.1),
}


class Variant(NamedTuple):
    """What serves the load."""

    topology: WorkerCounts | None  # None: elastic workers
    mode: str
    has_planner: bool = False

    def __str__(self) -> str:
        if self.topology is not None:
            return f"{self.topology} {self.mode}"
        return f"{NUM_GPUS}E{'+planner' if self.has_planner else ''} {self.mode}"


def variants() -> dict[str, Variant]:
    """Return all rows by name."""
    fixed = [Variant(topology, mode) for topology in FIXED.values() for mode in MODES]
    elastic = [Variant(None, mode, planned) for planned in (False, True) for mode in MODES]
    return {str(variant): variant for variant in (*fixed, *elastic)}


@dataclass(slots=True)
class RunResult:
    """What is counted of one simulation."""

    total: Counter[Shape]
    good: Counter[Shape]
    seconds: float  # from the first arrival to the last one
    changes: int = 0
    # Requests by the cause of their miss. The oracle has none.
    misses: Counter[tuple[Shape, str]] = field(default_factory=Counter)

    @property
    def attainment(self) -> float:
        """Return the share of the requests that kept the limits."""
        return self.good.total() / self.total.total()

    @property
    def goodput(self) -> float:
        """Return how many requests per second and GPU kept the limits."""
        return self.good.total() / self.seconds / NUM_GPUS


def run(variant: Variant, limits: Limits, arrivals: Sequence[Arrival], seed: int) -> RunResult:
    """Simulate a load, and count the requests that keep the limits."""
    outcome = simulate(deployment(variant, limits.itl_s), arrivals, seed)
    return _counted(outcome, limits.slo)


def run_oracle(
    best: Sequence[Variant], limits: Limits, arrivals: Sequence[Arrival], seed: int
) -> RunResult:
    """Simulate each part of a load alone, with the variant that is the best one for it.

    It stands for workers that change their roles at once and at no cost: no part has requests of
    the one before.
    """
    total = Counter[Shape]()
    good = Counter[Shape]()
    for shape, variant in zip(SHAPES, best, strict=True):
        of_part = [one for one in arrivals if _shape(one) == shape]
        result = run(variant, limits, of_part, seed)
        total += result.total
        good += result.good
    return RunResult(total, good, arrivals[-1].at_s - arrivals[0].at_s)


def deployment(variant: Variant, itl_s: float) -> SimulatedDeployment:
    """Return what is simulated."""
    constants = find_constants(known_constants(), MODEL, "vllm", "h200")
    comparison = Comparison(MODEL, constants, NUM_GPUS, {})
    topology = variant.topology or WorkerCounts(aggregated=NUM_GPUS)
    data = comparison.deployment(topology)
    if variant.topology is None:
        for worker in data["workers"]:
            worker["disaggregation_mode"] = Role.ELASTIC.value
    frontend: dict[str, Any] = {"router-mode": variant.mode}
    if variant.mode == "slo":
        frontend |= {"slo-ttft-ms": 1000 * TTFT_S, "slo-itl-ms": 1000 * itl_s}
    data["frontend"] |= frontend
    simulated = simulated_deployment(
        checked_deployment(data, str(topology)), [constants], constants.gpu
    )
    limits = TimeLimits(TTFT_S, itl_s) if variant.has_planner else None
    return replace(simulated, planner=limits)


def load(parts: Sequence[Part], seconds: float, seed: int, ramp_s: float) -> list[Arrival]:
    """Return the requests of all parts in the order of their arrival.

    Args:
        parts: shape and rate of each part.
        seconds: how long each part lasts.
        seed: the seed of the times.
        ramp_s: the seconds in which a part turns into the next one. 0: it does so at once.
    """
    source = Random(seed)
    arrivals: list[Arrival] = []
    for number, part in enumerate(parts):
        is_first = number == 0
        is_last = number == len(parts) - 1
        begin_s = number * seconds - (0.0 if is_first else ramp_s / 2)
        end_s = (number + 1) * seconds + (0.0 if is_last else ramp_s / 2)
        times_s: list[float] = []
        for after_s in poisson_times(part.rate, end_s - begin_s, source):
            at_s = begin_s + after_s
            # The share of its rate that a part has at this time: less than 1 on a ramp.
            rising = 1.0 if is_first or not ramp_s else (at_s - begin_s) / ramp_s
            falling = 1.0 if is_last or not ramp_s else (end_s - at_s) / ramp_s
            if source.random() < min(rising, falling):
                times_s.append(at_s)
        # Prompts of different parts have nothing in common.
        offset = len(arrivals)
        arrivals += [
            one._replace(blocks=tuple(block + offset for block in one.blocks))
            for one in arrivals_at(part.shape, times_s)
        ]
    return sorted(arrivals, key=_arrival_s)


def sustains(
    variant: Variant, limits: Limits, part: Part, seconds: float, least_kept: float
) -> bool:
    """Return whether a variant keeps the limits of enough requests of one shape.

    The load lasts for twice the seconds. Requests of the first half fill the batches, and do not
    count.
    """
    arrivals = arrivals_at(part.shape, list(poisson_times(part.rate, 2 * seconds, Random(0))))
    outcome = simulate(deployment(variant, limits.itl_s), arrivals, 0)
    counted = [limits.slo.is_met(one) for one in outcome.requests if one.arrived_s >= seconds]
    return sum(counted) >= least_kept * len(counted)


def _counted(outcome: Outcome, slo: Slo) -> RunResult:
    requests = outcome.requests
    missed = [request for request in requests if not slo.is_met(request)]
    return RunResult(
        total=Counter(map(_shape_of, requests)),
        good=Counter(_shape_of(one) for one in requests if slo.is_met(one)),
        seconds=requests[-1].arrived_s - requests[0].arrived_s,
        changes=outcome.num_share_changes,
        misses=Counter((_shape_of(one), cause) for one in missed for cause in _causes(one, slo)),
    )


def _causes(request: SimulatedRequest, slo: Slo) -> Iterator[str]:
    """Yield why a request has missed its limits."""
    if request.error:
        yield request.error
        return
    path = request.path or "pair"
    if request.ttft_s > slo.ttft_s:
        yield f"first token: {_longest_wait(request)}"
    if request.mean_gap_s > slo.mean_gap_s or request.worst_gap_s > slo.worst_gap_s:
        yield f"gaps: {path}"


def _longest_wait(request: SimulatedRequest) -> str:
    """Return for what a request has waited longest before its first token."""
    queued_s = request.begun_s - request.arrived_s
    computed_s = request.computed_s if math.isfinite(request.computed_s) else request.first_s
    waits_s = {
        "frontend queue": queued_s,
        "prompt": computed_s - request.begun_s,
        "decode": request.first_s - computed_s,
    }
    return max(waits_s, key=waits_s.__getitem__)


def _shape(arrival: Arrival) -> Shape:
    return Shape(arrival.input_tokens, arrival.output_tokens)


def _shape_of(request: SimulatedRequest) -> Shape:
    return Shape(request.input_tokens, request.wanted_tokens)


def _arrival_s(arrival: Arrival) -> float:
    return arrival.at_s
