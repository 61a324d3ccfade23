"""One thread that moves all fetches of a carrier a step at a time: threads that poll NIXL take it from each other.

Knows nothing of what a step does. A fetch is a generator that yields, whenever others may have their turn, for how
many seconds it has waited.
"""

from __future__ import annotations

import select
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeAlias

FETCHES_AT_ONCE = 16  # more of them would each come later, and none sooner
_SPIN_S = 0.0005  # without progress for this long (128 MiB take 0.35 ms over NVLink): sleep a share of the time waited
_SLEEP_SHARE = 1 / 16
LONGEST_SLEEP_S = 0.001

Steps: TypeAlias = Iterator[float]


class _Fetch(NamedTuple):
    steps: Steps
    result: Future[None]


class Mover:
    """Fetches begin in the order in which they come."""

    def __init__(self, name: str) -> None:
        self._coming: SimpleQueue[_Fetch | None] = SimpleQueue()
        self._waiting: deque[_Fetch] = deque()
        self._moving: list[_Fetch] = []
        self._closing = False
        self._nothing = select.poll()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, steps: Steps) -> Future[None]:
        """Its steps are taken to the end, unless the future is cancelled before the first."""
        fetch = _Fetch(steps, Future())
        self._coming.put(fetch)
        return fetch.result

    def shutdown(self) -> None:
        """Returns when those that began have ended; the others are cancelled. Nothing is submitted after this."""
        self._coming.put(None)
        self._thread.join()

    def _run(self) -> None:
        pause_s: float | None = None
        while not (self._closing and not self._moving):
            self._hear(pause_s)
            while self._waiting and len(self._moving) < FETCHES_AT_ONCE:
                fetch = self._waiting.popleft()
                if fetch.result.set_running_or_notify_cancel():
                    self._moving.append(fetch)
            pause_s = self._step()

    def _hear(self, pause_s: float | None) -> None:
        """Waits so long, or until something comes."""
        try:
            coming = self._coming.get(timeout=pause_s) if pause_s != 0 else self._coming.get_nowait()
            while True:
                if coming is None:
                    self._close()
                else:
                    self._waiting.append(coming)
                coming = self._coming.get_nowait()
        except Empty:
            if pause_s == 0:
                self._nothing.poll(0)  # gives others Python's lock; time.sleep(0) would take 70 microseconds

    def _close(self) -> None:
        self._closing = True
        while self._waiting:
            fetch = self._waiting.popleft()
            fetch.result.cancel()
            fetch.result.set_running_or_notify_cancel()

    def _step(self) -> float | None:
        """One turn of each; for how long nothing need be done, None: until something comes."""
        waited_s, still = [], []
        for fetch in self._moving:
            try:
                waited_s.append(next(fetch.steps))
                still.append(fetch)
            except StopIteration:
                fetch.result.set_result(None)
            except BaseException as exc:  # noqa: BLE001  it is raised where the fetch is awaited
                fetch.result.set_exception(exc)
        self._moving = still
        if not waited_s:
            return 0 if self._waiting or self._closing else None
        shortest_s = min(waited_s)
        return 0 if shortest_s < _SPIN_S else min(shortest_s * _SLEEP_SHARE, LONGEST_SLEEP_S)
