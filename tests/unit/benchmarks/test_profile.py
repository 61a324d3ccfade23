"""benchmarks.profile: shapes, the steady part, phases, budgets, aiperf's line and records, what is
kept.
"""

from __future__ import annotations

import errno
import os
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.profile import aiperf, phases
from benchmarks.profile.budget import limit, missed
from benchmarks.profile.goodput import count_good, parse_goals
from benchmarks.profile.main import main, parser, shape_of
from benchmarks.profile.point import Target, load_of
from benchmarks.profile.report import warnings
from benchmarks.profile.result import Line, Point, Run, load_lines, load_run, save, summary
from benchmarks.profile.shapes import GUIDES, Level, Shape, find_shape
from benchmarks.profile.steady import steady, tokens_between
from benchmarks.stream import RequestRecord
from benchmarks.summary import summarize

SHAPE = Shape(name="s", isl=10, osl=5, concurrency=(2,))
TWO = Level(concurrency=2)
TARGET = Target(url="http://h:1", model="m", timeout_s=9)


def record(
    start_s: float, *, first: float = 1.0, last: float = 5.0, tokens: int = 5, **fields: Any
) -> RequestRecord:
    """Answered from `first` to `last` seconds after its start."""
    return RequestRecord(
        index=1,
        planned_s=start_s,
        status=200,
        first_s=start_s + first,
        last_s=start_s + last,
        end_s=start_s + last,
        events=tokens,
        output_tokens=tokens,
        gaps_s=array("d", [(last - first) / 4] * 4),
        **fields,
    )


def run(
    *walls_s: float,
    records: list[RequestRecord],
    gpus: int | None = None,
    goals_ms: dict[str, float] | None = None,
) -> Run:
    points = [
        Point(
            level=TWO,
            repetition=index,
            origin_s=0.0,
            figures=summarize(records, wall_s=wall_s, osl=5, processes={}),
            steady=steady(records, 2),
            good=count_good(records, goals_ms or {}),
        )
        for index, wall_s in enumerate(walls_s, 1)
    ]
    return Run(
        shape=SHAPE,
        url="u",
        model="m",
        driver="client",
        began_at="now",
        gpus=gpus,
        machine={},
        points=points,
    )


# --- shapes ---------------------------------------------------------------------------------------


def test_guides_when_read_then_their_numbers() -> None:
    found = {
        name: (s.isl, s.osl, s.concurrency, s.requests, s.warmup_at(s.levels[0]))
        for name, s in GUIDES.items()
    }
    assert found == {
        "prompts-32k": (32000, 256, (256,), 6144, 1000),
        "answers-2k": (1000, 2000, (2048,), 6144, 1000),
        "answers-1k": (128, 1000, (3600,), 36000, 3600),
        "prompts-8k": (8192, 1024, (1536,), 15360, 1536),
    }


def test_warmup_has_no_more_requests_than_the_run() -> None:
    many = Shape(name="s", isl=1, osl=1, concurrency=(4,), requests=16, warmup=1000)
    assert many.warmup_at(many.levels[0]) == 16
    few = Shape(name="s", isl=1, osl=1, concurrency=(64,), requests=16)
    assert few.warmup_at(few.levels[0]) == 16


def test_shape_at_rates_sends_a_minute_of_requests() -> None:
    shape = Shape(name="s", isl=1, osl=1, request_rate=(0.5, 2.0))
    assert [str(level) for level in shape.levels] == ["0.5 requests/s", "2 requests/s"]
    assert [shape.requests_at(level) for level in shape.levels] == [30, 120]
    assert [shape.warmup_at(level) for level in shape.levels] == [1, 2]


@pytest.mark.parametrize(
    ("words", "name", "levels", "requests"),
    [
        ([], "laptop", ["concurrency 1", "concurrency 4"], 16),
        (["--isl", "500", "--num-prompts", "9"], "500-32", ["concurrency 1", "concurrency 4"], 9),
        (["--isl", "8k", "--osl", "1K"], "8000-1024", ["concurrency 1", "concurrency 4"], 16),
        (["--request-rate", "2,4.5"], "laptop", ["2 requests/s", "4.5 requests/s"], 120),
        (["--request-rate", "2", "--num-prompts", "7"], "laptop", ["2 requests/s"], 7),
    ],
)
def test_flags_change_a_shape(
    words: list[str], name: str, levels: list[str], requests: int
) -> None:
    shape = shape_of(parser().parse_args(words))
    assert shape.name == name
    assert [str(level) for level in shape.levels] == levels
    assert shape.requests_at(shape.levels[0]) == requests


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--concurrency", "1,,2"], "expected numbers with commas"),
        (["--num-prompts", "9" * 20], "concurrency 1 has more than 10000000 requests"),
        (["--request-rate", "1e300"], "more than 10000000 requests"),
        (["--request-rate", "1e-9"], "take more than a day"),
        (["--request-rate", "0.001", "--num-prompts", "90"], "take more than a day"),
    ],
)
def test_load_that_can_not_end_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape_of(parser().parse_args(words))


@pytest.mark.parametrize("wait", ["nan", "0", "-1", "1e300", "x"])
def test_wait_that_makes_no_sense_is_refused(wait: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(["--timeout-s", wait])
    assert "--timeout-s" in capsys.readouterr().err


# --- goodput --------------------------------------------------------------------------------------


def test_goodput_counts_requests_that_meet_all_goals() -> None:
    # 4 gaps of 1 s, and of 2 s
    records = [record(0.0), record(0.0, last=9.0), record(0.0, error="timeout")]
    counts = {
        "ttft": count_good(records, {"ttft": 1000}),
        "tpot": count_good(records, {"tpot": 1500}),
        "e2el": count_good(records, {"e2el": 5000}),
        "gap": count_good(records, {"gap": 999}),
        "both": count_good(records, {"ttft": 1000, "gap": 1000}),
    }
    assert counts == {"ttft": 2, "tpot": 1, "e2el": 1, "gap": 0, "both": 1}
    assert count_good(records, {}) is None
    found = summary(run(10.0, records=records, goals_ms={"ttft": 1000}))[TWO]
    assert found["goodput_requests_per_s"].median == 0.2
    assert found["good_share"].median == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("tpit:9", "Did you mean tpot"),
        ("speed:9", "Goals: ttft"),
        ("ttft", "not ttft:MILLISECONDS"),
        ("ttft:nan", "is not ttft:MILLISECONDS"),
        ("ttft:-1", "above 0"),
    ],
)
def test_goal_that_makes_no_sense_is_refused(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_goals([word])
    assert parse_goals(["ttft:2000", "tpot:20"]) == {"ttft": 2000, "tpot": 20}


def test_laptop_shape_when_read_then_the_demo_models_can_take_it() -> None:
    shape = find_shape("laptop")
    assert shape.isl + shape.osl < 8192 // 2
    assert shape.requests * len(shape.concurrency) * shape.osl <= 2000  # ends within a minute


def test_shape_when_in_a_file_then_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("{name: mine, isl: 7, osl: 3, concurrency: [1, 4]}")
    shape = find_shape(str(path))
    assert (shape.isl, shape.osl, shape.concurrency) == (7, 3, (1, 4))
    assert shape.requests_at(Level(concurrency=4)) == 40


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{name: mine, isl: 7, osl: 3, concurency: [1]}", "concurency"),
        ("{name: mine, isl: 7, osl: 3, concurrency: []}", "either concurrency or request_rate"),
        (
            "{name: mine, isl: 7, osl: 3, concurrency: [1], request_rate: [1]}",
            "either concurrency or request_rate",
        ),
        ("{name: mine, isl: 7, osl: 3, request_rate: [-1]}", "above 0"),
        ("{name: mine, isl: 0, osl: 3, concurrency: [1]}", "1 or more"),
        ("[]", "no shape|has no valid shape"),
    ],
)
def test_shape_when_its_file_is_wrong_then_what_to_change(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        find_shape(str(path))


def test_shape_when_unknown_then_the_nearest_is_named() -> None:
    with pytest.raises(ValueError, match="Did you mean answers-1k"):
        find_shape("answer-1k")


def test_load_repeated_has_other_prompts_and_the_guides_body() -> None:
    level = Level(concurrency=256)
    loads = [load_of(GUIDES["prompts-32k"], TARGET, level, repetition) for repetition in (1, 2)]
    assert loads[0].seed != loads[1].seed
    assert loads[0].extra == {"min_tokens": 256, "nvext": {"ignore_eos": True}}
    assert loads[0].ignore_eos
    assert (loads[0].requests, loads[0].concurrency) == (6144, 256)


# --- steady ---------------------------------------------------------------------------------------


def test_tokens_when_a_window_cuts_a_request_then_its_part() -> None:
    one = record(0.0)  # first at 1 s, then one a second up to 5 s
    assert tokens_between(one, 0.0, 10.0) == pytest.approx(5)
    assert tokens_between(one, 1.0, 3.0) == pytest.approx(3)
    assert tokens_between(one, 3.0, 9.0) == pytest.approx(2)
    assert tokens_between(one, 6.0, 9.0) == 0
    assert tokens_between(record(0.0, tokens=1, last=1.0), 0.5, 2.0) == 1


def test_steady_excludes_start_and_end() -> None:
    records = [record(at) for at in (0.0, 0.0, 5.0, 5.0, 10.0, 10.0)]  # two lanes, three rounds
    found = steady(records, 2)
    assert found is not None
    assert (found.begin_s, found.end_s) == (1.0, 10.0)
    # rounds of 5 tokens by two lanes: two whole rounds, each in 5 of the window's 9 seconds
    assert found.output_tokens_per_s == pytest.approx(20 / 9)
    assert found.requests_per_s == pytest.approx(4 / 9)


def test_steady_when_no_lane_sent_twice_then_none() -> None:
    assert steady([record(0.0), record(0.0)], 2) is None
    assert steady([], 2) is None


# --- phases ---------------------------------------------------------------------------------------

METRICS_TEXT = """
# TYPE dynamo_trtllm_phase_seconds histogram
dynamo_trtllm_phase_seconds_bucket{le="1.0",model="m",phase="prefill"} 4
dynamo_trtllm_phase_seconds_count{model="m",phase="prefill"} 4
dynamo_trtllm_phase_seconds_sum{model="m",phase="prefill"} 2.0
dynamo_trtllm_phase_seconds_count{model="n",phase="prefill"} 1
dynamo_trtllm_phase_seconds_sum{model="n",phase="prefill"} 0.5
dynamo_trtllm_phase_seconds_count{model="m",phase="kv_transfer"} 0
dynamo_trtllm_phase_seconds_sum{model="m",phase="kv_transfer"} 0
"""


def test_phases_when_read_twice_then_the_mean_between() -> None:
    after = phases.totals(METRICS_TEXT)
    assert after == {"prefill": (2.5, 5), "kv_transfer": (0.0, 0)}
    assert phases.means({"prefill": (0.5, 1)}, after) == {"prefill": 0.5}
    # of which those before the first token count, per request
    after |= {"receive": (0.25, 5), "decode": (9.0, 5)}
    assert phases.means({}, after) == {"prefill": 0.5, "receive": 0.05}


def test_phases_when_the_server_has_none_then_empty() -> None:
    assert phases.totals("# TYPE other counter\nother_total 1\n") == {}
    assert phases.read_totals("http://127.0.0.1:9") == {}


# --- results and budgets --------------------------------------------------------------------------


def test_summary_when_repeated_then_median_and_spread() -> None:
    records = [record(0.0), record(5.0)]
    found = summary(run(10.0, 20.0, 5.0, records=records, gpus=2))[TWO]
    assert (found["output_tokens_per_s"].low, found["output_tokens_per_s"].median) == (0.5, 1.0)
    assert found["output_tokens_per_s"].high == 2.0
    assert found["output_tokens_per_s_per_gpu"].median == 0.5
    assert found["ttft_p50_ms"].median == pytest.approx(1000)
    assert found["output_tokens_per_s_per_user"].median == pytest.approx(1.0)
    assert found["error_share"].median == 0


def test_run_when_saved_then_read_back_the_same(tmp_path: Path) -> None:
    records = [record(0.0), RequestRecord(index=2, planned_s=1.0, error="timeout", end_s=2.0)]
    kept = run(10.0, records=records)
    lines = [Line(level=TWO, repetition=1, record=one_record) for one_record in records]
    save(kept, lines, tmp_path / "new")
    assert load_run(tmp_path / "new") == kept
    assert load_lines(tmp_path / "new") == lines
    assert "2,output_tokens_per_s,0.5,0.5,0.5" in (tmp_path / "new" / "summary.csv").read_text()


def test_run_when_there_is_none_then_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no run"):
        load_run(tmp_path)
    with pytest.raises(ValueError, match="has no records"):
        load_lines(tmp_path)


def test_budget_when_missed_then_a_line_each() -> None:
    found = summary(run(10.0, records=[record(0.0)]))
    limits = [
        limit("output_tokens_per_s=0.6", is_floor=True),
        limit("ttft_p99_ms=999", is_floor=False),
        limit("steady_output_tokens_per_s=1", is_floor=True),
    ]
    assert missed(limits, found) == [
        "output_tokens_per_s at concurrency 2 is 0.5, under 0.6",
        "ttft_p99_ms at concurrency 2 is 1000, over 999",
        "steady_output_tokens_per_s at concurrency 2 was not measured",
    ]
    assert missed([limit("output_tokens_per_s=0.5", is_floor=True)], found) == []


@pytest.mark.parametrize(
    "text",
    [
        "tps=1",
        "ttft_p50=1",
        "output_tokens_per_s",
        "output_tokens_per_s=many",
        "output_tokens_per_s=nan",
    ],
)
def test_budget_when_it_makes_no_sense_then_what_to_change(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"Did you mean|Metrics:|is not METRIC=VALUE|pass a number"
    ):
        limit(text, is_floor=True)


def test_warnings_when_figures_are_worth_less_then_said() -> None:
    short = record(0.0, tokens=4)
    short.events = 2
    found = " ".join(
        warnings(
            run(10.0, records=[short, RequestRecord(index=2, planned_s=1.0, error="overloaded")])
        )
    )
    assert "1 request failed (overloaded 1 time)" in found
    assert "1 answer did not have 5 tokens" in found
    assert "0.50 stream events per token" in found
    assert "too few requests for a steady state" in found


# --- aiperf ---------------------------------------------------------------------------------------


def test_aiperf_when_asked_for_a_guide_then_the_guides_line() -> None:
    words = aiperf.command(
        Path("aiperf"), GUIDES["prompts-32k"], TARGET, Level(concurrency=256), Path("out")
    )
    found = dict(pairwise(words))
    guide = {
        "--endpoint-type": "chat",
        "--endpoint": "/v1/chat/completions",
        "--synthetic-input-tokens-mean": "32000",
        "--synthetic-input-tokens-stddev": "0",
        "--output-tokens-mean": "256",
        "--output-tokens-stddev": "0",
        "--concurrency": "256",
        "--request-count": "6144",
        "--warmup-request-count": "1000",
        "--num-dataset-entries": "8000",
        "--random-seed": "100",
    }
    assert guide.items() <= found.items()
    assert "--streaming" in words
    assert orjson.loads(found["--extra-inputs"]) == {
        "max_tokens": 256,
        "min_tokens": 256,
        "ignore_eos": True,
        "nvext": {"ignore_eos": True},
    }


def test_aiperf_records_are_read_without_warmup(tmp_path: Path) -> None:
    """The shape of aiperf 0.13.0's own lines."""
    at = {"request_start_ns": 5_000_000_000, "request_end_ns": 6_000_000_000}
    metrics = {
        "time_to_first_token": {"value": 100.0, "unit": "ms"},
        "inter_token_latency": {"value": 200.0, "unit": "ms"},
        "inter_chunk_latency": {"value": [200.0, 200.0], "unit": "ms"},
        "output_sequence_length": {"value": 3, "unit": "tokens"},
        "usage_prompt_tokens": {"value": 70, "unit": "tokens"},
    }
    lines = [
        {"metadata": at | {"benchmark_phase": "warmup"}, "metrics": metrics},
        {"metadata": at | {"benchmark_phase": "profiling"}, "metrics": metrics},
        {
            "metadata": at | {"benchmark_phase": "profiling"},
            "error": {"code": 503, "type": "ServerError"},
        },
    ]
    path = tmp_path / "profile_export.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps(line) for line in lines))
    good, bad = aiperf.read(path)
    assert (good.planned_s, good.first_s, good.last_s, good.end_s) == pytest.approx(
        (5.0, 5.1, 5.5, 6.0)
    )
    assert (good.output_tokens, good.prompt_tokens, good.events, list(good.gaps_s)) == (
        3,
        70,
        3,
        [0.2, 0.2],
    )
    assert (bad.error, bad.status, bad.is_ok) == ("ServerError", 503, False)


def test_aiperf_when_it_wrote_nothing_then_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't be read"):
        aiperf.read(tmp_path / "profile_export.jsonl")


def test_without_matplotlib_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report needs it only at its first chart, when the load has run."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        main(["--shape", "laptop", "--url", "http://127.0.0.1:1"])
    assert "the report needs matplotlib" in capsys.readouterr().err


class FakeLoad:
    """Stands in for the load. Its result can't be written if a disk is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.was_sent = False
        monkeypatch.setattr("benchmarks.profile.main.choose_model", lambda *_: ("m", None))
        monkeypatch.setattr("benchmarks.profile.main._run", self._send)

    def _send(self, *_: object) -> None:
        self.was_sent = True
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_unwritable_folder_is_an_error_before_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load = FakeLoad(monkeypatch)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        main(["--url", "http://h", "--out", str(tmp_path / "file")])
    assert "file can't be written: File exists; pass another path" in caplog.text
    assert not load.was_sent


def test_full_disk_after_the_load_gives_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load = FakeLoad(monkeypatch)
    with pytest.raises(SystemExit, match="2"):
        main(["--url", "http://h", "--out", str(tmp_path / "out")])
    assert "No space left on device; free space" in caplog.text
    assert load.was_sent
    assert not (tmp_path / "out").exists()
