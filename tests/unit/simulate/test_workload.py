"""Traces and shapes become requests; what is wrong with a trace has the number of its line."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest

from benchmarks.load_client import Load, arrival_times
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.simulate.workload import (
    Shape,
    check_context,
    parse_shape,
    poisson_arrivals,
    read_trace,
)


def line(at_ms: float, tokens: int, *blocks: int, output: int = 5) -> str:
    request = {
        "timestamp": at_ms,
        "input_length": tokens,
        "output_length": output,
        "hash_ids": blocks,
    }
    return json.dumps(request)


def written(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


GOOD = line(0, 600, 0, 1)


def test_trace_has_times_lengths_and_blocks(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, GOOD, line(3000, 10, 7)), speed=2.0)
    assert (first.at_s, first.input_tokens, first.output_tokens) == (0.0, 600, 5)
    assert (second.at_s, second.blocks) == (1.5, (7,))


def test_requests_of_rounded_timestamps_are_spread(tmp_path: Path) -> None:
    """The differences between times of Mooncake's traces are from 2,999 to 3,003 ms."""
    lines = [line(at_ms, 600, 0, 1) for at_ms in (0, 0, 2999, 9000, 9000, 9000)]
    times_s = [one.at_s for one in read_trace(written(tmp_path, *lines))]
    assert times_s == [0.0, 1.5, 2.999, 9.0, 10.0, 11.0]
    at_twice_the_speed = read_trace(written(tmp_path, *lines), speed=2.0)
    assert [one.at_s for one in at_twice_the_speed] == [time_s / 2 for time_s in times_s]


def test_spread_requests_stay_in_order(tmp_path: Path) -> None:
    times_ms = [0, 2999, 2999, 3001, *[6000] * 1000, 8996]
    trace = read_trace(written(tmp_path, *(line(at_ms, 600, 0, 1) for at_ms in times_ms)))
    times_s = [one.at_s for one in trace]
    assert times_s[:4] == pytest.approx([0.0, 2.999, 3.999, 4.999])
    assert times_s == sorted(times_s)


@pytest.mark.parametrize("times_ms", [(0, 0, 0), (0, 0, 3000, 3020), (0, 6000, 6000), (0, 0, 7500)])
def test_requests_of_exact_timestamps_come_at_once(
    tmp_path: Path, times_ms: tuple[int, ...]
) -> None:
    trace = read_trace(written(tmp_path, *(line(at_ms, 600, 0, 1) for at_ms in times_ms)))
    assert [one.at_s for one in trace] == [at_ms / 1000 for at_ms in times_ms]


def test_byte_order_mark_of_a_trace_is_left_out(tmp_path: Path) -> None:
    assert len(read_trace(written(tmp_path, f"\ufeff{GOOD}", GOOD))) == 2


def test_equal_blocks_have_equal_tokens(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, GOOD, line(0, 700, 0, 2)))
    assert first.prompt()[:512] == second.prompt()[:512]
    assert first.prompt()[512:514] != second.prompt()[512:514]
    assert (len(first.prompt()), len(second.prompt())) == (600, 700)


def test_trace_may_be_compressed_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(f"{GOOD}\n{GOOD}\n".encode()))
    assert len(read_trace(path, num_requests=1)) == 1


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([GOOD, "{"], "line 2 is not a request"),
        ([GOOD, '{"timestamp": 1}'], "line 2 is not a request"),
        ([line(5, 600, 0, 1), GOOD], "line 2 has a timestamp before"),
        ([line(0, 600, 0)], "line 1 .* need 2 hash_ids"),
        ([line(0, 600, 0, -1)], "line 1 .* need 2 hash_ids"),
        ([line(0, 0)], "line 1 .* at least 1"),
        ([line(0, 10, 1, output=0)], "line 1 .* at least 1"),
        ([line(-1, 10, 1)], "line 1 .* at least 0"),
        ([""], "line 1 is not a request"),
    ],
)
def test_wrong_line_is_named(tmp_path: Path, lines: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_trace(written(tmp_path, *lines))


def test_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing.jsonl can't be read"):
        read_trace(tmp_path / "missing.jsonl")
    path = tmp_path / "broken.gz"
    path.write_bytes(gzip.compress(GOOD.encode() * 9)[:-9])
    with pytest.raises(ConfigError, match=r"broken.gz can't be read"):
        read_trace(path)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match="has no request"):
        read_trace(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match="speed"):
        read_trace(written(tmp_path, GOOD), speed=0.0)


def test_shape_may_have_suffixes() -> None:
    assert parse_shape("8K/0.5k") == Shape(8192, 500)


@pytest.mark.parametrize("text", ["", "8192", "8192/0", "0/1", "8192/256/1", "-1/5"])
def test_text_that_is_no_shape_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a shape"):
        parse_shape(text)


def test_arrivals_of_a_seed_are_equal() -> None:
    shape = parse_shape("100/5")
    arrivals = poisson_arrivals(shape, 4.0, 50, seed=3)
    assert arrivals == poisson_arrivals(shape, 4.0, 50, seed=3)
    assert arrivals != poisson_arrivals(shape, 4.0, 50, seed=4)
    assert 5 < arrivals[-1].at_s < 25
    assert arrivals[0].prompt() != arrivals[1].prompt()


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_rate_must_be_positive(rate: float) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        poisson_arrivals(Shape(1, 1), rate, 1, seed=1)


def test_request_beyond_the_context_has_its_number() -> None:
    arrivals = poisson_arrivals(Shape(100, 20), 1.0, 2, seed=1)
    check_context(arrivals, 120)
    with pytest.raises(ConfigError, match=r"request 1 has 100 prompt and 20 .* is 119"):
        check_context(arrivals, 119)


def test_measured_arrivals_are_known() -> None:
    # 83 requests arrived within 40 s in the open loops of two H200.
    load = Load(url="http://localhost", model="", rate=2.0, seed=7)
    within = itertools.takewhile(lambda at_s: at_s <= 40, arrival_times(load))
    assert len(list(within)) == 83
