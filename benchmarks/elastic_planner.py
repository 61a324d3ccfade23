"""Compares elastic workers and a planner with fixed topologies, in virtual time.

    python -m benchmarks.elastic_planner

The load has four parts of --seconds each, with other lengths of prompts and answers, at --rates.
--find-rates prints 0.8 of the highest rates at which a fixed topology keeps the limits for 90% of
the requests of a part. Four workers are simulated with constants of gpt-oss-120b on
H200 with vLLM (docs/simulate.md). Each row is a topology and a router mode, over --seeds
simulations:

  good          share of the requests that keep the limits: of all, and of each part
  goodput       such requests per second and GPU
  changes       of shares, per simulation

Limits are a first token within 2 s, and with --limits mean a mean time between tokens of 25 ms,
with --limits worst no time between tokens above 100 ms.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import mean
from typing import Any, Final, NamedTuple

from dynamo_trtllm.config.deployment import checked_deployment
from dynamo_trtllm.config.text_table import format_table
from dynamo_trtllm.planner.predict import TimeLimits
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.simulate.cluster import SimulatedDeployment, simulate
from dynamo_trtllm.simulate.constants import find_constants, known_constants
from dynamo_trtllm.simulate.deployments import simulated_deployment
from dynamo_trtllm.simulate.outcomes import Outcome, SimulatedRequest, Slo
from dynamo_trtllm.simulate.topologies import Comparison, WorkerCounts
from dynamo_trtllm.simulate.workload import Shape, arrivals_at

from .slo_paths import FIXED, SCHEDULE, Part, poisson_times, schedule

_MODEL: Final = "gpt-oss-120b"
_NUM_GPUS: Final = 4
_TTFT_S: Final = 2.0
_LIMITS: Final = {
    "mean": (Slo(ttft_s=_TTFT_S, mean_gap_s=0.025), 0.025),
    "worst": (Slo(ttft_s=_TTFT_S, worst_gap_s=0.1), 0.1),
}
SHAPES: Final = tuple(part.shape for part in SCHEDULE)
_PART_OF_BEST: Final = 0.8
_KEPT: Final = 0.9  # share of the requests that keep the limits at the best rate
_MAX_RATE: Final = 128.0
_RATE_STEPS: Final = 6  # halvings of the search for a rate


class Variant(NamedTuple):
    """A row: what serves the load."""

    topology: WorkerCounts | None  # None: elastic workers
    mode: str
    has_planner: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.elastic_planner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--limits", choices=list(_LIMITS), default="worst")
    parser.add_argument("--mode", choices=("least-loaded", "kv", "slo"), default="slo")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each part")
    parser.add_argument(
        "--rates",
        nargs=len(SHAPES),
        type=float,
        default=[part.rate for part in SCHEDULE],
        help="requests per second of each part; default: those of slo_paths",
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of simulations of a row")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--rows", nargs="+", help="the rows to print, such as 2P2D; default: all")
    parser.add_argument("--find-rates", action="store_true", help="print the rates, and end")
    arguments = parser.parse_args()
    if arguments.find_rates:
        find_rates(arguments)
    else:
        compare(arguments)


def find_rates(arguments: argparse.Namespace) -> None:
    """Print for each shape the best fixed topology, and the rate of the schedule."""
    rows = []
    for shape in SHAPES:
        best = {
            name: _best_rate(Variant(topology, arguments.mode), shape, arguments)
            for name, topology in FIXED.items()
        }
        rate = _PART_OF_BEST * max(best.values())
        rows.append([str(shape), *(f"{one:.1f}" for one in best.values()), f"{rate:.1f}"])
    print(format_table([["shape", *FIXED, "rate of the schedule"], *rows]))


def _best_rate(variant: Variant, shape: Shape, arguments: argparse.Namespace) -> float:
    """Return the highest rate at which enough requests of a shape keep the limits."""
    slo, itl_s = _LIMITS[arguments.limits]
    deployment = simulated(variant, itl_s)
    low = 0.0
    high = _MAX_RATE
    for _ in range(_RATE_STEPS):
        rate = (low + high) / 2
        times_s = list(poisson_times(rate, arguments.seconds, Random(0)))
        outcome = simulate(deployment, arrivals_at(shape, times_s), 0)
        if outcome.attainment(slo) >= _KEPT:
            low = rate
        else:
            high = rate
    return low


def compare(arguments: argparse.Namespace) -> None:
    """Print a row per topology."""
    slo, itl_s = _LIMITS[arguments.limits]
    variants = {name: Variant(topology, arguments.mode) for name, topology in FIXED.items()}
    variants["4E"] = Variant(None, arguments.mode)
    variants["4E+planner"] = Variant(None, arguments.mode, has_planner=True)
    parts = list(map(Part, SHAPES, arguments.rates))
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    heads = ["topology", "good", *(f"good {shape}" for shape in SHAPES), "goodput", "changes"]
    print(format_table([heads]).rstrip())
    for name, variant in variants.items():
        if arguments.rows and name not in arguments.rows:
            continue
        deployment = simulated(variant, itl_s)
        outcomes = [
            simulate(deployment, schedule(arguments.seconds, seed, parts), seed) for seed in seeds
        ]
        print(format_table([[name, *_cells(outcomes, slo)]]).rstrip(), flush=True)


def simulated(variant: Variant, itl_s: float) -> SimulatedDeployment:
    """Return what is simulated for a row."""
    constants = find_constants(known_constants(), _MODEL, "vllm", "h200")
    comparison = Comparison(_MODEL, constants, _NUM_GPUS, {})
    topology = variant.topology or WorkerCounts(aggregated=_NUM_GPUS)
    data = comparison.deployment(topology)
    if variant.topology is None:
        for worker in data["workers"]:
            worker["disaggregation_mode"] = Role.ELASTIC.value
    frontend: dict[str, Any] = {"router-mode": variant.mode}
    if variant.mode == "slo":
        frontend |= {"slo-ttft-ms": 1000 * _TTFT_S, "slo-itl-ms": 1000 * itl_s}
    data["frontend"] |= frontend
    deployment = simulated_deployment(
        checked_deployment(data, str(topology)), [constants], constants.gpu
    )
    limits = TimeLimits(_TTFT_S, itl_s) if variant.has_planner else None
    return replace(deployment, planner=limits)


def _cells(outcomes: Sequence[Outcome], slo: Slo) -> list[str]:
    """Return the figures of a row."""
    requests = [request for outcome in outcomes for request in outcome.requests]
    cells = [f"{mean(outcome.attainment(slo) for outcome in outcomes):.1%}"]
    for shape in SHAPES:
        of_part = [one for one in requests if _is_of(one, shape)]
        cells.append(f"{mean(map(slo.is_met, of_part)):.1%}")
    cells.append(f"{mean(outcome.goodput_per_gpu(slo) for outcome in outcomes):.2f}")
    cells.append(f"{mean(outcome.num_share_changes for outcome in outcomes):.1f}")
    return cells


def _is_of(request: SimulatedRequest, shape: Shape) -> bool:
    """Return whether a request is of a shape. All answers that are complete have its length."""
    return (request.input_tokens, request.wanted_tokens) == shape


if __name__ == "__main__":
    main()
