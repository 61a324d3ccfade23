"""Run a load on a deployment file in virtual time (`dynamo-trtllm simulate`)."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo_trtllm.config.commands import SimulateConfig
from dynamo_trtllm.config.deployment import load_deployment
from dynamo_trtllm.config.load import command, process_environment
from dynamo_trtllm.config.parser import COMMAND_NAME
from dynamo_trtllm.config.text_table import format_table
from dynamo_trtllm.protocol.counted import counted
from dynamo_trtllm.simulate.cluster import simulate, simulate_closed_loop
from dynamo_trtllm.simulate.constants import known_constants
from dynamo_trtllm.simulate.deployments import simulated_deployment
from dynamo_trtllm.simulate.outcomes import QUANTILES, Outcome, Slo
from dynamo_trtllm.simulate.workload import parse_shape, poisson_arrivals, read_trace
from dynamo_trtllm.support.garbage_collection import tune_gc

_SHAPE_REQUESTS = 500  # requests of a shape, unless --requests sets another number


@command(SimulateConfig, f"{COMMAND_NAME} simulate")
def main(config: SimulateConfig) -> None:
    """Run the command. Exit with status 0, or 2 for a bad command line, deployment or trace."""
    outcome = run(config)
    figures = outcome.figures() | {"goodput": goodput(outcome, config)}
    if config.json_output:
        sys.stdout.write(json_text(figures))
    else:
        sys.stdout.write(_text(figures, config))


def json_text(figures: Mapping[str, Any]) -> str:
    """Return figures as JSON text. NaN, the figure if no request was completed, becomes null."""
    return msgspec.json.format(msgspec.json.encode(figures), indent=2).decode() + "\n"


def run(config: SimulateConfig) -> Outcome:
    """Return the outcome of the configured simulation.

    Raises:
        ConfigError: the deployment, the trace or a value is wrong.
    """
    frontend_s = None if config.frontend_ms is None else config.frontend_ms / 1000
    deployment = simulated_deployment(
        load_deployment(config.deployment, process_environment()),
        known_constants(config.constants),
        config.gpu,
        frontend_s,
    )
    tune_gc()
    if config.trace is not None:
        arrivals = read_trace(config.trace, config.requests, config.speed)
        return simulate(deployment, arrivals, config.seed)
    assert config.shape is not None
    shape = parse_shape(config.shape)
    num_requests = config.requests or _SHAPE_REQUESTS
    if config.concurrency is not None:
        return simulate_closed_loop(
            deployment, shape, config.concurrency, num_requests, config.seed
        )
    assert config.rate is not None
    arrivals = poisson_arrivals(shape, config.rate, num_requests, config.seed)
    return simulate(deployment, arrivals, config.seed)


def slos(ttft_ms: float, mean_gap_ms: float, worst_gap_ms: float) -> dict[str, Slo]:
    """Return both definitions of a good request, by name."""
    ttft_s = ttft_ms / 1000
    return {
        "mean-gap": Slo(ttft_s=ttft_s, mean_gap_s=mean_gap_ms / 1000),
        "worst-gap": Slo(ttft_s=ttft_s, worst_gap_s=worst_gap_ms / 1000),
    }


def goodput(outcome: Outcome, config: SimulateConfig) -> dict[str, dict[str, float]]:
    """Return the share of good requests, and their number per second and GPU, by definition."""
    return {
        name: {
            "attainment": outcome.attainment(slo),
            "good_requests_per_s_per_gpu": outcome.goodput_per_gpu(slo),
        }
        for name, slo in slos(config.ttft_ms, config.mean_gap_ms, config.worst_gap_ms).items()
    }


def _text(figures: Mapping[str, Any], config: SimulateConfig) -> str:
    """Return the figures as text."""
    failed = sum(figures["errors"].values())
    lines = [
        f"{counted(figures['requests'], 'request')} in {figures['seconds']:.1f} s, {failed} failed,"
        f" {figures['output_tokens_per_s']:.0f} output tokens/s"
        f" ({figures['output_tokens_per_s_per_gpu']:.0f} per GPU),"
        f" {100 * figures['cached_share']:.0f} % of prompt tokens cached\n"
    ]
    if failed:
        codes = ", ".join(f"{code}: {count}" for code, count in figures["errors"].items())
        lines.append(f"errors: {codes}\n")
    rows = [("ms", *QUANTILES)]
    for name, title in (
        ("ttft_ms", "time to first token"),
        ("tpot_ms", "mean gap (TPOT)"),
        ("worst_gap_ms", "worst gap"),
    ):
        values = figures[name]
        rows.append((title, *(_milliseconds(values[quantile]) for quantile in QUANTILES)))
    lines.append(format_table(rows))
    limits = {
        "mean-gap": f"mean gap {config.mean_gap_ms:g} ms",
        "worst-gap": f"worst gap {config.worst_gap_ms:g} ms",
    }
    for name, values in figures["goodput"].items():
        lines.append(
            f"TTFT {config.ttft_ms:g} ms and {limits[name]}: kept by"
            f" {100 * values['attainment']:.1f} %, that is"
            f" {values['good_requests_per_s_per_gpu']:.2f} requests/s per GPU\n"
        )
    if figures["share_changes"]:
        times = counted(figures["share_changes"], "time")
        lines.append(f"the planner changed shares {times}\n")
    if figures["is_saturated"]:
        lines.append("saturated: waits for first tokens grew until the end, the load is too high\n")
    return "".join(lines)


def _milliseconds(value: float) -> str:
    """Return a time as text; "-" if no request was completed."""
    return "-" if math.isnan(value) else f"{value:.1f}"


if __name__ == "__main__":
    main()
