"""Loads that change: what is sent when, and what the share changes of a run were."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from benchmarks.gpu.load_change import (
    DecidedChange,
    Schedule,
    SeenShares,
    Segment,
    ServedRequest,
    arguments,
    decided_changes,
    paths,
    schedule,
    set_shares,
    share_changes,
    summary,
)
from benchmarks.stream import RequestRecord
from dynamo_trtllm.protocol.shares import Shares

PREFILL, DECODE = 0xA, 0xB
SPLIT = {PREFILL: Shares(1.0, 0.0), DECODE: Shares(0.0, 1.0)}
LINE = (
    "planner      | 2026-11-30T02:00:01.500Z INFO planner planner.decision_log: bench: decided change:"
    " 1 worker for prefill, 1 for decode"
)


def test_loads_follow_each_other_without_a_pause() -> None:
    found = schedule([Segment(100, 8, 4.0), Segment(10, 80, 6.0)], 50.0, seed=7)
    assert list(found.arrivals_s) == sorted(found.arrivals_s)
    assert {number for at, number in zip(*_columns(found), strict=True) if at < 50} == {0}
    assert {number for at, number in zip(*_columns(found), strict=True) if at >= 50} == {1}
    assert found.segments.count(0) == pytest.approx(200, rel=0.2)
    assert found.segments.count(1) == pytest.approx(300, rel=0.2)


def test_next_load_has_the_arrivals_that_it_has_alone() -> None:
    segments = [Segment(100, 8, 4.0), Segment(10, 80, 6.0)]
    other = [Segment(100, 8, 2.0), Segment(10, 80, 6.0)]
    found, slower = (schedule(loads, 50.0, seed=7) for loads in (segments, other))
    assert _of_second(found) == _of_second(slower)


def test_changes_are_those_that_the_planner_logged() -> None:
    other = LINE.replace("decided change", "decided fits")
    (found,) = decided_changes([other, LINE, "frontend | ready"])
    assert found.outcome == "change"
    assert found.reason == "1 worker for prefill, 1 for decode"
    assert found.at_s == datetime(2026, 11, 30, 2, 0, 1, 500_000, tzinfo=UTC).timestamp()


def test_change_counts_requests_that_follow_it_until_the_next() -> None:
    seen = [
        SeenShares(9.0, {PREFILL: Shares(1.0, 1.0), DECODE: Shares(1.0, 1.0)}),
        SeenShares(10.1, SPLIT),
    ]
    requests = [
        ServedRequest(9.9, PREFILL, DECODE),  # before
        ServedRequest(10.05, DECODE, PREFILL),  # placed before the frontend knew the shares
        ServedRequest(10.3, PREFILL, DECODE),
        ServedRequest(12.0, PREFILL, PREFILL),  # the decode worker had no space
        ServedRequest(13.0, DECODE, DECODE),  # the whole request
        ServedRequest(15.0, PREFILL, DECODE),  # after the next change
    ]
    decided = [DecidedChange(10.0, "change", "split"), DecidedChange(14.0, "drained", "done")]
    row, last = share_changes(decided, seen, requests)
    assert row["shares"] == {"a": [1.0, 0.0], "b": [0.0, 1.0]}
    assert (row["used_by_frontend_ms"], row["first_following_ms"]) == (100.0, 300.0)
    assert (row["requests_following"], row["requests_on_other_paths"]) == (2, 2)
    assert row["others_within_1_s"] == 1
    assert "shares" not in last  # the frontend was never seen to use it


def test_shares_that_are_set_change_the_prefill_worker() -> None:
    one, other = Shares(1.0, 0.0), Shares(0.0, 1.0)
    assert [shares for _, shares in set_shares([PREFILL, DECODE])] == [
        {PREFILL: one, DECODE: other},
        {PREFILL: other, DECODE: one},
        {PREFILL: Shares(1.0, 1.0), DECODE: Shares(1.0, 1.0)},
    ]


def test_paths_count_pairs_and_whole_requests() -> None:
    pairs = [(PREFILL, DECODE), (PREFILL, DECODE), (DECODE, DECODE), None]
    records = [RequestRecord(index=1, planned_s=0.0, workers=pair) for pair in pairs]
    assert paths(records) == {"a>b": 2, "b": 1}


def test_summary_adds_the_loads_of_a_topology() -> None:
    cells = [
        {"topology": "2E", "requests": 100, "failed": 0, "goodput_percent": {"slo": 90.0}},
        {"topology": "2E", "requests": 300, "failed": 1, "goodput_percent": {"slo": 50.0}},
    ]
    assert list(summary(cells)) == ["2E: 240 of 400 requests within the limits, 1 failed"]


@pytest.mark.parametrize("wrong", ["8192@4", "8192/256", "8192/256@0", "8192/256@x"])
def test_load_that_is_no_shape_and_rate_is_rejected(wrong: str) -> None:
    with pytest.raises(SystemExit):
        arguments(["--engine", "mock", "--loads", wrong])


def _columns(found: Schedule) -> tuple[tuple[float, ...], tuple[int, ...]]:
    return found.arrivals_s, found.segments


def _of_second(found: Schedule) -> list[float]:
    return [at for at, number in zip(*_columns(found), strict=True) if number == 1]
