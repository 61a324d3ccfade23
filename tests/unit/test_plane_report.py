"""Medians, ratios and doubts of the plane benchmark, from figures that are made up."""

from __future__ import annotations

from typing import Any

from benchmarks.plane.measure import Run
from benchmarks.plane.report import (
    Bar,
    compare_bars,
    cpu,
    median_of,
    notes,
    ratios_at_once,
    table,
)
from benchmarks.summary import summarize


def run(side: str, us_per_token: float, events_per_text_token: float = 1.0, **changes: Any) -> Run:
    found = summarize(
        [], wall_s=1.0, osl=2, processes={"frontend": {"cpu_ms_per_1k_tokens": us_per_token}}
    )
    found.update(changes)  # type: ignore[typeddict-item]
    return {
        "point": "paced-32",
        "side": side,
        "repetition": 0,
        "load_average": 1.0,
        "others_cores": 0.5,
        "events_per_text_token": events_per_text_token,
        "figures": found,
    }


BAR = Bar("frontend CPU", "paced-32", cpu("frontend"), 0.6)


def test_middle_when_three_runs_then_the_median_of_that_side() -> None:
    runs = [run("ours", 1), run("ours", 9), run("ours", 2), run("theirs", 50)]
    assert median_of(runs, "paced-32", "ours", cpu("frontend")) == 2
    assert median_of(runs, "paced-64", "ours", cpu("frontend")) is None


def test_cpu_when_several_processes_then_their_sum() -> None:
    found = run("ours", 3)["figures"]
    found["processes"]["nats"] = {"cpu_ms_per_1k_tokens": 4.0}
    assert cpu("frontend", "nats", "absent")(found) == 7


def test_cpu_counts_all_workers_of_a_role() -> None:
    found = run("ours", 3)["figures"]
    found["processes"] |= {
        name: {"cpu_ms_per_1k_tokens": 4.0} for name in ("decode", "decode-2", "prefill-2")
    }
    assert cpu("decode")(found) == 8


def test_judged_when_at_the_bar_then_reached() -> None:
    assert "0.60  0.60  reached" in compare_bars(
        [run("ours", 6), run("dynamo fastokens", 10)], [BAR]
    )


def test_judged_when_above_the_bar_then_missed() -> None:
    assert "0.61  0.60  MISSED" in compare_bars(
        [run("ours", 6.1), run("dynamo fastokens", 10)], [BAR]
    )


def test_judged_without_one_side_reports_nothing() -> None:
    assert len(compare_bars([run("ours", 6)], [BAR]).splitlines()) == 1


def test_notes_when_figures_can_be_trusted_then_none() -> None:
    assert notes([run("ours", 6)]) == []


def test_notes_report_merging_busy_client_and_failures() -> None:
    (merged,) = notes([run("ours", 6, events_per_text_token=0.5)])
    (busy,) = notes([run("ours", 6, client_cores=0.95)])
    (failed,) = notes([run("ours", 6, errors={"timeout": 1})])
    assert "0.50 events per text token" in merged
    assert "client was the bottleneck" in busy
    assert "requests failed" in failed


def test_table_when_printed_then_a_line_per_point_and_side() -> None:
    lines = table([run("ours", 6), run("ours", 8), run("theirs", 10)]).splitlines()
    assert [line[:18].split() for line in lines[1:]] == [
        ["paced-32", "ours"],
        ["paced-32", "theirs"],
    ]
    assert " 7.00 " in lines[1]


def test_at_once_when_pairs_then_ratios_within_each() -> None:
    # The machine was twice as slow in the second pair, for both.
    runs = [run("ours", 2), run("theirs", 1)]
    runs += [{**run("theirs", 2), "repetition": 1}, {**run("ours", 6), "repetition": 1}]
    assert "ours / theirs, at the same time: median 2.500, mean 2.500 ± 0.980 (2 pairs)" in (
        ratios_at_once(runs)
    )


def test_at_once_when_interrupted_then_whole_pairs_only() -> None:
    runs = [run("ours", 2), run("theirs", 1), {**run("ours", 6), "repetition": 1}]
    assert "median 2.000, mean 2.000 (1 pairs)" in ratios_at_once(runs)
