"""How a chaos run judges one request by its record."""

from __future__ import annotations

from array import array

import pytest

from benchmarks.chaos.judge import Kind, Rules, Verdict, judged, kind_of, longest_silence_s
from benchmarks.stream import Record

TEXTS = ("one two three", "four five six")
RULES = Rules(texts=TEXTS, osl=3, hung_s=5.0)


def record(**changes: object) -> Record:
    """A right one of the first prompt, but for the changes."""
    fields: dict[str, object] = {
        "index": 1,
        "planned_s": 10.0,
        "status": 200,
        "first_s": 11.0,
        "last_s": 12.0,
        "end_s": 12.1,
        "output_tokens": 3,
        "text": TEXTS[0],
        "finish": "length",
        "gaps_s": array("d", [0.5, 0.5]),
    }
    return Record(**{**fields, **changes})  # type: ignore[arg-type]


EARLY: dict[str, object] = {"first_s": None, "last_s": None, "text": None, "finish": None, "output_tokens": 0}


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, Kind.RIGHT),
        ({"index": 2, "text": TEXTS[1]}, Kind.RIGHT),
        ({"index": 3}, Kind.RIGHT),
        ({"index": 2}, Kind.WRONG),
        ({"text": "one two four"}, Kind.WRONG),
        ({"text": "one two"}, Kind.WRONG),
        ({"output_tokens": 2}, Kind.WRONG),
        ({"finish": "stop"}, Kind.WRONG),
        ({"finish": None}, Kind.WRONG),
        ({"error": "disconnected", "text": "one"}, Kind.NAMED_ERROR),
        ({"error": "disconnected", "text": "two"}, Kind.WRONG),
        ({"error": "overloaded", "status": 429, **EARLY}, Kind.NAMED_ERROR),
        ({"error": "http_500", "status": 500, **EARLY}, Kind.LOST),
        ({"error": "bad_http", **EARLY}, Kind.LOST),
        ({"error": "no_end", "text": "one"}, Kind.LOST),
        ({"error": "cut", "text": "one"}, Kind.LOST),
        ({"error": "connect", "status": 0, **EARLY}, Kind.LOST),
        ({"error": "timeout", "text": "one"}, Kind.HUNG),
        ({"first_s": 16.0, "last_s": 17.0, "end_s": 17.1}, Kind.HUNG),
        ({"gaps_s": array("d", [0.5, 5.5])}, Kind.HUNG),
        ({"end_s": 18.0}, Kind.HUNG),
        ({"error": "overloaded", "status": 429, **EARLY, "end_s": 16.0}, Kind.HUNG),
    ],
)
def test_kind_when_a_request_ended_so_then_it_is(changes: dict[str, object], kind: Kind) -> None:
    assert kind_of(record(**changes), RULES) is kind


@pytest.mark.parametrize("error", ["connect", "cut", "no_end"])
def test_kind_when_the_frontend_dies_then_broken_connections_are_cut(error: str) -> None:
    rules = Rules(texts=TEXTS, osl=3, hung_s=5.0, frontend_dies=True)
    assert kind_of(record(error=error, text="one"), rules) is Kind.CUT
    assert kind_of(record(error=error, text="two"), rules) is Kind.WRONG
    assert kind_of(record(error="timeout"), rules) is Kind.HUNG


def test_silence_when_no_text_came_then_the_whole_wait() -> None:
    assert longest_silence_s(record(**EARLY, end_s=14.0)) == pytest.approx(4.0)


def test_judged_when_requests_ended_in_all_ways_then_counted_with_reasons() -> None:
    records = [
        record(),
        record(error="disconnected", text="one"),
        record(error="overloaded", **EARLY),
        record(error="overloaded", **EARLY),
        record(text="other", events=2),
    ]
    verdict = judged("kill-decode", records, RULES)
    verdict.leak(["decode-1 running 1"])
    assert verdict.row() == {
        "fault": "kill-decode",
        "sent": 5,
        "right": 1,
        "named_error": 3,
        "cut": 0,
        "wrong": 1,
        "lost": 0,
        "hung": 0,
        "leaked": 1,
    }
    assert verdict.early == 2
    assert verdict.silence_s == pytest.approx(2.1)  # of those refused, from their sending to their end
    assert verdict.notes == [
        "named_error: disconnected after its first token: 1",
        "named_error: overloaded before its first token: 2",
        "wrong: request 1 ended length after 2 pieces: 1",
        "leaked: decode-1 running 1",
    ]


@pytest.mark.parametrize("kind", [Kind.WRONG, Kind.LOST, Kind.HUNG])
def test_verdict_when_something_inexcusable_happened_then_not_good(kind: Kind) -> None:
    verdict = Verdict(fault="f")
    assert verdict.is_good
    verdict.counts[Kind.NAMED_ERROR] += 3
    verdict.counts[Kind.CUT] += 3
    assert verdict.is_good
    verdict.counts[kind] += 1
    assert not verdict.is_good


def test_verdict_when_something_leaked_then_not_good() -> None:
    verdict = Verdict(fault="f")
    verdict.leak(["a process"])
    assert not verdict.is_good


def test_verdict_when_a_worker_ended_that_nobody_touched_then_not_good() -> None:
    verdict = Verdict(fault="f")
    verdict.replace(["decode-2"])
    assert not verdict.is_good
    assert verdict.notes == ["replaced: decode-2, though the fault was not its"]
