"""Compare router modes under a load that changes, in virtual time.

    python -m benchmarks.slo_paths

The load has four parts of --seconds each, with other lengths of prompts and answers. Workers are
simulated with constants of gpt-oss-120b on H200 with vLLM (docs/simulate.md). Each row is a
topology and a router mode, over --seeds simulations:

  good          share of the requests with a first token within 2 s and no gap above --itl-ms;
                of all, and of each part
  goodput       such requests per second and GPU
  ttft, gap     p50 and p99 of the time to first token, and of the longest gap, in ms
  paths         choices of each path in percent: pair, on a decode, and on a prefill worker
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from statistics import mean
from typing import Any, Final, NamedTuple

from dynamo_trtllm.config.deployment import checked_deployment
from dynamo_trtllm.config.text_table import format_table
from dynamo_trtllm.frontend.routing.path_selection import Path
from dynamo_trtllm.simulate.cluster import SimulatedDeployment, simulate
from dynamo_trtllm.simulate.constants import find_constants, known_constants
from dynamo_trtllm.simulate.deployments import simulated_deployment
from dynamo_trtllm.simulate.outcomes import Outcome, SimulatedRequest, Slo, quantile
from dynamo_trtllm.simulate.topologies import Comparison, WorkerCounts
from dynamo_trtllm.simulate.workload import Arrival, Shape, arrivals_at

_MODEL: Final = "gpt-oss-120b"
_NUM_GPUS: Final = 4
_TTFT_S: Final = 2.0
_SHOWN_PATHS: Final = (Path.PREFILL_DECODE, Path.ON_DECODE, Path.ON_PREFILL)


class Part(NamedTuple):
    """A part of the schedule."""

    shape: Shape
    rate: float  # requests per second


# Long prompts need prefill workers, and long answers more than one or two decode workers.
SCHEDULE: Final = (
    Part(Shape(8192, 128), 8.0),
    Part(Shape(1024, 512), 40.0),
    Part(Shape(512, 2048), 16.0),
    Part(Shape(8192, 1024), 6.0),
)
MODES: Final = ("round-robin", "kv", "slo")
FIXED: Final = {
    "4A": WorkerCounts(aggregated=4),
    "3P1D": WorkerCounts(prefill=3, decode=1),
    "2P2D": WorkerCounts(prefill=2, decode=2),
    "1P3D": WorkerCounts(prefill=1, decode=3),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slo_paths",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--topologies", nargs="+", choices=list(FIXED), default=["2P2D", "3P1D"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part")
    parser.add_argument("--seeds", type=int, default=1, help="number of simulations of a row")
    parser.add_argument("--itl-ms", type=float, default=100.0)
    arguments = parser.parse_args()
    slo = Slo(ttft_s=_TTFT_S, worst_gap_s=arguments.itl_ms / 1000)
    compare(arguments, slo)


def compare(arguments: argparse.Namespace, slo: Slo) -> None:
    """Print a row per topology and router mode."""
    rows = []
    for name in arguments.topologies:
        for mode in arguments.modes:
            outcomes = [
                simulate(
                    deployment(FIXED[name], mode, slo), schedule(arguments.seconds, seed), seed
                )
                for seed in range(1, arguments.seeds + 1)
            ]
            rows.append([name, mode, *_cells(outcomes, slo)])
    shapes = [f"good {part.shape}" for part in SCHEDULE]
    heads = ["topology", "mode", "good", *shapes, "goodput", "ttft p50", "p99", "gap p50", "p99"]
    print(format_table([[*heads, "paths"], *rows]))


def deployment(topology: WorkerCounts, mode: str, slo: Slo) -> SimulatedDeployment:
    """Return what is simulated."""
    constants = find_constants(known_constants(), _MODEL, "vllm", "h200")
    comparison = Comparison(_MODEL, constants, _NUM_GPUS, {})
    data = comparison.deployment(topology)
    frontend: dict[str, Any] = {"router-mode": mode}
    if mode == "slo":
        frontend |= {"slo-ttft-ms": 1000 * slo.ttft_s, "slo-itl-ms": 1000 * slo.worst_gap_s}
    data["frontend"] |= frontend
    return simulated_deployment(checked_deployment(data, str(topology)), [constants], "h200")


def schedule(seconds: float, seed: int, parts: Sequence[Part] = SCHEDULE) -> list[Arrival]:
    """Return the requests of all parts, each of which takes some seconds."""
    source = Random(seed)
    arrivals: list[Arrival] = []
    for number, part in enumerate(parts):
        times_s = [number * seconds + at_s for at_s in poisson_times(part.rate, seconds, source)]
        # Prompts of different parts have nothing in common.
        offset = len(arrivals)
        arrivals += [
            one._replace(blocks=tuple(block + offset for block in one.blocks))
            for one in arrivals_at(part.shape, times_s)
        ]
    return arrivals


def poisson_times(rate: float, seconds: float, source: Random) -> Iterator[float]:
    """Yield random times of requests within some seconds."""
    at_s = source.expovariate(rate)
    while at_s < seconds:
        yield at_s
        at_s += source.expovariate(rate)


def _cells(outcomes: Sequence[Outcome], slo: Slo) -> list[str]:
    """Return the figures of a row."""
    requests = [request for outcome in outcomes for request in outcome.requests]
    good = mean(outcome.attainment(slo) for outcome in outcomes)
    cells = [f"{good:.1%}"]
    for part in SCHEDULE:
        of_part = [one for one in requests if _is_of(one, part)]
        cells.append(f"{mean(map(slo.is_met, of_part)):.1%}")
    cells.append(f"{mean(outcome.goodput_per_gpu(slo) for outcome in outcomes):.2f}")
    answered = [request for request in requests if request.is_ok]
    for times_s in (
        [request.ttft_s for request in answered],
        [request.worst_gap_s for request in answered],
    ):
        cells += [f"{1000 * quantile(times_s, share):.0f}" for share in (0.5, 0.99)]
    paths = Counter(request.path for request in requests)
    shares = [100 * paths[path] / len(requests) for path in _SHOWN_PATHS]
    cells.append("/".join(f"{share:.0f}" for share in shares) if any(shares) else "")
    return cells


def _is_of(request: SimulatedRequest, part: Part) -> bool:
    """Return whether a request is of a part of the schedule, by the lengths of its shape."""
    if request.input_tokens != part.shape.input_tokens:
        return False
    return request.wanted_tokens == part.shape.output_tokens


if __name__ == "__main__":
    main()
