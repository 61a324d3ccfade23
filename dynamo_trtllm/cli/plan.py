"""Say which topology keeps the most requests within their limits (`dynamo-trtllm plan`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from dynamo_trtllm.cli.output_files import check_writable, make_folder, write_text
from dynamo_trtllm.cli.plan_chart import goodput_chart
from dynamo_trtllm.cli.simulate import json_text, slos
from dynamo_trtllm.config.commands import PlanConfig
from dynamo_trtllm.config.deployment import checked_deployment
from dynamo_trtllm.config.load import command
from dynamo_trtllm.config.parser import COMMAND_NAME
from dynamo_trtllm.config.text_table import format_table
from dynamo_trtllm.launch.process_specs import processes
from dynamo_trtllm.protocol.counted import counted
from dynamo_trtllm.protocol.errors import ConfigError, install_hint
from dynamo_trtllm.simulate.constants import Constants, find_constants, known_constants
from dynamo_trtllm.simulate.topologies import (
    RATE_FACTORS,
    Cell,
    Comparison,
    Range,
    best,
    crossover,
)
from dynamo_trtllm.simulate.workload import Shape, parse_shape
from dynamo_trtllm.support.charts import can_draw
from dynamo_trtllm.support.garbage_collection import tune_gc

_DEPLOYMENT = "deployment.yaml"
_MOCK = "mock.yaml"


@command(PlanConfig, f"{COMMAND_NAME} plan")
def main(config: PlanConfig) -> None:
    """Run the command. Exit with status 0, or 2 for a bad command line or without constants."""
    shape = parse_shape(config.shape)
    comparison = _comparison(config)
    _check_outputs(config)
    tune_gc()
    cells = [
        comparison.cell(topology, shape, factor * config.rate, config.requests, config.seeds)
        for factor in RATE_FACTORS
        for topology in comparison.topologies
    ]
    chosen = best([cell for cell in cells if cell.rate == config.rate], config.decide_by)
    # The figures are written first, so that they are not lost if a file can't be written.
    if config.json_output:
        sys.stdout.write(json_text(_report(cells, chosen, comparison, config)))
    else:
        sys.stdout.write(_heading(comparison, shape, config))
        sys.stdout.write(format_table(list(_rows(cells))))
        for line in recommendation(cells, chosen, comparison.constants, config):
            sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
    if config.out is not None:
        _write_files(config.out, comparison, chosen, shape)
    if config.plot is not None:
        write_text(config.plot, _plot(cells, config), "plot")


def _comparison(config: PlanConfig) -> Comparison:
    constants = find_constants(
        known_constants(config.constants),
        config.model,
        config.engine,
        config.gpu,
        gpus_per_worker=config.tensor_parallel_size,
    )
    arguments: dict[str, Any] = {}
    if config.kv_block_size is not None:
        arguments["kv-block-size"] = config.kv_block_size
    limits = slos(config.ttft_ms, config.mean_gap_ms, config.worst_gap_ms)
    return Comparison(config.model, constants, config.gpus, limits, arguments)


def _heading(comparison: Comparison, shape: Shape, config: PlanConfig) -> str:
    constants = comparison.constants
    return (
        f"{comparison.model} with {constants.engine} on {comparison.gpus} {constants.gpu}, {shape},"
        f" {counted(config.requests, 'request')} in each of"
        f" {counted(config.seeds, 'simulation')} of a cell\n"
        f"constants: {constants.source}\n"
        f"good: TTFT within {config.ttft_ms:g} ms, and mean gap within {config.mean_gap_ms:g} ms or"
        f" worst gap within {config.worst_gap_ms:g} ms; good/s/GPU with the range of the"
        " simulations\n"
    )


def _rows(cells: Sequence[Cell]) -> Iterator[Sequence[str]]:
    yield (
        "requests/s",
        "topology",
        "TTFT p50",
        "p90",
        "TPOT p50",
        "worst gap p50",
        "mean gap kept",
        "good/s/GPU",
        "worst gap kept",
        "good/s/GPU",
    )
    for cell in cells:
        yield (
            f"{cell.rate:g}",
            str(cell.topology) + (" saturated" if cell.is_saturated else ""),
            f"{cell.ttft_p50_ms.mean:.0f}",
            f"{cell.ttft_p90_ms.mean:.0f}",
            f"{cell.tpot_p50_ms.mean:.1f}",
            f"{cell.worst_gap_p50_ms.mean:.0f}",
            f"{100 * cell.attainment['mean-gap'].mean:.0f} %",
            _ranged(cell.goodput["mean-gap"]),
            f"{100 * cell.attainment['worst-gap'].mean:.0f} %",
            _ranged(cell.goodput["worst-gap"]),
        )


def _ranged(figure: Range) -> str:
    return f"{figure.mean:.2f} ({figure.low:.2f} to {figure.high:.2f})"


def recommendation(
    cells: Sequence[Cell], chosen: Cell, constants: Constants, config: PlanConfig
) -> Iterator[str]:
    """Yield sentences: what to choose, where a split begins to pay, and how sure that is."""
    name = config.decide_by
    at_rate = [cell for cell in cells if cell.rate == chosen.rate]
    is_only = len(at_rate) == 1
    figure = chosen.goodput[name]
    if is_only:
        yield f"{chosen.topology} is the only topology: a split needs GPUs for two workers."
    elif not figure.mean:
        yield f"At {_rate(chosen.rate)}, no topology keeps the limits for any request."
    elif not chosen.topology.is_disaggregated:
        yield f"Do not disaggregate at {_rate(chosen.rate)}: {chosen.topology} is the best."
    else:
        yield f"Disaggregate at {_rate(chosen.rate)}: {chosen.topology} is the best."
    if not figure.mean:
        kept = "It keeps the limits for no request. " if is_only else ""
        yield f"{kept}Use more GPUs (--gpus), a lower --rate or longer limits."
    else:
        share = f"{100 * chosen.attainment[name].mean:.0f} %"
        yield f"It keeps {share} of the requests within the limits ({figure.mean:.2f}/s per GPU)."
        yield _error_sentence(chosen, constants, name)
        yield from _comparable(at_rate, chosen, name)
    if is_only:
        return
    for definition in chosen.goodput:
        rate = crossover(cells, definition)
        if rate is None:
            yield f"By {definition}, no split is clearly better than aggregated workers."
        else:
            yield f"By {definition}, a split is clearly better from {_rate(rate)} on."


def _rate(rate: float) -> str:
    return f"{counted(rate, 'request', f'{rate:g}')}/s"


def _comparable(at_rate: Sequence[Cell], chosen: Cell, name: str) -> Iterator[str]:
    """Yield which other topologies are no worse within the range of the simulations."""
    least = chosen.goodput[name].low
    others = [cell for cell in at_rate if cell is not chosen]
    if others:
        second = best(others, name)
        if second.goodput[name].high >= least:
            yield f"{second.topology} is no worse within the range of the simulations."
    aggregated = next(cell for cell in at_rate if not cell.topology.is_disaggregated)
    if chosen.topology.is_disaggregated and aggregated.goodput[name].high >= least:
        yield "Aggregated workers are simpler, and not clearly worse here."


def _error_sentence(chosen: Cell, constants: Constants, name: str) -> str:
    """Return what the known errors of the constants mean for the share that is promised."""
    errors = constants.errors
    if errors is None or chosen.with_errors is None:
        return "How far these constants are off was not measured."
    if name == "worst-gap" and errors.worst_gap is None:
        return "How far worst gaps of these constants are off was not measured."
    share = chosen.with_errors[name]
    gaps = f"{100 * errors.mean_gap:.0f} % (mean gap)"
    if errors.worst_gap is not None:
        gaps += f", {100 * errors.worst_gap:.0f} % (worst gap)"
    return (
        f"On measured loads, these constants were off by {100 * errors.ttft:.0f} % (TTFT), {gaps};"
        f" if the times above are off by as much, it keeps {100 * share.low:.0f} to"
        f" {100 * share.high:.0f} %."
    )


def _report(
    cells: Sequence[Cell], chosen: Cell, comparison: Comparison, config: PlanConfig
) -> Mapping[str, Any]:
    return {
        "model": comparison.model,
        "gpus": comparison.gpus,
        "constants": comparison.constants.source,
        "cells": [asdict(cell) | {"topology": str(cell.topology)} for cell in cells],
        "chosen": str(chosen.topology),
        "recommendation": list(recommendation(cells, chosen, comparison.constants, config)),
        "crossover": {name: crossover(cells, name) for name in chosen.goodput},
    }


def _write_files(folder: Path, comparison: Comparison, chosen: Cell, shape: Shape) -> None:
    """Write the deployment of the chosen topology, its engine files, and a deployment with the
    mock engine that imitates it.

    Raises:
        ConfigError: a file can't be written, or a process would reject its settings.
    """
    topology = chosen.topology
    engine_files = comparison.engine_files(topology, shape)
    deployments = {
        _DEPLOYMENT: comparison.deployment(topology, folder if engine_files else None),
        _MOCK: comparison.mock_deployment(topology),
    }
    title = f"# {_title(comparison, chosen)}\n"
    for name, content in {**engine_files, **deployments}.items():
        write_text(folder / name, title + yaml.safe_dump(content, sort_keys=False), "out")
    for name, data in deployments.items():
        processes(checked_deployment(data, name))


def _check_outputs(config: PlanConfig) -> None:
    """Check before the simulations that the files can be written, and create their folder.

    Raises:
        ConfigError: a file can't be written, --plot names another format than SVG, or the package
            that draws is missing.
    """
    # A name without an ending may be a device, such as /dev/stdout.
    if config.plot is not None and config.plot.suffix.lower() not in ("", ".svg"):
        raise ConfigError(
            f"--plot writes SVG only, but its file is {config.plot.name};"
            f" use {config.plot.with_suffix('.svg').name}",
            field="plot",
        )
    if config.plot is not None and not can_draw():
        raise ConfigError(
            f"--plot needs matplotlib; {install_hint('bench')}, or leave --plot out", field="plot"
        )
    if config.out is not None:
        make_folder(config.out, "out")
    if config.plot is not None:
        check_writable(config.plot, "plot")


def _plot(cells: Sequence[Cell], config: PlanConfig) -> str:
    """Return the chart as SVG."""
    limits = {
        "mean-gap": f"TTFT {config.ttft_ms:g} ms, mean gap {config.mean_gap_ms:g} ms",
        "worst-gap": f"TTFT {config.ttft_ms:g} ms, worst gap {config.worst_gap_ms:g} ms",
    }
    return goodput_chart(cells, limits)


def _title(comparison: Comparison, chosen: Cell) -> str:
    return (
        f"Written by dynamo-trtllm plan: {chosen.topology} of {comparison.model} for"
        f" {_rate(chosen.rate)}."
    )


if __name__ == "__main__":
    main()
