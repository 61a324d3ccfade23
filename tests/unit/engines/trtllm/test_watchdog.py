"""When the watchdog of the trtllm engine ends the process, and when it does not."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from dynamo_trtllm.engines.trtllm import watchdog
from dynamo_trtllm.engines.trtllm.watchdog import (
    BLOCKED_S,
    DEAD_S,
    EXIT_STATUS,
    PERIOD_S,
    BlockingCalls,
    HangDetector,
    Watchdog,
    seconds_of_running,
)
from tests.kit.waiting import SOON_S

LONG_S = 100 * BLOCKED_S


class FakeLoop:
    """An event loop that tests turn by hand."""

    def __init__(self) -> None:
        self.is_turning = True
        self.runs = True
        self.closed = False
        self._waiting: list[Callable[[], object]] = []

    def is_running(self) -> bool:
        return self.runs

    def is_closed(self) -> bool:
        return self.closed

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        if self.is_turning:
            callback()
        else:
            self._waiting.append(callback)

    def turn(self) -> None:
        """Run what waits."""
        for callback in self._waiting:
            callback()
        self._waiting.clear()


class Watched:
    """A detector of blocked event loops, and the loop that it watches."""

    def __init__(self) -> None:
        self.loop: Any = FakeLoop()
        self.calls = BlockingCalls()
        self.failure = ""
        self.iterated_at = 0.0
        self.detector = HangDetector(
            self.loop, self.calls, lambda: self.failure, lambda: self.iterated_at
        )

    def look(self, seconds: float) -> list[str]:
        """Return the reasons of looks in as many seconds."""
        looks = round(seconds / PERIOD_S)
        return [reason for reason in (self.detector.look(PERIOD_S) for _ in range(looks)) if reason]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_look_at_dead_executor_with_stuck_loop_gives_reason(watched: Watched) -> None:
    watched.loop.is_turning = False
    watched.failure = "RuntimeError: a rank was lost"
    assert watched.look(DEAD_S) == []
    (reason,) = watched.look(PERIOD_S)
    assert "a rank was lost" in reason


def test_look_at_dead_executor_with_live_loop_gives_none(watched: Watched) -> None:
    watched.failure = "RuntimeError: a rank was lost"
    assert watched.look(LONG_S) == []


def test_look_at_loop_that_recovers_gives_no_reason(watched: Watched) -> None:
    watched.failure = "RuntimeError: a rank was lost"
    watched.loop.is_turning = False
    for _ in range(10):
        assert watched.look(DEAD_S - PERIOD_S) == []
        watched.loop.turn()
        assert watched.look(PERIOD_S) == []


def test_look_at_busy_loop_with_live_executor_gives_none(watched: Watched) -> None:
    watched.loop.is_turning = False
    assert watched.look(LONG_S) == []


def test_look_without_a_running_loop_gives_no_reason(watched: Watched) -> None:
    watched.loop.is_turning = False
    watched.loop.runs = False
    watched.failure = "RuntimeError: a rank was lost"
    assert watched.look(LONG_S) == []


def test_look_at_blocked_call_without_iterations_names_it(watched: Watched) -> None:
    with watched.calls.note("generate_async"):
        assert watched.look(BLOCKED_S) == []
        (reason,) = watched.look(PERIOD_S)
    assert "generate_async" in reason
    assert watched.look(LONG_S) == []


def test_look_when_each_call_is_another_one_then_no_reason(watched: Watched) -> None:
    for _ in range(10):
        with watched.calls.note("generate_async"):
            assert watched.look(BLOCKED_S) == []


def test_look_at_blocked_call_with_iterations_gives_none(watched: Watched) -> None:
    with watched.calls.note("generate_async"):
        for _ in range(10):
            watched.iterated_at += 1.0
            assert watched.look(BLOCKED_S) == []


@pytest.mark.parametrize("failure", ["", "RuntimeError: a rank was lost"])
def test_look_during_debugging_gives_no_reason(watched: Watched, failure: str) -> None:
    def trace(frame: FrameType, event: str, argument: Any) -> None:
        """As pdb, which stops in this thread."""

    watched.loop.is_turning = False
    watched.failure = failure
    frame = sys._getframe()
    frame.f_trace = trace
    try:
        with watched.calls.note("generate_async"):
            assert watched.look(LONG_S) == []
    finally:
        frame.f_trace = None


# --- the thread -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "counted"),
    [
        (0.0, 0.0),
        (PERIOD_S, PERIOD_S),
        (2 * PERIOD_S, 2 * PERIOD_S),
        (3600.0, 2 * PERIOD_S),
    ],
)
def test_suspended_time_does_not_count(seconds: float, counted: float) -> None:
    assert seconds_of_running(100.0, 100.0 + seconds) == counted


def test_watchdog_with_failing_looks_warns_once(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([OSError("no access")] * 3)
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()

    def recorded_failure() -> str:
        for failure in failures:
            raise failure
        return "RuntimeError: a rank was lost"

    monkeypatch.setattr(watchdog, "PERIOD_S", 0.001)
    monkeypatch.setattr(watchdog, "DEAD_S", 0.01)
    watched.loop.is_turning = False
    detector = HangDetector(watched.loop, watched.calls, recorded_failure, lambda: 0.0)
    Watchdog(detector, reasons.put).start()
    assert "a rank was lost" in reasons.get(timeout=SOON_S)
    assert [record.message for record in caplog.records] == [
        "the watchdog of the event loop could not look: OSError: no access"
    ]


def test_watchdog_when_the_loop_is_closed_then_it_ends(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    class Ended(Watchdog):
        def _run(self) -> None:
            super()._run()
            ended.set()

    monkeypatch.setattr(watchdog, "PERIOD_S", 0.001)
    watched.loop.closed = True
    watched.failure = "RuntimeError: a rank was lost"
    Ended(watched.detector, pytest.fail).start()
    assert ended.wait(SOON_S)


# A call of the library that never returns, after its executor has died.
BLOCKED = """
import asyncio, logging, time
from dynamo_trtllm.engines.trtllm import watchdog

watchdog.PERIOD_S = 0.05
watchdog.DEAD_S = 0.2

def generate_async():
    time.sleep(60)

async def main():
    loop = asyncio.get_running_loop()
    calls = watchdog.BlockingCalls()
    detector = watchdog.HangDetector(loop, calls, lambda: "a rank was lost", lambda: 0.0)
    watchdog.Watchdog(detector).start()
    generate_async()

logging.basicConfig()
asyncio.run(main())
"""


def test_process_whose_loop_is_blocked_ends_with_its_stack() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == EXIT_STATUS, done.stderr
    assert "a rank was lost" in done.stderr
    assert "stack of thread MainThread" in done.stderr
    assert "in generate_async" in done.stderr
