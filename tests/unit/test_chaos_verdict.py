"""How a chaos run judges one request by its record."""

from __future__ import annotations

from array import array

import pytest

from benchmarks.chaos.verdict import (
    Expected,
    Outcome,
    Verdict,
    classify,
    evaluate,
    longest_silence_s,
)
from benchmarks.stream import RequestRecord
from tests.kit.cases import each_case

TEXTS = ("one two three", "four five six")
RULES = Expected(texts=TEXTS, osl=3, hung_s=5.0)


def record(**changes: object) -> RequestRecord:
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
    return RequestRecord(**{**fields, **changes})  # type: ignore[arg-type]


EARLY: dict[str, object] = {
    "first_s": None,
    "last_s": None,
    "text": None,
    "finish": None,
    "output_tokens": 0,
}


@each_case(
    ("changes", "kind"),
    [
        ({}, Outcome.RIGHT),
        ({"index": 2, "text": TEXTS[1]}, Outcome.RIGHT),
        ({"index": 3}, Outcome.RIGHT),
        ({"index": 2}, Outcome.WRONG),
        ({"text": "one two four"}, Outcome.WRONG),
        ({"text": "one two"}, Outcome.WRONG),
        ({"output_tokens": 2}, Outcome.WRONG),
        ({"finish": "stop"}, Outcome.WRONG),
        ({"finish": None}, Outcome.WRONG),
        ({"error": "disconnected", "text": "one"}, Outcome.NAMED_ERROR),
        ({"error": "disconnected", "text": "two"}, Outcome.WRONG),
        ({"error": "overloaded", "status": 429, **EARLY}, Outcome.NAMED_ERROR),
        ({"error": "http_500", "status": 500, **EARLY}, Outcome.LOST),
        ({"error": "bad_http", **EARLY}, Outcome.LOST),
        ({"error": "no_end", "text": "one"}, Outcome.LOST),
        ({"error": "cut", "text": "one"}, Outcome.LOST),
        ({"error": "connect", "status": 0, **EARLY}, Outcome.LOST),
        ({"error": "timeout", "text": "one"}, Outcome.HUNG),
        ({"first_s": 16.0, "last_s": 17.0, "end_s": 17.1}, Outcome.HUNG),
        ({"gaps_s": array("d", [0.5, 5.5])}, Outcome.HUNG),
        ({"end_s": 18.0}, Outcome.HUNG),
        ({"error": "overloaded", "status": 429, **EARLY, "end_s": 16.0}, Outcome.HUNG),
    ],
)
def test_kind_when_a_request_ended_so_then_it_is(changes: dict[str, object], kind: Outcome) -> None:
    assert classify(record(**changes), RULES) is kind


@pytest.mark.parametrize("error", ["connect", "cut", "no_end"])
def test_broken_connections_of_dead_frontend_are_cut(error: str) -> None:
    rules = Expected(texts=TEXTS, osl=3, hung_s=5.0, frontend_dies=True)
    assert classify(record(error=error, text="one"), rules) is Outcome.CUT
    assert classify(record(error=error, text="two"), rules) is Outcome.WRONG
    assert classify(record(error="timeout"), rules) is Outcome.HUNG


def test_silence_when_no_text_came_then_the_whole_wait() -> None:
    assert longest_silence_s(record(**EARLY, end_s=14.0)) == pytest.approx(4.0)


def test_judged_counts_all_ends_with_reasons() -> None:
    records = [
        record(),
        record(error="disconnected", text="one"),
        record(error="overloaded", **EARLY),
        record(error="overloaded", **EARLY),
        record(text="other", events=2),
    ]
    verdict = evaluate("kill-decode", records, RULES)
    verdict.add_leaks(["decode-1 running 1"])
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
    assert verdict.early_errors == 2
    # of those refused, from their sending to their end
    assert verdict.silence_s == pytest.approx(2.1)
    assert verdict.notes == [
        "named_error: disconnected after its first token: 1",
        "named_error: overloaded before its first token: 2",
        "wrong: request 1 ended with length after 2 chunks: 1",
        "leaked: decode-1 running 1",
    ]


@pytest.mark.parametrize("kind", [Outcome.WRONG, Outcome.LOST, Outcome.HUNG])
def test_verdict_of_inexcusable_end_is_not_good(kind: Outcome) -> None:
    verdict = Verdict(fault="f")
    assert verdict.is_good
    verdict.counts[Outcome.NAMED_ERROR] += 3
    verdict.counts[Outcome.CUT] += 3
    assert verdict.is_good
    verdict.counts[kind] += 1
    assert not verdict.is_good


def test_verdict_when_something_leaked_then_not_good() -> None:
    verdict = Verdict(fault="f")
    verdict.add_leaks(["a process"])
    assert not verdict.is_good


def test_verdict_of_worker_end_without_fault_is_not_good() -> None:
    verdict = Verdict(fault="f")
    verdict.add_replaced(["decode-2"])
    assert not verdict.is_good
    assert verdict.notes == ["replaced: decode-2, which the fault did not target"]
