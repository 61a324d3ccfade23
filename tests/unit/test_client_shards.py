"""How a load is parted among client processes, and how their figures come together."""

from __future__ import annotations

import pytest

from benchmarks.client_shards import split_load
from benchmarks.load_client import Load, ShardResult, summarize_shards
from benchmarks.stream import RequestRecord
from benchmarks.summary import BUSY_CORES, ProcessMeter, table

LOAD = Load(url="http://h", model="m", concurrency=10, requests=11, rate=0.0, seed=5)


def share(begun_s: float, ended_s: float, cpu_s: float) -> ShardResult:
    record = RequestRecord(
        index=1,
        planned_s=begun_s,
        first_s=begun_s + 1,
        last_s=begun_s + 1,
        output_tokens=2,
        events=2,
    )
    return ShardResult(records=[record], begun_s=begun_s, ended_s=ended_s, cpu_s=cpu_s)


def test_part_when_it_does_not_divide_then_nothing_is_lost() -> None:
    parts = split_load(LOAD, 3)
    assert [(part.concurrency, part.requests) for part in parts] == [(4, 4), (3, 4), (3, 3)]
    assert len({part.seed for part in parts}) == 3


def test_part_when_more_processes_than_streams_then_one_each() -> None:
    assert len(split_load(LOAD, 64)) == 10


def test_part_when_open_loop_then_the_rate_is_parted() -> None:
    parts = split_load(Load(url="http://h", model="m", rate=30.0, requests=9), 3)
    assert [(part.rate, part.requests) for part in parts] == [(10.0, 3)] * 3


def test_metered_when_shares_overlap_then_the_whole_span_counts() -> None:
    meter = ProcessMeter({})
    meter.start()
    found = summarize_shards([share(0.0, 4.0, 1.0), share(1.0, 5.0, 3.9)], meter, osl=2)
    assert (found["ok"], found["wall_s"], found["tokens_per_s"]) == (2, 5.0, 4 / 5)
    assert found["processes"]["client"]["cpu_s"] == pytest.approx(4.9)
    assert found["client_cores"] == pytest.approx(3.9 / 4)


def test_table_reports_a_busy_client_process() -> None:
    meter = ProcessMeter({})
    meter.start()
    found = summarize_shards([share(0.0, 1.0, BUSY_CORES / 2)], meter, osl=2)
    assert "raise --processes" not in table(found)
    found["client_cores"] = BUSY_CORES + 0.01
    assert "raise --processes" in table(found)
