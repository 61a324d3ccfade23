"""Run all fetches of a backend on one thread, one step at a time.

Several polling threads would contend for NIXL. A fetch is a generator. It yields when other fetches
may run, with the seconds since its last progress.
"""

from __future__ import annotations

import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeAlias

MAX_CONCURRENT_FETCHES = 16  # more would delay each fetch and speed up none
_SPIN_S = 0.0005  # poll without sleeping for this long (128 MiB take 0.35 ms over NVLink)
# After that, sleep this share of the time since the last progress.
_SLEEP_SHARE = 1 / 16
MAX_SLEEP_S = 0.001

PollSteps: TypeAlias = Iterator[float]


@dataclass(slots=True, eq=False)
class _PolledFetch:
    steps: PollSteps
    result: Future[None] = field(default_factory=Future)
    has_begun: bool = False
    waited_s: float = 0.0  # seconds since its last progress

    def begin(self) -> bool:
        """Mark the fetch as running. Return False if it was cancelled before."""
        if not self.has_begun:
            self.has_begun = self.result.set_running_or_notify_cancel()
        return self.has_begun

    def step(self) -> bool:
        """Take one step. Return whether more steps follow."""
        try:
            self.waited_s = next(self.steps)
        except StopIteration:
            self.result.set_result(None)
        except BaseException as exc:  # noqa: BLE001  raised where the fetch is awaited
            self.result.set_exception(exc)
        else:
            return True
        return False


class TransferPoller:
    """The polling thread. Fetches start in the order of `submit`.

    Args:
        name: the name of the thread.
        prepare: called on the thread at its start.
    """

    def __init__(self, name: str, prepare: Callable[[], None] = lambda: None) -> None:
        self._submitted: SimpleQueue[_PolledFetch | None] = SimpleQueue()
        self._waiting: deque[_PolledFetch] = deque()
        self._running: list[_PolledFetch] = []
        self._turn = 0
        self._closing = False
        self._no_sockets = select.poll()  # only its side effect is used, see `_receive`
        self._prepare = prepare
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def submit(self, steps: PollSteps, *, step_now: bool = False) -> Future[None]:
        """Queue a fetch.

        Its steps are taken to the end, unless the future is cancelled before the first step.

        Args:
            steps: the fetch.
            step_now: take the first step on the calling thread if no other fetch is queued, so that
                its reads start before the polling thread wakes up.

        Returns:
            A future that is done when the fetch has ended.
        """
        fetch = _PolledFetch(steps)
        is_first = (
            not self._waiting
            and self._submitted.empty()
            and len(self._running) < MAX_CONCURRENT_FETCHES
        )
        has_steps_left = True
        if step_now and is_first and fetch.begin():
            has_steps_left = fetch.step()
        if has_steps_left:
            self._submitted.put(fetch)
        return fetch.result

    def shutdown(self) -> None:
        """Wait for running fetches and cancel queued ones.

        `submit` must not be called after this.
        """
        self._submitted.put(None)
        self.thread.join()

    def _run(self) -> None:
        self._prepare()
        pause_s: float | None = None
        while self._running or not self._closing:
            self._receive(pause_s)
            while self._waiting and len(self._running) < MAX_CONCURRENT_FETCHES:
                fetch = self._waiting.popleft()
                if fetch.begin() and fetch.step():
                    self._running.append(fetch)
            pause_s = self._step(has_paused=pause_s != 0)

    def _receive(self, pause_s: float | None) -> None:
        """Take the submitted fetches. None among them: `shutdown` was called.

        Wait up to `pause_s` seconds (None: without limit) for the first one.
        """
        try:
            if pause_s == 0:
                fetch = self._submitted.get_nowait()
            else:
                fetch = self._submitted.get(timeout=pause_s)
            # The loop ends with `Empty`, when all are taken.
            while True:
                if fetch is None:
                    self._close()
                elif fetch.has_begun:
                    self._running.append(fetch)
                else:
                    self._waiting.append(fetch)
                fetch = self._submitted.get_nowait()
        except Empty:
            # The call releases the GIL; time.sleep(0) would take 70 microseconds.
            if pause_s == 0:
                self._no_sockets.poll(0)

    def _close(self) -> None:
        self._closing = True
        while self._waiting:
            fetch = self._waiting.popleft()
            fetch.result.cancel()
            fetch.result.set_running_or_notify_cancel()

    def _step(self, *, has_paused: bool) -> float | None:
        """Let the running fetches take a step.

        If the thread has not paused since the last call, only the oldest fetch and one other take a
        step. Each poll takes time, and fetches mostly end in the order in which they started.

        Returns:
            The seconds to pause until the next call; None: until a fetch is submitted.
        """
        fetches = self._running if has_paused else self._oldest_and_next()
        ended = [fetch for fetch in fetches if not fetch.step()]
        if ended:
            self._running = [fetch for fetch in self._running if fetch not in ended]
        if not self._running:
            has_work = self._waiting or self._closing
            return 0 if has_work else None
        shortest_s = min(fetch.waited_s for fetch in self._running)
        if shortest_s < _SPIN_S:
            return 0
        return min(shortest_s * _SLEEP_SHARE, MAX_SLEEP_S)

    def _oldest_and_next(self) -> list[_PolledFetch]:
        if len(self._running) < 2:
            return self._running
        # The turn goes round from index 1 to the last index.
        self._turn = self._turn % (len(self._running) - 1) + 1
        return [self._running[0], self._running[self._turn]]
