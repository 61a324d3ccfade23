"""Compares elastic workers and a planner with fixed topologies, in virtual time.

    python -m benchmarks.elastic_planner

The load has four parts of --seconds each, with other lengths of prompts and answers, at the rates
of PLANS. A rate is 0.8 of the highest one at which some fixed topology keeps the limits for 90% of
the requests of this part; --find-rates finds them again. Four workers are simulated with constants
of gpt-oss-120b on H200 with vLLM (docs/simulate.md). Each row is a topology and a router mode, over
--seeds simulations:

  good          share of the requests that keep the limits: of all, and of each part
  goodput       such requests per second and GPU
  changes       changes of shares per simulation

The row "oracle" runs each part alone, on the topology that is the best one for it. Below the table
are the ratios of the planner's goodput to those of the best fixed row and of the oracle, with
intervals of 95% over the simulations. --misses prints why requests miss their
limits. --steady runs each part alone, for ten times --seconds.

Limits are a first token within 2 s, and with --limits mean a mean time between tokens of 25 ms,
with --limits worst no time between tokens above 100 ms.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import NormalDist, mean, stdev
from typing import Final, NamedTuple

from dynamo_trtllm.config.text_table import format_table
from dynamo_trtllm.simulate.workload import Shape

from .elastic_runs import (
    LIMITS,
    RAMP_S,
    SHAPES,
    RunResult,
    Variant,
    load,
    run,
    run_oracle,
    sustains,
    variants,
)
from .slo_paths import Part

ORACLE: Final = "oracle"
_PART_OF_BEST: Final = 0.8  # the rate of the load, as a fraction of the highest rate
_KEPT: Final = 0.9  # share of the requests that keep the limits at the best rate
_RATE_FACTOR: Final = 1.25  # the search for a rate begins with steps of this factor
_RATE_HALVINGS: Final = 2
_SHARE_OF_INTERVAL: Final = 0.95
_STEADY_PARTS: Final = 10  # a steady load lasts for as many times the seconds of a part


class Plan(NamedTuple):
    """A part of the load with some limits."""

    best: str  # the fixed row that sustains the highest rate
    highest: float  # that rate, in requests per second

    @property
    def rate(self) -> float:
        """Return the rate of the load."""
        return _PART_OF_BEST * self.highest


# In the order of SHAPES. They were found with --find-rates, or with single runs at rates near the
# highest one.
PLANS: Final[Mapping[str, Sequence[Plan]]] = {
    "mean": (
        Plan("3P1D slo", 9.18),
        Plan("1P3D least-loaded", 9.79),
        Plan("4A least-loaded", 3.57),
        Plan("1P3D least-loaded", 4.08),
    ),
    "worst": (
        Plan("3P1D slo", 14.2),
        Plan("1P3D slo", 37),
        Plan("1P3D slo", 10.5),
        Plan("2P2D least-loaded", 5.47),
    ),
}


class Job(NamedTuple):
    """One simulation of a row."""

    row: str
    seed: int


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.elastic_planner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--limits", choices=list(LIMITS), default="worst")
    parser.add_argument("--schedule", choices=("steps", "ramps"), default="steps")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each part")
    parser.add_argument("--seeds", type=int, default=3, help="number of simulations of a row")
    parser.add_argument("--first-seed", type=int, default=101)
    parser.add_argument("--rows", nargs="+", help="rows, such as '2P2D slo'; default: all")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--misses", action="store_true", help="print why requests miss limits")
    parser.add_argument("--steady", action="store_true", help="run each part alone")
    parser.add_argument("--find-rates", action="store_true", help="print the rates, and end")
    parser.add_argument("--shapes", nargs="+", help="of --steady and --find-rates; default: all")
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.processes) as pool:
        if arguments.find_rates:
            find_rates(arguments, pool)
        elif arguments.steady:
            compare_steady(arguments, pool)
        else:
            compare(arguments, pool)


def find_rates(arguments: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
    """Print for each shape the highest rate, and the fixed row that sustains it."""
    plans = enumerate(PLANS[arguments.limits])
    searched = [(number, plan) for number, plan in plans if _is_shape_asked(arguments, number)]
    print(format_table([["shape", "best", "highest rate", "rate of the load"]]).rstrip())
    search = partial(_highest_rate, arguments)
    for (number, _), (best, highest) in zip(searched, pool.map(search, searched), strict=True):
        rate = _PART_OF_BEST * highest
        row = [str(SHAPES[number]), best, f"{highest:.2f}", f"{rate:.2f}"]
        print(format_table([row]).rstrip(), flush=True)


def _highest_rate(arguments: argparse.Namespace, numbered: tuple[int, Plan]) -> tuple[str, float]:
    """Return the fixed row that sustains the highest rate of a shape, and that rate.

    The row of the plan is first. Another row is searched only if it sustains a clearly higher rate
    than those before it.
    """
    number, plan = numbered
    limits = LIMITS[arguments.limits]
    rows = {name: row for name, row in variants().items() if row.topology is not None}
    best = plan.best
    highest = 0.0
    others = [name for name in rows if name != plan.best and _is_row_asked(arguments, name)]
    for name in (plan.best, *others):

        def is_kept(rate: float, row: Variant = rows[name]) -> bool:
            return sustains(row, limits, Part(SHAPES[number], rate), arguments.seconds, _KEPT)

        if not highest:
            start = plan.highest
        else:
            start = 1.02 * highest
            if not is_kept(start):
                continue
        best = name
        highest = _searched(is_kept, start)
    return best, highest


def _searched(is_kept: Callable[[float], bool], rate: float) -> float:
    """Return about the highest rate that is kept.

    Args:
        is_kept: returns whether the limits are kept at a rate.
        rate: where the search begins.
    """
    # Steps of a large factor find a rate that is kept below one that is not.
    if is_kept(rate):
        while is_kept(rate * _RATE_FACTOR):
            rate *= _RATE_FACTOR
    else:
        while not is_kept(rate / _RATE_FACTOR):
            rate /= _RATE_FACTOR
        rate /= _RATE_FACTOR
    # Smaller and smaller steps then come near the highest one.
    factor = _RATE_FACTOR
    for _ in range(_RATE_HALVINGS):
        factor **= 0.5
        if is_kept(rate * factor):
            rate *= factor
    return rate


def compare(arguments: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
    """Print a row per topology and router mode, and the ratios."""
    rows = [name for name in (*variants(), ORACLE) if _is_row_asked(arguments, name)]
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    jobs = [Job(row, seed) for row in rows for seed in seeds]
    found = pool.map(partial(_simulated, arguments), jobs)
    heads = ["row", "good", *(f"good {shape}" for shape in SHAPES), "goodput", "changes"]
    print(format_table([heads]).rstrip())
    results: dict[str, list[RunResult]] = {}
    for row in rows:
        results[row] = [next(found) for _ in seeds]
        print(format_table([[row, *_cells(results[row])]]).rstrip(), flush=True)
        if arguments.misses:
            _print_misses(results[row])
    print("\n".join(_ratios(results)))


def _simulated(arguments: argparse.Namespace, job: Job) -> RunResult:
    plans = PLANS[arguments.limits]
    limits = LIMITS[arguments.limits]
    ramp_s = RAMP_S if arguments.schedule == "ramps" else 0.0
    parts = [Part(shape, plan.rate) for shape, plan in zip(SHAPES, plans, strict=True)]
    arrivals = load(parts, arguments.seconds, job.seed, ramp_s)
    if job.row == ORACLE:
        best = [variants()[plan.best] for plan in plans]
        return run_oracle(best, limits, arrivals, job.seed)
    return run(variants()[job.row], limits, arrivals, job.seed)


def compare_steady(arguments: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
    """Print for each shape the planner, and the best fixed row at the same steady load."""
    seconds = _STEADY_PARTS * arguments.seconds
    print(format_table([["shape", "row", "good", "goodput", "changes"]]).rstrip())
    for number, plan in enumerate(PLANS[arguments.limits]):
        if not _is_shape_asked(arguments, number):
            continue
        arrivals = load([Part(SHAPES[number], plan.rate)], seconds, arguments.first_seed, 0.0)
        limits = LIMITS[arguments.limits]
        rows = arguments.rows or ["4E+planner slo", plan.best]
        found = pool.map(
            run,
            [variants()[row] for row in rows],
            *([value] * len(rows) for value in (limits, arrivals, arguments.first_seed)),
        )
        for row, result in zip(rows, found, strict=True):
            cells = [f"{result.attainment:.1%}", f"{result.goodput:.2f}", str(result.changes)]
            print(format_table([[str(SHAPES[number]), row, *cells]]).rstrip(), flush=True)
            if arguments.misses:
                _print_misses([result])


def _is_shape_asked(arguments: argparse.Namespace, number: int) -> bool:
    return not arguments.shapes or str(SHAPES[number]) in arguments.shapes


def _is_row_asked(arguments: argparse.Namespace, name: str) -> bool:
    return not arguments.rows or name in arguments.rows


def _cells(results: Sequence[RunResult]) -> list[str]:
    """Return the figures of a row."""
    total = sum((result.total for result in results), Counter[Shape]())
    good = sum((result.good for result in results), Counter[Shape]())
    return [
        f"{good.total() / total.total():.1%}",
        *(f"{good[shape] / total[shape]:.1%}" for shape in SHAPES),
        f"{mean(result.goodput for result in results):.2f}",
        f"{mean(result.changes for result in results):.1f}",
    ]


def _print_misses(results: Sequence[RunResult]) -> None:
    """Print which part of the requests of each shape has missed its limits, by the cause."""
    total = sum((result.total for result in results), Counter[Shape]())
    misses = sum((result.misses for result in results), Counter[tuple[Shape, str]]())
    for (shape, cause), count in misses.most_common():
        print(f"    {shape}: {count / total[shape]:.1%} {cause}")


def _ratios(results: Mapping[str, Sequence[RunResult]]) -> Iterator[str]:
    """Yield the ratios of the planner's goodput to those of the best fixed row and the oracle."""
    # Names such as "2P2D slo" and "4A slo", but not "4E+planner slo" or the oracle.
    fixed = [name for name in results if name[0].isdigit() and name[1] != "E"]
    best = max(fixed, key=lambda name: mean(one.goodput for one in results[name]), default="")
    for name, of_row in results.items():
        if "planner" not in name:
            continue
        for other in (best, ORACLE):
            if other in results:
                pairs = zip(of_row, results[other], strict=True)
                ratios = [one.goodput / two.goodput for one, two in pairs]
                yield f"{name} / {other}: {_interval(ratios)}"


def _interval(values: Sequence[float]) -> str:
    """Return the mean of some values, and the interval in which it is expected."""
    if len(values) < 2:
        return f"{mean(values):.2f}"
    factor = NormalDist().inv_cdf((1 + _SHARE_OF_INTERVAL) / 2)
    half = factor * stdev(values) / len(values) ** 0.5
    return f"{mean(values):.2f} (± {half:.2f})"


if __name__ == "__main__":
    main()
