"""Ctrl-C while a load is measured: it arrives at no wrong moment, and keeps what was measured."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.interrupts import Interrupts, held_back
from benchmarks.profile import main
from benchmarks.profile.point import PointInterrupted, Target
from benchmarks.profile.result import Point
from benchmarks.profile.shapes import Shape
from benchmarks.stream import RequestRecord
from benchmarks.summary import summarize

SHAPE = Shape(name="s", isl=1, osl=1, concurrency=(1, 2), requests=1)
TARGET = Target(url="u", model="m", timeout_s=1.0, goals_ms={})
Measure = Callable[[Any], tuple[Point, list[RequestRecord]]]


def press() -> None:
    """Press Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


def test_first_interrupt_is_noted_and_a_second_one_raises() -> None:
    stopped: list[str] = []
    with Interrupts() as interrupts:
        with interrupts.stopping(lambda: stopped.append("before")):
            assert not interrupts.is_set
            press()
        with interrupts.stopping(lambda: stopped.append("after")):
            assert stopped == ["before", "after"]
        with pytest.raises(KeyboardInterrupt):
            press()
    assert stopped == ["before", "after"]


def test_interrupt_raises_where_that_is_wanted_and_afterwards() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.raising():
            press()
        press()
        assert interrupts.is_set
    with pytest.raises(KeyboardInterrupt):
        press()


def test_process_started_with_held_back_interrupts_ignores_them() -> None:
    code = "import signal; signal.raise_signal(signal.SIGINT); print('here')"
    with held_back():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.stdout == b"here\n"


def measured(number: int, *, num_records: int = 1) -> tuple[Point, list[RequestRecord]]:
    """Return a point and its records."""
    record = RequestRecord(index=1, planned_s=0.0, status=200, first_s=1.0, last_s=1.0, end_s=1.0)
    records = [record] * num_records
    level = SHAPE.levels[number]
    figures = summarize(records, wall_s=1.0, osl=1, processes={})
    return Point(level=level, repetition=1, origin_s=0.0, figures=figures, steady=None), records


def run_of(monkeypatch: pytest.MonkeyPatch, *points: Callable[[], Any]) -> tuple[int, bool]:
    """Run the points. Return how many are in the report, and whether it is complete."""
    left = iter(points)
    monkeypatch.setattr(main, "_measure", lambda *arguments: next(left)())
    args = argparse.Namespace(aiperf=False, gpus=None, repetitions=1)
    with Interrupts() as interrupts:
        run, lines, is_complete = main._run(args, SHAPE, TARGET, interrupts)
    assert len(lines) == len(run.points)
    return len(run.points), is_complete


def interrupted(number: int, *, num_records: int) -> Callable[[], Any]:
    def measure() -> Any:
        press()
        raise PointInterrupted(*measured(number, num_records=num_records))

    return measure


def test_interrupt_in_a_point_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_of(monkeypatch, interrupted(0, num_records=1)) == (1, False)


def test_interrupt_before_a_point_has_records_keeps_earlier_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = interrupted(1, num_records=0)
    assert run_of(monkeypatch, lambda: measured(0), begin) == (1, False)
    with pytest.raises(SystemExit, match="interrupted before a request was measured"):
        run_of(monkeypatch, interrupted(0, num_records=0))


def test_interrupt_at_the_end_of_a_point_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure() -> Any:
        press()
        return measured(0)

    assert run_of(monkeypatch, measure) == (1, False)
