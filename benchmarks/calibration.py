"""Compares simulations with measurements on GPUs, and fits the constants of simulations to some.

    python -m benchmarks.calibration errors
    python -m benchmarks.calibration errors --constants open-loop-1gpu.yaml
    python -m benchmarks.calibration fit vllm 0.24.0

errors: how far the packaged constants are off on each measured cell, in percent of the measured
value, with medians of the cells that were fitted and of the others. With --constants, those of a
file of `dynamo-trtllm profile`, which was fitted to no cell. In an open loop that is not saturated,
throughput is what was sent; of a saturated one, only that counts: `sat` has the measured and the
simulated answer.

fit: prints coefficients of steps for `dynamo_trtllm/simulate/constants.yaml`, from which it begins.

Cells are open loops of `benchmarks.gpu.open_loop` on H200: gpt-oss-120b's architecture, random
weights. The simulation has the same arrivals. Points of InferenceX are closed loops on H200, as
published, with lengths between 0.8 and 1 times the named ones; ten requests for each that runs at
once, of which the first begin together.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import msgspec
import numpy as np

from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.config.text_table import format_table
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.simulate.cluster import SimulatedDeployment, simulate, simulate_closed_loop
from dynamo_trtllm.simulate.constants import Constants, find_constants, known_constants
from dynamo_trtllm.simulate.deployments import as_mock
from dynamo_trtllm.simulate.outcomes import Outcome
from dynamo_trtllm.simulate.topologies import WorkerCounts
from dynamo_trtllm.simulate.workload import Shape, arrivals_at

from .load_client import Load, arrival_times

_RESULTS: Final = Path(__file__).parent / "results"
_SEED: Final = 7  # of the arrivals of `benchmarks.gpu.open_loop`
_MODEL: Final = "gpt-oss-120b"
_GPU: Final = "h200"
_TOPOLOGIES: Final[Mapping[str, WorkerCounts]] = {
    "2A": WorkerCounts(aggregated=2),
    "1A": WorkerCounts(aggregated=1),
    "A triton sampler": WorkerCounts(aggregated=1),
    "1P1D": WorkerCounts(prefill=1, decode=1),
}
# File, topology, shape and rate of the cells that are fitted.
_FITTED: Final = frozenset(
    {
        ("11-28-2gpu-1P1D-block16", "1P1D", "8192/256", 2.0),
        ("11-28-2gpu-1P1D-block16", "1P1D", "2000/600", 4.0),
        ("11-28-2gpu-1P1D-block128", "1P1D", "8192/256", 2.0),
        ("11-28-2gpu-2A-and-vllm-router", "2A", "8192/256", 2.0),
        ("11-28-2gpu-vllm033", "A triton sampler", "128/256", 24.0),
        ("11-28-2gpu-vllm033", "1P1D", "8192/256", 2.0),
        ("11-29-2gpu-vllm033-again", "1A", "8192/256", 2.0),
    }
)
# The constants of vLLM 0.26 are fitted to the steps of the first run's loads, see `constants.yaml`.
# Later runs repeat these loads, so their cells are no predictions of these constants either.
_STEPS_FITTED: Final = tuple(
    f"11-29-1gpu-vllm026{run}" for run in ("", "-again", "-third", "-fourth")
)
# Parts of the names of files whose steps had 8,192 tokens, see docs/performance-gpu.md. Those of
# others had 16,384.
_STEPS_8192: Final = ("steps-8192", "vllm026-block16", "vllm033", "1gpu")
# Runs with a setting that the constants do not know: another layout of KV, an early notice.
_LEFT_OUT: Final = ("early-notice", "rows", "no-ipc-cache")
_INFERENCEX: Final = _RESULTS / "inferencex-h200-gpt-oss-120b.json"
_LEAST_PART: Final = 0.8  # of the lengths of InferenceX
_REQUESTS_PER_LANE: Final = 10
_PROBE: Final = 1.08  # by which a coefficient changes to see what depends on it
_RIDGE: Final = 0.05
_MAX_CHANGE: Final = 0.5  # of the logarithm of a coefficient, in one round
# Coefficients of steps that are fitted: the kind of steps, and terms that change together.
_TERMS: Final[Sequence[tuple[str, Sequence[int]]]] = (
    ("decode", (0,)),
    ("decode", (1,)),
    ("decode", (2,)),
    ("decode", (3,)),
    ("prefill", (0,)),
    ("prefill", (1, 2, 3)),
    ("prefill", (4, 5)),
    ("prefill", (6,)),
    ("prefill", (7,)),
)
# Those that a few points of one shape determine.
_TERMS_OF_ONE_SHAPE: Final[Sequence[tuple[str, Sequence[int]]]] = (
    ("decode", (0,)),
    ("decode", (1,)),
    ("prefill", (0,)),
    ("prefill", (1, 2, 3, 4, 5, 6)),
)


@dataclass(frozen=True, kw_only=True)
class MeasuredCell:
    """A measured load. Times are in ms."""

    name: str
    engine: str
    topology: WorkerCounts
    shape: Shape
    num_requests: int
    figures: Mapping[str, float]  # by name, as `simulated_figures` returns them
    rate: float = 0.0  # of an open loop
    concurrency: int = 0  # of a closed loop
    arguments: Mapping[str, Any] = field(default_factory=dict)  # flags of the workers
    is_fitted: bool = False
    version: str = ""  # release of the engine
    gpus_per_worker: int = 1
    is_saturated: bool | None = None  # None: not known

    def is_of(self, constants: Constants) -> bool:
        """Return whether constants are those of the engine and the GPUs of this cell."""
        return constants.is_of(_MODEL, self.engine, _GPU, self.version, self.gpus_per_worker)


def all_cells() -> list[MeasuredCell]:
    """Return all cells."""
    return [*open_loop_cells(), *closed_loop_cells()]


def open_loop_cells() -> Iterator[MeasuredCell]:
    """Yield the cells of one and two H200, in the order of their files."""
    for path in sorted(_RESULTS.glob("open-loop-2026-11-2[89]-[12]gpu-*.json")):
        label = path.stem.removeprefix("open-loop-2026-")
        if any(word in label for word in _LEFT_OUT):
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        version = result["versions"]["vllm"]
        default_block = 16 if version == "0.24.0" else 128
        block = result["setup"]["engine_arguments"].get("block_size", default_block)
        step = 8192 if any(word in label for word in _STEPS_8192) else 16384
        for cell in result["cells"]:
            topology = _TOPOLOGIES.get(cell["topology"])
            if topology is None:
                continue
            shape = Shape(cell["input_tokens"], cell["output_tokens"])
            rate = float(cell["requests_per_s"])
            is_in_fit = (label, cell["topology"], str(shape), rate) in _FITTED
            yield MeasuredCell(
                name=f"{label} {cell['topology']} {shape} {rate:g}/s",
                engine="vllm",
                topology=topology,
                shape=shape,
                num_requests=cell["requests"],
                figures={
                    "ttft_p50": cell["ttft_ms"]["p50"],
                    "ttft_p90": cell["ttft_ms"]["p90"],
                    "tpot_p50": cell["tpot_ms"]["p50"],
                    "tpot_p90": cell["tpot_ms"]["p90"],
                    "gap_p50": cell["worst_gap_ms"]["p50"],
                    "gap_p99": cell["worst_gap_ms"]["p99"],
                },
                rate=rate,
                arguments={"kv_block_size": block, "max_num_tokens": step},
                is_fitted=is_in_fit or label in _STEPS_FITTED,
                version=version,
                is_saturated=cell.get("is_saturated"),
            )


def closed_loop_cells() -> Iterator[MeasuredCell]:
    """Yield the points of InferenceX."""
    for point in json.loads(_INFERENCEX.read_text(encoding="utf-8"))["points"]:
        engine = point["engine"]
        concurrency = point["concurrency"]
        shape = Shape(point["input_tokens"], point["output_tokens"])
        num_gpus = point["gpus"]
        yield MeasuredCell(
            name=f"InferenceX {engine} 1A@{num_gpus} {shape} c{concurrency}",
            version=point["version"],
            engine=engine,
            topology=WorkerCounts(aggregated=1),
            shape=shape,
            num_requests=_REQUESTS_PER_LANE * concurrency,
            figures={"ttft_mean": point["ttft_ms"], "tpot_mean": point["tpot_ms"]},
            concurrency=concurrency,
            arguments={"max_batch_size": concurrency},
            is_fitted=point["is_fitted"],
            gpus_per_worker=num_gpus,
        )


def simulated(cell: MeasuredCell, constants: Constants) -> Outcome:
    """Return the outcome of a simulation of a cell."""
    counts = {
        Role.AGGREGATED: cell.topology.aggregated,
        Role.PREFILL: cell.topology.prefill,
        Role.DECODE: cell.topology.decode,
    }
    workers = [
        as_mock(
            WorkerConfig(model_path=_MODEL, disaggregation_mode=role, **cell.arguments), constants
        )
        for role, count in counts.items()
        for _ in range(count)
    ]
    deployment = SimulatedDeployment(
        frontend=FrontendConfig(),
        workers=workers,
        num_gpus=len(workers),
        frontend_s=constants.frontend_ms / 1000,
    )
    if cell.concurrency:
        return simulate_closed_loop(
            deployment,
            cell.shape,
            cell.concurrency,
            cell.num_requests,
            least_part=_LEAST_PART,
        )
    times_s = arrival_times(Load(url="http://localhost", model="", rate=cell.rate, seed=_SEED))
    arrivals = arrivals_at(cell.shape, [next(times_s) for _ in range(cell.num_requests)])
    return simulate(deployment, arrivals)


def figures_of(cell: MeasuredCell, outcome: Outcome) -> dict[str, float]:
    """Return what a simulation of a cell has, by the names of the measured figures."""
    if cell.concurrency:
        return {
            "ttft_mean": 1000 * fmean(request.ttft_s for request in outcome.completed),
            "tpot_mean": 1000 * fmean(request.mean_gap_s for request in outcome.completed),
        }
    figures = outcome.figures()
    return {
        "ttft_p50": figures["ttft_ms"]["p50"],
        "ttft_p90": figures["ttft_ms"]["p90"],
        "tpot_p50": figures["tpot_ms"]["p50"],
        "tpot_p90": figures["tpot_ms"]["p90"],
        "gap_p50": figures["worst_gap_ms"]["p50"],
        "gap_p99": figures["worst_gap_ms"]["p99"],
    }


def errors_of(cell: MeasuredCell, outcome: Outcome) -> dict[str, float]:
    """Return by figure how far the simulation is off, as part of the measured value."""
    found = figures_of(cell, outcome)
    return {name: found[name] / measured - 1 for name, measured in cell.figures.items()}


# --- errors ---------------------------------------------------------------------------------------


def show_errors(args: argparse.Namespace) -> None:
    """Print the errors of all cells, and their medians."""
    known = known_constants(args.constants)
    if args.constants is not None:
        known = known[:1]
    for cells in (list(open_loop_cells()), list(closed_loop_cells())):
        names = list(cells[0].figures)
        rows = [("cell", "", *names, "sat")]
        found: dict[tuple[str, str], list[dict[str, float]]] = {}
        for cell in cells:
            constants = next((one for one in known if cell.is_of(one)), None)
            if constants is None:
                continue
            outcome = simulated(cell, constants)
            errors = errors_of(cell, outcome)
            is_fitted = cell.is_fitted and args.constants is None
            kind = "fitted" if is_fitted else "predicted"
            saturated = _saturation(cell, outcome)
            if not cell.is_saturated:
                engine = f"{cell.engine} {constants.versions[0]}"
                found.setdefault((engine, kind), []).append(errors)
            values = (f"{100 * errors[name]:+.0f}" for name in names)
            rows.append((cell.name, kind, *values, saturated))
        for (engine, kind), each in found.items():
            medians = [median(abs(errors[name]) for errors in each) for name in names]
            title = f"median of {len(each)}, {engine}"
            rows.append((title, kind, *(f"{100 * value:.0f}" for value in medians), ""))
        sys.stdout.write(format_table(rows) + "\n")


def _saturation(cell: MeasuredCell, outcome: Outcome) -> str:
    """Return whether a cell was saturated, as measured and as simulated."""
    words = {None: "?", True: "yes", False: "no"}
    return "" if cell.concurrency else f"{words[cell.is_saturated]}/{words[outcome.is_saturated]}"


# --- fit ------------------------------------------------------------------------------------------


def fit(args: argparse.Namespace) -> None:
    """Print the coefficients of steps with less error on the fitted cells of an engine.

    Each round computes how each residual changes with each coefficient, and solves for the change
    of all that makes the residuals least (Gauss-Newton, with a ridge that keeps the change small).
    """
    constants = find_constants(
        known_constants(), _MODEL, args.engine, _GPU, args.version, args.gpus
    )
    cells = [cell for cell in all_cells() if cell.is_of(constants) and cell.is_fitted]
    terms_to_fit = _TERMS_OF_ONE_SHAPE if cells[0].concurrency else _TERMS
    residuals = _residuals(cells, constants)
    for number in range(args.rounds):
        columns = [
            (_residuals(cells, _scaled(constants, terms, _PROBE)) - residuals) / math.log(_PROBE)
            for terms in terms_to_fit
        ]
        jacobian = np.array(columns).T
        ridge = _RIDGE * np.eye(len(terms_to_fit))
        change = np.linalg.solve(jacobian.T @ jacobian + ridge, -jacobian.T @ residuals)
        for terms, log_factor in zip(
            terms_to_fit, np.clip(change, -_MAX_CHANGE, _MAX_CHANGE), strict=True
        ):
            constants = _scaled(constants, terms, math.exp(log_factor))
        residuals = _residuals(cells, constants)
        mean_error = math.sqrt(float(np.mean(residuals**2)))
        print(f"round {number + 1}: {100 * mean_error:.1f} %", file=sys.stderr, flush=True)
    print(json.dumps(constants.mock["step_costs"]))


def _residuals(cells: Sequence[MeasuredCell], constants: Constants) -> Any:
    """Return the logarithms of simulated to measured values.

    Gaps do not count: whether they are predicted is a test of the rest.
    """
    found: list[float] = []
    for cell in cells:
        figures = figures_of(cell, simulated(cell, constants))
        found += [
            math.log(figures[name] / measured)
            for name, measured in cell.figures.items()
            if not name.startswith("gap")
        ]
    return np.array(found)


def _scaled(constants: Constants, terms: tuple[str, Sequence[int]], factor: float) -> Constants:
    """Return constants of which some coefficients of one kind of steps are multiplied."""
    kind, indexes = terms
    costs = {name: list(values) for name, values in constants.mock["step_costs"].items()}
    for index in indexes:
        costs[kind][index] *= factor
    return msgspec.structs.replace(constants, mock={**constants.mock, "step_costs": costs})


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calibration",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    errors = commands.add_parser("errors", help="of the packaged constants")
    errors.add_argument("--constants", type=Path, help="file of dynamo-trtllm profile")
    errors.set_defaults(run=show_errors)
    fitting = commands.add_parser("fit", help="constants to the fitted cells")
    fitting.add_argument("engine", help="vllm or trtllm")
    fitting.add_argument("version", help="release, as in the constants")
    fitting.add_argument("--gpus", type=int, default=1, help="of a worker")
    fitting.add_argument("--rounds", type=int, default=2)
    fitting.set_defaults(run=fit)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
