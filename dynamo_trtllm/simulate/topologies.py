"""Compare how many requests the topologies of one model keep within limits under one load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final, NamedTuple

from dynamo_trtllm.config.deployment import checked_deployment
from dynamo_trtllm.protocol.counted import counted
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.simulate.cluster import SimulatedDeployment, simulate
from dynamo_trtllm.simulate.constants import Constants, Errors
from dynamo_trtllm.simulate.deployments import simulated_deployment
from dynamo_trtllm.simulate.engine_files import engine_file
from dynamo_trtllm.simulate.outcomes import Outcome, SimulatedRequest, Slo
from dynamo_trtllm.simulate.workload import Shape, poisson_arrivals

# Multiples of the given rate at which all topologies are compared.
RATE_FACTORS: Final = (0.25, 0.5, 1.0, 2.0)
# A split counts as useful only if at least this share of the requests keeps the limits.
_USEFUL_SHARE: Final = 0.5
_WORKER_NAMES: Final = {
    Role.AGGREGATED: "worker",
    Role.PREFILL: "prefill",
    Role.DECODE: "decode",
}


class WorkerCounts(NamedTuple):
    """Numbers of workers: aggregated ones, or prefill and decode workers."""

    aggregated: int = 0
    prefill: int = 0
    decode: int = 0

    def __str__(self) -> str:
        return f"{self.aggregated}A" if self.aggregated else f"{self.prefill}P{self.decode}D"

    @property
    def num_workers(self) -> int:
        """Return the number of workers."""
        return sum(self)

    @property
    def is_disaggregated(self) -> bool:
        """Return whether prefill and decode have workers of their own."""
        return not self.aggregated


class Range(NamedTuple):
    """The mean, least and largest value of a figure, over simulations with different arrivals."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        """Return the range of values."""
        return cls(mean(values), min(values), max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The figures of one topology at one rate."""

    topology: WorkerCounts
    rate: float
    is_saturated: bool  # at least one of the simulations was saturated
    ttft_p50_ms: Range
    ttft_p90_ms: Range
    tpot_p50_ms: Range
    worst_gap_p50_ms: Range
    # The keys of these mappings are the names of definitions of goodput.
    attainment: Mapping[str, Range]  # share of the requests that keep the limits
    goodput: Mapping[str, Range]  # good requests per second and GPU
    # The share of the requests that keep the limits, with the error of the constants. `low` is the
    # share if all times are longer by as much as the constants were off on measured loads, and
    # `high` if all times are shorter. None: the error of the constants is not known.
    with_errors: Mapping[str, Range] | None = None


def topologies(num_workers: int) -> Iterator[WorkerCounts]:
    """Yield the topologies of a number of workers."""
    yield WorkerCounts(aggregated=num_workers)
    for num_prefill in range(1, num_workers):
        yield WorkerCounts(prefill=num_prefill, decode=num_workers - num_prefill)


class Comparison:
    """Simulations of all topologies of one model.

    Args:
        model: name or folder of the model.
        constants: the constants of the model.
        gpus: number of GPUs of all workers together.
        slos: the definitions of goodput by name.
        arguments: engine arguments of all workers, such as `kv_block_size`.

    Raises:
        ConfigError: a worker needs more than `gpus` GPUs.
    """

    def __init__(
        self,
        model: str,
        constants: Constants,
        gpus: int,
        slos: Mapping[str, Slo],
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.constants = constants
        self.gpus = gpus
        self.slos = slos
        self._arguments = dict(arguments or {})
        num_workers = gpus // constants.gpus_per_worker
        if not num_workers:
            raise ConfigError(
                f"a worker of {model} takes {counted(constants.gpus_per_worker, 'GPU')}, and"
                f" there are {gpus};"
                " raise --gpus"
            )
        self.topologies = list(topologies(num_workers))

    def cell(
        self, topology: WorkerCounts, shape: Shape, rate: float, num_requests: int, num_seeds: int
    ) -> Cell:
        """Return the figures of a topology at a rate."""
        deployment = self._simulated(topology)
        outcomes = [
            simulate(deployment, poisson_arrivals(shape, rate, num_requests, seed), seed)
            for seed in range(1, num_seeds + 1)
        ]
        errors = self.constants.errors
        with_errors = None
        if errors is not None:
            with_errors = {
                name: _with_errors(outcomes, slo, errors) for name, slo in self.slos.items()
            }
        return Cell(
            topology=topology,
            rate=rate,
            is_saturated=any(outcome.is_saturated for outcome in outcomes),
            ttft_p50_ms=_range(outcomes, lambda one: one.quantiles(_ttft_s)["p50"]),
            ttft_p90_ms=_range(outcomes, lambda one: one.quantiles(_ttft_s)["p90"]),
            tpot_p50_ms=_range(outcomes, lambda one: one.quantiles(_mean_gap_s)["p50"]),
            worst_gap_p50_ms=_range(outcomes, lambda one: one.quantiles(_worst_gap_s)["p50"]),
            attainment={
                name: Range.of([outcome.attainment(slo) for outcome in outcomes])
                for name, slo in self.slos.items()
            },
            goodput={
                name: Range.of([outcome.attainment(slo) * rate / self.gpus for outcome in outcomes])
                for name, slo in self.slos.items()
            },
            with_errors=with_errors,
        )

    def deployment(self, topology: WorkerCounts, folder: Path | None = None) -> dict[str, Any]:
        """Return the content of a deployment file with this topology.

        Args:
            topology: the workers.
            folder: the folder with the files of `engine_files`. None: workers have no such files.
        """
        flags: dict[str, Any] = {"model-path": self.model, "engine": self.constants.engine}
        size = self.constants.gpus_per_worker
        if size > 1:
            flags["tensor-parallel-size"] = size
        flags |= self._arguments
        workers: list[dict[str, Any]] = []
        first_gpu = 0
        for role, count in (
            (Role.AGGREGATED, topology.aggregated),
            (Role.PREFILL, topology.prefill),
            (Role.DECODE, topology.decode),
        ):
            if not count:
                continue
            name = _WORKER_NAMES[role]
            num_gpus = count * size
            own_flags: dict[str, Any] = {}
            if folder is not None:
                own_flags["extra-engine-args"] = str(folder / f"{name}.yaml")
            workers.append(
                {
                    "name": name,
                    "disaggregation_mode": role.value,
                    "count": count,
                    "devices": list(range(first_gpu, first_gpu + num_gpus)),
                    "flags": flags | own_flags,
                }
            )
            first_gpu += num_gpus
        return {
            "services": {"etcd": "start", "nats": "start"},
            "frontend": {"http-port": 8000},
            "workers": workers,
            "ready_timeout_s": 3600.0,
        }

    def engine_files(self, topology: WorkerCounts, shape: Shape) -> dict[str, dict[str, Any]]:
        """Return the engine arguments that were simulated, by the names of their files."""
        contents: dict[str, dict[str, Any]] = {}
        for config in self._simulated(topology).workers:
            role = config.disaggregation_mode
            content = engine_file(
                self.constants.engine, role, config.override_engine_args or {}, shape.input_tokens
            )
            if content is not None:
                contents[f"{_WORKER_NAMES[role]}.yaml"] = content
        return contents

    def mock_deployment(self, topology: WorkerCounts) -> dict[str, Any]:
        """Return `deployment(topology)` on CPUs, with mock engines of the simulated times."""
        data = self.deployment(topology)
        workers = self._simulated(topology).workers
        configs = {config.disaggregation_mode.value: config for config in workers}
        for worker in data["workers"]:
            config = configs[worker["disaggregation_mode"]]
            worker["devices"] = "cpu"
            worker["flags"] = {
                "model-path": self.model,
                "engine": "mock",
                "override-engine-args": config.override_engine_args,
            }
        return data

    def _simulated(self, topology: WorkerCounts) -> SimulatedDeployment:
        return simulated_deployment(
            checked_deployment(self.deployment(topology), str(topology)),
            [self.constants],
            self.constants.gpu,
        )


def best(cells: Sequence[Cell], slo: str) -> Cell:
    """Return the first cell with the most goodput by a definition."""
    return max(cells, key=lambda cell: cell.goodput[slo].mean)


def crossover(cells: Sequence[Cell], slo: str) -> float | None:
    """Return the least rate at which a split has clearly more goodput than aggregated workers.

    The split is clearly better if it is better in every simulation, and at least half of the
    requests keep the limits. None: there is no such rate.
    """
    for rate in sorted({cell.rate for cell in cells}):
        at_rate = [cell for cell in cells if cell.rate == rate]
        aggregated = [cell for cell in at_rate if not cell.topology.is_disaggregated]
        splits = [cell for cell in at_rate if cell.topology.is_disaggregated]
        if not splits or not aggregated:
            continue
        split = best(splits, slo)
        is_better = split.goodput[slo].low > best(aggregated, slo).goodput[slo].high
        if is_better and split.attainment[slo].mean >= _USEFUL_SHARE:
            return rate
    return None


def _with_errors(outcomes: Sequence[Outcome], slo: Slo, errors: Errors) -> Range:
    """Return the share of requests within limits, and this share if all times are longer or
    shorter by as much as the constants were off.
    """
    factors = (1 + errors.ttft, 1 + errors.mean_gap, 1 + (errors.worst_gap or 0.0))
    # The limits are changed instead of the times. Longer times have the same effect as shorter
    # limits.
    longer_limits = slo.scaled(*factors)
    shorter_limits = slo.scaled(*(1 / factor for factor in factors))

    def share(limits: Slo) -> float:
        return mean(outcome.attainment(limits) for outcome in outcomes)

    return Range(mean=share(slo), low=share(shorter_limits), high=share(longer_limits))


def _range(outcomes: Sequence[Outcome], of: Callable[[Outcome], float]) -> Range:
    return Range.of([of(outcome) for outcome in outcomes])


def _ttft_s(request: SimulatedRequest) -> float:
    return request.ttft_s


def _mean_gap_s(request: SimulatedRequest) -> float:
    return request.mean_gap_s


def _worst_gap_s(request: SimulatedRequest) -> float:
    return request.worst_gap_s
