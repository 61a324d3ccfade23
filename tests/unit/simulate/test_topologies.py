"""Topologies are compared under equal loads, by two definitions of goodput."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from dynamo_trtllm.cli.simulate import _milliseconds, json_text
from dynamo_trtllm.config.deployment import checked_deployment
from dynamo_trtllm.launch.process_specs import processes
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.simulate.constants import Constants, Errors
from dynamo_trtllm.simulate.outcomes import Outcome, SimulatedRequest, Slo
from dynamo_trtllm.simulate.topologies import (
    Cell,
    Comparison,
    Range,
    WorkerCounts,
    best,
    crossover,
    topologies,
)
from dynamo_trtllm.simulate.workload import Shape

CONSTANTS = Constants(
    models=("some-model",),
    engine="vllm",
    versions=("1.0",),
    gpu="h200",
    source="made up for this test",
    fitted="nothing",
    mock={"step_s": 0.01, "prefill_token_s": 1e-4},
)
SLOS = {"mean-gap": Slo(mean_gap_s=0.05), "worst-gap": Slo(worst_gap_s=0.05)}


def comparison(gpus: int = 2) -> Comparison:
    return Comparison("some-model", CONSTANTS, gpus, SLOS)


def test_all_splits_of_the_workers_are_compared() -> None:
    assert list(map(str, topologies(4))) == ["4A", "1P3D", "2P2D", "3P1D"]
    assert list(map(str, topologies(1))) == ["1A"]
    large = msgspec.structs.replace(CONSTANTS, gpus_per_worker=4)
    with pytest.raises(ConfigError, match="takes 4 GPUs"):
        Comparison("some-model", large, 2, SLOS)


def test_prompts_break_the_worst_gap_of_aggregated_workers() -> None:
    cells = {
        topology: comparison().cell(WorkerCounts(*topology), Shape(1000, 50), 4.0, 40, 2)
        for topology in ((2, 0, 0), (0, 1, 1))
    }
    aggregated = cells[2, 0, 0]
    split = cells[0, 1, 1]
    assert split.attainment["worst-gap"].low == 1.0
    assert aggregated.attainment["worst-gap"].high < 0.7
    assert aggregated.attainment["mean-gap"].low == 1.0
    assert split.goodput["worst-gap"].mean == pytest.approx(4.0 / 2)


def test_errors_of_constants_widen_the_promised_share() -> None:
    # Prompts break the worst gap of half of the requests; with times a fifth longer, of all.
    constants = msgspec.structs.replace(
        CONSTANTS, errors=Errors(ttft=0.1, mean_gap=0.1, worst_gap=10.0)
    )
    ours = Comparison("some-model", constants, 1, SLOS)
    cell = ours.cell(WorkerCounts(aggregated=1), Shape(1000, 50), 2.0, 40, 1)
    assert cell.with_errors is not None
    share = cell.with_errors["worst-gap"]
    assert share.low == 0.0
    assert share.low < share.mean == cell.attainment["worst-gap"].mean < share.high == 1.0
    assert comparison().cell(WorkerCounts(1), Shape(10, 5), 1.0, 5, 1).with_errors is None


def test_deployments_of_a_topology_can_be_launched() -> None:
    ours = comparison(3)
    for topology in ours.topologies:
        for data in (ours.deployment(topology), ours.mock_deployment(topology)):
            specs = processes(checked_deployment(data, "test"))
            assert len(specs) == 1 + 3
    mock = ours.mock_deployment(WorkerCounts(prefill=1, decode=2))
    assert mock["workers"][0]["flags"]["override-engine-args"] == {
        "enable_prefix_caching": True,
        **CONSTANTS.mock,
    }


def cell(word: str, rate: float, low: float, high: float) -> Cell:
    figure = Range((low + high) / 2, low, high)
    topology = WorkerCounts(aggregated=2) if word == "2A" else WorkerCounts(prefill=1, decode=1)
    return Cell(
        topology=topology,
        rate=rate,
        is_saturated=False,
        ttft_p50_ms=figure,
        ttft_p90_ms=figure,
        tpot_p50_ms=figure,
        worst_gap_p50_ms=figure,
        attainment={"mean-gap": figure},
        goodput={"mean-gap": figure},
    )


def test_split_is_better_only_if_ranges_are_apart() -> None:
    overlap = [cell("2A", 1.0, 0.4, 0.6), cell("1P1D", 1.0, 0.5, 0.9)]
    apart = [cell("2A", 2.0, 0.4, 0.6), cell("1P1D", 2.0, 0.7, 0.9)]
    useless = [cell("2A", 3.0, 0.0, 0.1), cell("1P1D", 3.0, 0.2, 0.3)]
    assert crossover(overlap, "mean-gap") is None
    assert crossover(useless, "mean-gap") is None
    assert crossover(overlap + apart, "mean-gap") == 2.0
    assert str(best(apart, "mean-gap").topology) == "1P1D"


def test_limits_hold_for_complete_answers_only() -> None:
    good = SimulatedRequest(0.0, 10, first_s=1.0, last_s=2.0, end_s=2.0, output_tokens=11)
    assert Slo(mean_gap_s=0.1).is_met(good)
    assert not Slo(mean_gap_s=0.09).is_met(good)
    assert not Slo(ttft_s=0.9).is_met(good)
    failed = SimulatedRequest(0.0, 10, error="overloaded")
    assert not Slo(ttft_s=math.inf).is_met(failed)
    outcome = Outcome([good, failed], num_gpus=2)
    assert outcome.attainment(Slo()) == 0.5


def test_load_without_an_answer_has_no_times_and_no_goodput() -> None:
    outcome = Outcome([SimulatedRequest(0.0, 10, error="overloaded")], num_gpus=2)
    assert outcome.goodput_per_gpu(Slo()) == 0
    figures = json.loads(json_text(outcome.figures()), parse_constant=pytest.fail)
    assert figures["ttft_ms"] == {"p50": None, "p90": None, "p99": None}
    assert _milliseconds(outcome.figures()["ttft_ms"]["p50"]) == "-"
