"""End this process when a call of TensorRT-LLM blocks the event loop for good.

`generate_async` and `abort` send over IPC in the caller's thread, which is the event loop's thread.
If the rank at the other end has died, they can block for ever (`IpcQueue.put` in executor/ipc.py,
called by `submit` and `abort_request` in executor/proxy.py, 1.0 to the 1.3 candidates). Then
nothing on the event loop runs: neither the engine's own checks nor the handler of a signal. So
another thread watches the event loop. Dynamo has such a thread for the same reason
(`_watch_fatal_error` in engine_monitor.py, 1.7).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from dynamo_trtllm.observability.logging import log_thread_stacks

log = logging.getLogger(__name__)

THREAD: Final = "trtllm-watchdog"  # name of the thread
PERIOD_S: Final = 0.5  # time between two looks at the event loop
# How long the event loop may stand still after the executor has died. A worker checks its engine
# every 2 s and ends by itself if the engine has failed. So after this time, the worker has missed
# two of these checks. No request can be answered any more.
DEAD_S: Final = 5.0
# How long one call of the library may block the event loop while the executor reports no iteration.
# Such a call only passes a message to another process, which takes milliseconds. After this time,
# frontends have long given up all streams of the worker (--stall-timeout-s), and its registration
# has expired (--lease-ttl-s).
BLOCKED_S: Final = 60.0
_REPORT_S: Final = 3.0  # longest wait for the log: the program that reads stderr may have stopped
# The same status as after EngineFailed. Supervisors restart the worker.
EXIT_STATUS: Final = 1


class BlockingCall:
    """One call of the library that is made in the event loop's thread."""

    def __init__(self, name: str) -> None:
        self.name = name


class BlockingCalls:
    """Notes which call of the library the event loop's thread is in."""

    def __init__(self) -> None:
        self.current: BlockingCall | None = None

    @contextmanager
    def note(self, name: str) -> Iterator[None]:
        """Note a call while the context is open. `name` is the library's function, for logs."""
        self.current = BlockingCall(name)
        try:
            yield
        finally:
            self.current = None


class HangDetector:
    """Decides from repeated looks whether the event loop hangs for good.

    The event loop may also stand still because it is busy, or because another thread holds the GIL.
    So it counts as hanging only if the executor has died, or if the event loop's thread is within
    one call of the library all the time. Time counts only while this process runs.

    Args:
        loop: the event loop on which the library is called. Create the detector in its thread.
        calls: the calls of the library.
        recorded_failure: returns the error with which the executor has died, as text; "" if it has
            not. The function may not block.
        iterated_at: returns when the executor last reported an iteration, of any clock.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        calls: BlockingCalls,
        recorded_failure: Callable[[], str],
        iterated_at: Callable[[], float],
    ) -> None:
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._calls = calls
        self._recorded_failure = recorded_failure
        self._iterated_at = iterated_at
        # An event that the next turn of the event loop sets; None if no turn was requested.
        self._turn: threading.Event | None = None
        self._still_s = 0.0  # time since a turn of the event loop was requested
        # The call, and the time of the last iteration, as the last look saw them.
        self._seen: tuple[BlockingCall | None, float] = (None, 0.0)
        self._blocked_s = 0.0  # how long neither the call nor the iteration has changed

    @property
    def is_over(self) -> bool:
        """True once the event loop is closed: then there is nothing to look at."""
        return self._loop.is_closed()

    def look(self, passed_s: float) -> str:
        """Return why the process must end; "" if it need not.

        Call this method regularly, in a thread of its own.

        Args:
            passed_s: seconds since the last look during which this process ran.
        """
        failure = self._recorded_failure()
        if failure:
            self._note_turn(passed_s)
            if self._still_s < DEAD_S or self._is_debugged():
                return ""
            return (
                f"its executor has died ({failure}), and the event loop has not turned for"
                f" {self._still_s:.0f} s"
            )
        self._turn = None
        call = self._note_call(passed_s)
        if call is None or self._blocked_s < BLOCKED_S or self._is_debugged():
            return ""
        return (
            f"{call.name} has blocked the event loop for {self._blocked_s:.0f} s, and no iteration"
            " was reported"
        )

    def _note_turn(self, passed_s: float) -> None:
        """Count for how long the event loop has not turned, and ask it to turn."""
        if self._turn is not None and not self._turn.is_set() and self._loop.is_running():
            self._still_s += passed_s
            return
        self._turn = threading.Event()
        self._still_s = 0.0
        self._loop.call_soon_threadsafe(self._turn.set)

    def _note_call(self, passed_s: float) -> BlockingCall | None:
        """Return the call that the event loop's thread is in.

        Count for how long the thread has been in the same call without an iteration.
        """
        call = self._calls.current
        iterated_at = self._iterated_at()
        if call is not None and (call, iterated_at) == self._seen:
            self._blocked_s += passed_s
        else:
            self._blocked_s = 0.0
        self._seen = (call, iterated_at)
        return call

    def _is_debugged(self) -> bool:
        """Return True if a debugger such as pdb traces the event loop's thread."""
        frame: FrameType | None = sys._current_frames().get(self._loop_thread)
        while frame is not None:
            if frame.f_trace is not None:
                return True
            frame = frame.f_back
        return False


def seconds_of_running(since: float, now: float) -> float:
    """Return the seconds between two looks in which this process was running.

    If the time is much longer than PERIOD_S, this process, or the watchdog's thread in it, did not
    run for a part of it: it was stopped by a signal or a debugger, the machine was suspended, or
    another thread held the GIL. In this part the event loop could not run, either, so only
    2 * PERIOD_S count.
    """
    return min(now - since, 2 * PERIOD_S)


def end_process(reason: str) -> None:
    """Log the reason and what all threads do, and exit with EXIT_STATUS, without any cleanup.

    TensorRT-LLM's own cleanup would wait for its ranks, and use sockets in which another thread is
    blocked. Writing the log may block, too, so another thread writes it. `faulthandler` is not
    used, because it would hold the GIL while it writes.
    """

    def report() -> None:
        log.critical("TensorRT-LLM hangs, this process exits with %d: %s", EXIT_STATUS, reason)
        log_thread_stacks(log)

    reporting = threading.Thread(target=report, name="trtllm-hang-report", daemon=True)
    reporting.start()
    reporting.join(_REPORT_S)
    os._exit(EXIT_STATUS)


class Watchdog:
    """Run a HangDetector regularly on a thread, and end the process if it reports a hang.

    Args:
        detector: decides whether the event loop hangs.
        end: is called with the reason to end the process.
    """

    def __init__(self, detector: HangDetector, end: Callable[[str], None] = end_process) -> None:
        self._detector = detector
        self._end = end
        self._stop = threading.Event()
        self._failure = ""  # the error of the last look; "" if the look has not failed
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)

    def start(self) -> None:
        """Start the thread. Call this method once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for its end, which is short, because a look does not block.

        Idempotent.
        """
        self._stop.set()
        self._thread.join(PERIOD_S)

    def _run(self) -> None:
        looked_at = time.monotonic()
        while not self._stop.wait(PERIOD_S):
            now = time.monotonic()
            passed_s = seconds_of_running(looked_at, now)
            looked_at = now
            try:
                reason = self._detector.look(passed_s)
            except Exception as exc:  # noqa: BLE001 - logged; the next look may succeed
                reason = ""
                failure = f"{type(exc).__name__}: {exc}"
                if failure != self._failure and not self._detector.is_over:
                    log.warning("the watchdog of the event loop could not look: %s", failure)
                self._failure = failure
            else:
                self._failure = ""
            if self._detector.is_over:
                return
            if reason:
                self._end(reason)
                return
