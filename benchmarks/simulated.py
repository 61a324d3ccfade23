"""Compares simulations of a deployment with its processes, under the same load.

    python -m benchmarks.simulated
    python -m benchmarks.simulated --mock plan/mock.yaml --shape 8192 256 --rate 4 --frontend-ms 9

Starts deployments of the mock engine, sends prompts of token ids at random times, and simulates the
same arrivals. Run it on an idle machine: the processes take real time, the simulation does not.

What a request takes outside of engines is measured first, with requests that run alone: their time
to first token, less that of a simulation in which this takes no time.

With --mock, the only deployment is one that `dynamo-trtllm plan` has written, and --frontend-ms
what the plan has assumed: the last columns are the shares of requests within the limits of both
definitions, as processes keep them and as the plan promises.

  tok_s         output tokens per second
  ttft, tpot    p50 and p90 in ms
  gap           p50 of worst gaps in ms
  mean, worst   percent of the requests that keep TTFT 2 s and mean gap 20 ms, or worst gap 100 ms
  error         of the simulation, in percent of what was measured
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import yaml

from dynamo_trtllm.config.deployment import checked_deployment
from dynamo_trtllm.config.text_table import format_table
from dynamo_trtllm.simulate.cluster import SimulatedDeployment, simulate, simulate_closed_loop
from dynamo_trtllm.simulate.deployments import simulated_deployment
from dynamo_trtllm.simulate.outcomes import Outcome, SimulatedRequest, Slo
from dynamo_trtllm.simulate.workload import Shape, arrivals_at

from .deployment import NAME_VARIABLE, LaunchedDeployment
from .gpu import tokens
from .gpu.plan import MODEL_NAME
from .load_client import Load, arrival_times
from .stream import RequestRecord

# The answers of the mock engine begin with special tokens. Without their text, the client would see
# no first token but the second one, and a gap of two steps after it.
_EXTRA: Final = tokens.SAMPLED | {"skip_special_tokens": False}
_READY_S: Final = 120.0
_SEED: Final = 7
_SLOS: Final = (Slo(mean_gap_s=0.02), Slo(worst_gap_s=0.1))
_NUM_ALONE: Final = 15  # requests that run alone
_TOKENS_ALONE: Final = 4
# About the times of gpt-oss-120b on an H200.
_ARGUMENTS: Final[dict[str, Any]] = {
    "step_s": 0.008,
    "decode_request_s": 0.0003,
    "prefill_token_s": 2e-5,
    "prefill_tokens_per_step": 8192,
    "kv_block_size": 128,
    "kv_cache_blocks": 8192,
    "kv_transfer_s": 0.004,
    "kv_post_block_s": 1e-4,
}
_TOPOLOGIES: Final = {
    "1A": ("prefill_and_decode",),
    "2A": ("prefill_and_decode",) * 2,
    "1P1D": ("prefill", "decode"),
    "2P1D": ("prefill", "prefill", "decode"),
}


class MockWorker(NamedTuple):
    """A worker of the mock engine."""

    mode: str  # its `disaggregation_mode`
    arguments: dict[str, Any]  # of the engine


class MockDeployment(LaunchedDeployment):
    """Workers of the mock engine and a frontend."""

    def __init__(self, workers: Sequence[MockWorker]) -> None:
        self._workers = {f"worker-{number}": one for number, one in enumerate(workers, start=1)}
        super().__init__(workers=tuple(self._workers), model=MODEL_NAME, ready_s=_READY_S)

    def description(self) -> dict[str, Any]:
        """See `LaunchedDeployment.description`."""
        frontend = {"http-host": "127.0.0.1", "http-port": self.http_port}
        return {
            "namespace": self.namespace,
            "services": self.services(),
            "frontend": frontend,
            "workers": [
                {
                    "name": name,
                    "disaggregation_mode": one.mode,
                    "flags": {
                        "model": "mock",
                        "served-model-name": MODEL_NAME,
                        "engine": "mock",
                        "override-engine-args": one.arguments,
                    },
                    "env": {NAME_VARIABLE: name},
                }
                for name, one in self._workers.items()
            ],
        }


def frontend_seconds(deployment: MockDeployment, shape: Shape) -> float:
    """Return what a request takes outside of engines: the median of some that run alone."""
    prompts = tokens.prompts(_NUM_ALONE, shape.input_tokens, _SEED + 1)
    alone: list[SimulatedRequest] = []
    # The first round warms up all processes.
    for _ in range(2):
        records = asyncio.run(
            tokens.send(
                deployment.url,
                prompts,
                osl=_TOKENS_ALONE,
                concurrency=1,
                extra=_EXTRA,
            )
        )
        alone = [_request(record, shape) for record in records]
    outcome = simulate_closed_loop(
        _described(deployment, 0.0), Shape(shape.input_tokens, _TOKENS_ALONE), 1, _NUM_ALONE
    )
    return median(one.ttft_s for one in alone) - median(one.ttft_s for one in outcome.completed)


def measured(deployment: MockDeployment, shape: Shape, rate: float, count: int) -> Outcome:
    """Send a load to the processes, and return what it measured."""
    prompts = tokens.prompts(count, shape.input_tokens, _SEED)
    records = asyncio.run(
        tokens.send(
            deployment.url,
            prompts,
            osl=shape.output_tokens,
            concurrency=1,
            extra=_EXTRA,
            rate=rate,
            seed=_SEED,
        )
    )
    requests = [_request(record, shape) for record in records]
    return Outcome(sorted(requests, key=lambda one: one.arrived_s), len(deployment.workers))


def _request(record: RequestRecord, shape: Shape) -> SimulatedRequest:
    request = SimulatedRequest(record.planned_s, shape.input_tokens, error=record.error)
    if record.is_ok and record.first_s is not None and record.last_s is not None:
        request.first_s = record.first_s
        request.last_s = record.last_s
        request.end_s = record.last_s
        request.output_tokens = record.output_tokens
        request.worst_gap_s = max(record.gaps_s, default=0.0)
    return request


def simulated(
    deployment: MockDeployment, shape: Shape, rate: float, count: int, frontend_s: float
) -> Outcome:
    """Return the outcome of the same load in virtual time."""
    times_s = arrival_times(Load(url=deployment.url, model="", rate=rate, seed=_SEED))
    arrivals = arrivals_at(shape, [next(times_s) for _ in range(count)])
    return simulate(_described(deployment, frontend_s), arrivals)


def _described(deployment: MockDeployment, frontend_s: float) -> SimulatedDeployment:
    described = deployment.description() | {"services": {}}
    checked = checked_deployment(described, "this benchmark")
    return simulated_deployment(checked, (), None, frontend_s)


def planned_workers(file: Path) -> list[MockWorker]:
    """Return the workers of a deployment that `dynamo-trtllm plan` has written."""
    return [
        MockWorker(worker["disaggregation_mode"], worker["flags"]["override-engine-args"])
        for worker in yaml.safe_load(file.read_text(encoding="utf-8"))["workers"]
        for _ in range(worker["count"])
    ]


def _values(outcome: Outcome) -> list[float]:
    """Return the columns of a row."""
    figures = outcome.figures()
    return [
        figures["output_tokens_per_s"],
        figures["ttft_ms"]["p50"],
        figures["ttft_ms"]["p90"],
        figures["tpot_ms"]["p50"],
        figures["tpot_ms"]["p90"],
        figures["worst_gap_ms"]["p50"],
        *(100 * outcome.attainment(slo) for slo in _SLOS),
    ]


def compared(
    word: str, workers: Sequence[MockWorker], args: argparse.Namespace
) -> list[tuple[str, ...]]:
    """Return the rows of one deployment: its processes, the simulation and its errors."""
    shape = Shape(*args.shape)
    deployment = MockDeployment(workers)
    try:
        deployment.start()
        frontend_s = frontend_seconds(deployment, shape)
        real = _values(measured(deployment, shape, args.rate, args.requests))
    finally:
        deployment.stop()
    assumed_s = frontend_s if args.frontend_ms is None else args.frontend_ms / 1000
    outcome = simulated(deployment, shape, args.rate, args.requests, assumed_s)
    virtual = _values(outcome)
    rows = [
        (f"{word} {how}", *(f"{value:.1f}" for value in values))
        for how, values in (("processes", real), ("simulated", virtual))
    ]
    errors = [
        f"{100 * (guess / found - 1):+.1f} %" if found else ""
        for guess, found in zip(virtual, real, strict=True)
    ]
    rows.append((f"{word} outside of engines: {1000 * frontend_s:.1f} ms", *[""] * len(errors)))
    rows.append((f"{word} error", *errors))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulated",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=60, help="of each topology")
    parser.add_argument("--shape", type=int, nargs=2, default=(4096, 128), help="prompt and answer")
    parser.add_argument("--topologies", nargs="+", default=list(_TOPOLOGIES))
    parser.add_argument("--mock", type=Path, help="deployment that plan has written")
    parser.add_argument("--frontend-ms", type=float, help="instead of what is measured")
    args = parser.parse_args()
    rows: list[tuple[str, ...]] = [
        ("", "tok_s", "ttft p50", "p90", "tpot p50", "p90", "gap", "mean", "worst")
    ]
    if args.mock is not None:
        rows += compared(str(args.mock), planned_workers(args.mock), args)
    else:
        for word in args.topologies:
            rows += compared(
                word, [MockWorker(mode, _ARGUMENTS) for mode in _TOPOLOGIES[word]], args
            )
    sys.stdout.write(format_table(rows))


if __name__ == "__main__":
    main()
