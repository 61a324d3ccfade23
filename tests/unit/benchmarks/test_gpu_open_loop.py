"""Open-loop loads: what a good request is, intervals, warm-up rounds that agree, and ladders of
rates.
"""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import open_loop
from benchmarks.gpu.open_loop import (
    Slo,
    agree,
    cell,
    compiled,
    kept_rates,
    mean,
    num_devices,
    quantile,
)
from benchmarks.gpu.plan import Plan, topology
from benchmarks.stream import RequestRecord
from benchmarks.summary import interval, phase_times
from tests.kit.cases import each_case

MEAN = Slo(name="mean", ttft_s=1.0, mean_gap_s=0.02)
WORST = Slo(name="worst", ttft_s=1.0, worst_gap_s=0.1)


def record(
    *, ttft_s: float = 0.5, gaps_s: tuple[float, ...] = (0.01,) * 10, error: str = ""
) -> RequestRecord:
    first = 100.0 + ttft_s
    return RequestRecord(
        index=1,
        planned_s=100.0,
        error=error,
        first_s=first,
        last_s=first + sum(gaps_s),
        output_tokens=len(gaps_s) + 1,
        gaps_s=array("d", gaps_s),
    )


@each_case(
    ("found", "by_mean", "by_worst"),
    [
        (record(), True, True),
        (record(ttft_s=1.1), False, False),
        (record(gaps_s=(0.01,) * 99 + (0.5,)), True, False),
        (record(gaps_s=(0.03,) * 10), False, True),
        (record(error="overloaded"), False, False),
        (RequestRecord(index=1, planned_s=0.0), False, False),
    ],
)
def test_request_is_judged_by_mean_or_worst_gap(
    found: RequestRecord, by_mean: bool, by_worst: bool
) -> None:
    assert (MEAN.is_met(found), WORST.is_met(found)) == (by_mean, by_worst)


def test_cell_goodput_counts_all_gpus_and_failed_requests() -> None:
    records = [record()] * 40 + [record(ttft_s=2.0)] * 30 + [record(error="timeout")] * 10
    found = cell("1P1D@2", (100, 11), 4.0, records, 4, [MEAN, WORST])
    assert found["goodput_percent"] == {"mean": 50.0, "worst": 50.0}
    assert found["good_requests_per_s_per_gpu"] == {"mean": 0.5, "worst": 0.5}
    low, high = found["intervals_95"]["goodput_percent"]["mean"]
    assert 35 < low < 45 < 55 < high < 65
    assert found["ttft_ms"] == {"p50": 500.0, "p90": 2000.0, "p99": 2000.0}
    assert (found["requests"], found["failed"]) == (80, 10)


def test_phases_share_excludes_parts_and_later_phases() -> None:
    timed = record()
    timed.sent_s = 100.02  # planned for 100.0
    timed.server_ttft_s = 0.4
    timed.phase_s = {"prefill": 0.3, "kv_transfer": 0.08, "kv_transfer.read": 0.05, "decode": 9.0}
    timed.ttft_phase_s = {"prefill": 0.3, "kv_transfer": 0.08}
    found = phase_times([timed, record()])
    assert found["phase_ms"]["kv_transfer.read"] == pytest.approx(
        dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 50.0)
    )
    assert found["named_ttft_percent"]["frontend"] == pytest.approx({"mean": 95.0, "lowest": 95.0})
    assert found["named_ttft_percent"]["client"] == pytest.approx(
        {"mean": 79.17, "lowest": 79.17}, abs=0.01
    )
    assert phase_times([record()]) == {}


def test_interval_narrows_with_more_values() -> None:
    few, many = ([float(n % 100) for n in range(count)] for count in (20, 2000))
    low, high = interval(few, mean)
    lower, higher = interval(many, mean)
    assert low < lower < mean(many) < higher
    assert higher - lower < 5
    assert high > low
    assert math.isnan(interval([], mean)[0])
    assert (quantile([3.0, 1.0, 2.0], 0.5), quantile([3.0, 1.0, 2.0], 0.99)) == (2.0, 3.0)


def test_rounds_when_every_figure_is_near_then_they_agree() -> None:
    assert agree({"a": 100.0, "b": 10.0}, {"a": 110.0, "b": 10.5}, 0.15)
    assert not agree({"a": 100.0, "b": 10.0}, {"a": 101.0, "b": 30.0}, 0.15)
    assert not agree({"a": math.nan}, {"a": math.nan}, 0.15), (
        "a round without an answer says nothing"
    )


def test_ladder_reports_the_highest_sustained_rate() -> None:
    def at(rate: float, percent: float) -> dict[str, Any]:
        share = {
            "topology": "2A",
            "gpus": 2,
            "input_tokens": 8,
            "output_tokens": 2,
            "requests_per_s": rate,
        }
        return share | {"goodput_percent": {"worst": percent}}

    assert kept_rates([at(1, 100), at(2, 91), at(4, 60)]) == [("2A", "8/2", "worst", 2, 1.0)]
    assert kept_rates([at(1, 50)]) == [("2A", "8/2", "worst", 0.0, 0.0)]


def test_devices_of_all_workers_are_counted() -> None:
    assert num_devices(topology(Plan(engine="vllm", model="m", gpus=(0, 1, 2, 3)), "1P1D@2")) == 4
    assert num_devices(topology(Plan(engine="mock", model="m"), "2A")) == 2


def test_log_when_kernels_were_compiled_then_they_are_counted() -> None:
    line = (
        "WARNING Triton kernel JIT compilation during inference: _topk_forward. This causes a"
        " latency spike"
    )
    assert compiled(["ready", line, line]) == 2


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("2X", "is no topology"),
        ("0A", "is no topology"),
        ("3A", "needs 3 GPUs"),
        ("2A@2", "needs 4"),
    ],
)
def test_wrong_topology_lists_the_possible_ones(
    word: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        open_loop.arguments(["--gpus", "0,1", "--topologies", word])
    assert exit_.value.code == 2
    assert part in capsys.readouterr().err


def test_default_limits_have_the_names_on_the_pages(tmp_path: Path) -> None:
    args = open_loop.arguments(["--engine", "mock", "--out", str(tmp_path / "r.json")])
    names = {limit.name for limit in open_loop.slos(args)}
    assert {"ttft_2s_tpot_20ms", "ttft_2s_tpot_40ms", "ttft_2s_gap_100ms"} <= names
