"""Compares simulations of a deployment with its processes, under the same load.

    python -m benchmarks.simulated

Starts deployments of the mock engine, sends prompts of token ids at random times, and simulates the
same arrivals. Run it on an idle machine: the processes take real time, the simulation does not.

What a request takes outside of engines is measured first, with requests that run alone: their time
to first token, less that of a simulation in which this takes no time.

  tok_s         output tokens per second
  ttft, tpot    p50 and p90 in ms
  error         of the simulation, in percent of what was measured
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from dynamo_trtllm.config.deployment import checked_deployment
from dynamo_trtllm.config.text_table import format_table
from dynamo_trtllm.simulate.cluster import SimulatedDeployment, simulate, simulate_closed_loop
from dynamo_trtllm.simulate.deployments import simulated_deployment
from dynamo_trtllm.simulate.outcomes import Outcome, SimulatedRequest
from dynamo_trtllm.simulate.workload import Shape, arrivals_at

from .deployment import NAME_VARIABLE, LaunchedDeployment
from .gpu import tokens
from .gpu.plan import MODEL_NAME
from .load_client import Load, arrival_times
from .stream import RequestRecord

_READY_S: Final = 120.0
_SEED: Final = 7
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


class MockDeployment(LaunchedDeployment):
    """Workers of the mock engine and a frontend.

    Args:
        modes: `disaggregation_mode` of each worker.
    """

    def __init__(self, modes: Sequence[str]) -> None:
        self._modes = {f"worker-{number}": mode for number, mode in enumerate(modes, start=1)}
        super().__init__(workers=tuple(self._modes), model=MODEL_NAME, ready_s=_READY_S)

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
                    "disaggregation_mode": mode,
                    "flags": {
                        "model": "mock",
                        "served-model-name": MODEL_NAME,
                        "engine": "mock",
                        "override-engine-args": _ARGUMENTS,
                    },
                    "env": {NAME_VARIABLE: name},
                }
                for name, mode in self._modes.items()
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
                extra=tokens.SAMPLED,
            )
        )
        alone = [_request(record, shape) for record in records]
    outcome = simulate_closed_loop(
        _described(deployment, 0.0), Shape(shape.input_tokens, _TOKENS_ALONE), 1, _NUM_ALONE
    )
    return median(one.ttft_s for one in alone) - median(one.ttft_s for one in outcome.good)


def measured(deployment: MockDeployment, shape: Shape, rate: float, count: int) -> Outcome:
    """Send a load to the processes, and return what it measured."""
    prompts = tokens.prompts(count, shape.input_tokens, _SEED)
    records = asyncio.run(
        tokens.send(
            deployment.url,
            prompts,
            osl=shape.output_tokens,
            concurrency=1,
            extra=tokens.SAMPLED,
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


def _row(title: str, outcome: Outcome) -> tuple[str, list[float]]:
    figures = outcome.figures()
    values = [
        figures["output_tokens_per_s"],
        figures["ttft_ms"]["p50"],
        figures["ttft_ms"]["p90"],
        figures["tpot_ms"]["p50"],
        figures["tpot_ms"]["p90"],
    ]
    return title, values


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
    args = parser.parse_args()
    shape = Shape(*args.shape)
    rows: list[tuple[str, ...]] = [("", "tok_s", "ttft p50", "p90", "tpot p50", "p90")]
    for word in args.topologies:
        deployment = MockDeployment(_TOPOLOGIES[word])
        try:
            deployment.start()
            frontend_s = frontend_seconds(deployment, shape)
            real = _row(f"{word} processes", measured(deployment, shape, args.rate, args.requests))
        finally:
            deployment.stop()
        outcome = simulated(deployment, shape, args.rate, args.requests, frontend_s)
        virtual = _row(f"{word} simulated", outcome)
        for title, values in (real, virtual):
            rows.append((title, *(f"{value:.1f}" for value in values)))
        errors = [
            100 * (guess / found - 1) for guess, found in zip(virtual[1], real[1], strict=True)
        ]
        rows.append((f"{word} outside of engines: {1000 * frontend_s:.1f} ms", *[""] * 5))
        rows.append((f"{word} error", *(f"{error:+.1f} %" for error in errors)))
    sys.stdout.write(format_table(rows))


if __name__ == "__main__":
    main()
