"""Run all fetches of a backend on one thread, one step at a time.

Several polling threads would contend for NIXL. A fetch is a generator, and each part up to the next
`yield` is a step. Each value that it yields is the number of seconds since its last progress.
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
# For this long after the last progress, the thread polls without sleeping. A read of 128 MiB over
# NVLink takes 0.35 ms.
_SPIN_S = 0.0005
# Later, the thread sleeps for this share of the time since the last progress.
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
        """Mark the fetch as running. Return False if its future was cancelled before."""
        if not self.has_begun:
            self.has_begun = self.result.set_running_or_notify_cancel()
        return self.has_begun

    def step(self) -> bool:
        """Take one step. Return whether more steps follow."""
        try:
            self.waited_s = next(self.steps)
        except StopIteration:
            self.result.set_result(None)
        except BaseException as exc:  # noqa: BLE001  raised where the future is awaited
            self.result.set_exception(exc)
        else:
            return True
        return False


class TransferPoller:
    """The polling thread. Fetches start in the order of `submit`.

    Args:
        name: the name of the thread.
        prepare: called on the thread at its start. It must not raise.
    """

    def __init__(self, name: str, prepare: Callable[[], None] = lambda: None) -> None:
        self._submitted: SimpleQueue[_PolledFetch | None] = SimpleQueue()
        self._waiting: deque[_PolledFetch] = deque()
        self._running: list[_PolledFetch] = []
        self._turn = 0  # see `_oldest_and_next`
        self._is_closing = False
        self._no_sockets = select.poll()  # polls no sockets: it only releases the GIL
        self._prepare = prepare
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def submit(self, steps: PollSteps, *, step_now: bool = False) -> Future[None]:
        """Queue a fetch.

        All steps of the fetch are taken, unless the future is cancelled before the first step.

        Args:
            steps: the fetch.
            step_now: take the first step on the calling thread if the fetch need not wait for
                others. Then the reads of the fetch start before the polling thread wakes up.

        Returns:
            A future that is done when the fetch has ended.
        """
        fetch = _PolledFetch(steps)
        may_start_now = (
            not self._waiting
            and self._submitted.empty()
            and len(self._running) < MAX_CONCURRENT_FETCHES
        )
        has_steps_left = True
        if step_now and may_start_now and fetch.begin():
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
        pause_s: float | None = None  # None: until a fetch is submitted
        while self._running or not self._is_closing:
            self._receive(pause_s)
            while self._waiting and len(self._running) < MAX_CONCURRENT_FETCHES:
                fetch = self._waiting.popleft()
                if fetch.begin() and fetch.step():
                    self._running.append(fetch)
            has_paused = pause_s != 0
            pause_s = self._step(has_paused=has_paused)

    def _receive(self, pause_s: float | None) -> None:
        """Take the submitted fetches from the queue. None in the queue: `shutdown` was called.

        Wait up to `pause_s` seconds for the first fetch. None: wait without limit.
        """
        try:
            if pause_s == 0:
                fetch = self._submitted.get_nowait()
            else:
                fetch = self._submitted.get(timeout=pause_s)
            # The loop ends with `Empty` when all submitted fetches are taken.
            while True:
                if fetch is None:
                    self._close()
                elif fetch.has_begun:
                    self._running.append(fetch)
                else:
                    self._waiting.append(fetch)
                fetch = self._submitted.get_nowait()
        except Empty:
            if pause_s == 0:
                # Let other threads run. poll(0) releases the GIL. time.sleep(0) would do so, too,
                # but would take 70 microseconds.
                self._no_sockets.poll(0)

    def _close(self) -> None:
        self._is_closing = True
        while self._waiting:
            fetch = self._waiting.popleft()
            fetch.result.cancel()
            # `cancel` does not wake the threads that wait for the future. This call does.
            fetch.result.set_running_or_notify_cancel()

    def _step(self, *, has_paused: bool) -> float | None:
        """Let the running fetches take a step.

        If the thread has not paused since the last call, only two fetches take a step: the oldest
        fetch, and another one in turn. Each poll takes time, and fetches mostly end in the order in
        which they started.

        Returns:
            How many seconds the thread may pause before the next call. None: it may pause until a
            fetch is submitted.
        """
        fetches = self._running if has_paused else self._oldest_and_next()
        ended = [fetch for fetch in fetches if not fetch.step()]
        if ended:
            self._running = [fetch for fetch in self._running if fetch not in ended]
        if not self._running:
            must_not_pause = self._waiting or self._is_closing
            return 0 if must_not_pause else None
        shortest_s = min(fetch.waited_s for fetch in self._running)
        if shortest_s < _SPIN_S:
            return 0
        return min(shortest_s * _SLEEP_SHARE, MAX_SLEEP_S)

    def _oldest_and_next(self) -> list[_PolledFetch]:
        if len(self._running) < 2:
            return self._running
        # Index 0 is the oldest fetch. The turn goes from index 1 to the last index, and then begins
        # again with index 1.
        last_index = len(self._running) - 1
        self._turn = self._turn % last_index + 1
        return [self._running[0], self._running[self._turn]]
