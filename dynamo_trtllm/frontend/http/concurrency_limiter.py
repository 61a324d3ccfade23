"""Limit how many choices run at the same time, and queue further requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dynamo_trtllm import errors

_RATE_WINDOW_S = 30.0  # a generation takes seconds, so a shorter window would count too few
_LONGEST_RETRY_S = 60


@dataclass(slots=True, eq=False)
class _Waiting:
    count: int
    granted: asyncio.Future[None]


class ConcurrencyLimiter:
    """A limit on running choices. Further requests wait in order of arrival; beyond the queue they are rejected.

    Each choice takes a permit, because each is a stream of its own for engines and memory. A request gets the permits
    of all its choices at once: otherwise it would hold some while it waits for others.
    """

    def __init__(self, limit: int, max_queued: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.in_use = 0
        self._max_queued = max_queued
        self._clock = clock
        self._queue: deque[_Waiting] = deque()
        self._idle_since_s = clock()  # valid while no permit is in use
        self._finished, self._counted_since_s = 0.0, clock()  # choices that have ended; their rate is that of the load

    @property
    def queued(self) -> int:
        """The number of requests that wait."""
        return len(self._queue)

    def check(self) -> None:
        """Raise Overloaded if the queue is full. Called before the body of a request is read."""
        if self.in_use >= self.limit and len(self._queue) >= self._max_queued:
            raise self._full()

    async def acquire(self, count: int, within_s: float) -> None:
        """Take `count` permits for one request, waiting in order of arrival.

        Raises:
            Overloaded: the queue is full.
            DeadlineExceeded: the permits were not free within `within_s` seconds.
        """
        if not self._queue and self.in_use + count <= self.limit:
            now_s = self._clock()
            if not self.in_use and (not self._finished or now_s - self._idle_since_s > _RATE_WINDOW_S):
                self._finished, self._counted_since_s = 0.0, now_s  # idle time says nothing about the load
            self.in_use += count
            return
        if len(self._queue) >= self._max_queued:
            raise self._full()
        waiting = _Waiting(count, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        try:
            async with asyncio.timeout(within_s):
                await waiting.granted
        except TimeoutError:
            self._withdraw(waiting)
            raise errors.DeadlineExceeded(
                f"the request's deadline passed while it was queued behind {self.in_use} running choices; try again "
                "later, or send a longer timeout"
            ) from None
        except asyncio.CancelledError:
            self._withdraw(waiting)
            raise

    def release(self, count: int) -> None:
        """Return the permits of `count` choices that have ended."""
        if count == 0:
            return
        self._finished += count
        counted_s = self._clock() - self._counted_since_s
        if counted_s > 2 * _RATE_WINDOW_S:  # the rate stays, and newer choices count more
            self._finished = self._finished * _RATE_WINDOW_S / counted_s
            self._counted_since_s += counted_s - _RATE_WINDOW_S
        self._free(count)

    def retry_after_s(self) -> int:
        """Estimate, in whole seconds, how long one more choice would wait at the recent rate of finished choices."""
        counted_s = max(self._clock() - self._counted_since_s, 1.0)  # the first ones alone would give too high a rate
        queued_choices = sum(waiting.count for waiting in self._queue)
        wait_s = (queued_choices + 1) * counted_s / self._finished if self._finished else 1.0
        return max(1, min(_LONGEST_RETRY_S, math.ceil(wait_s)))

    def _free(self, count: int) -> None:
        self.in_use -= count
        if not self.in_use:
            self._idle_since_s = self._clock()
        while self._queue and self.in_use + self._queue[0].count <= self.limit:
            first = self._queue.popleft()
            if not first.granted.cancelled():  # a cancelled request is about to withdraw
                self.in_use += first.count
                first.granted.set_result(None)

    def _withdraw(self, waiting: _Waiting) -> None:
        """Remove a request from the queue, or return its permits if they were granted at the same moment."""
        if not waiting.granted.cancelled():
            self._free(waiting.count)
        elif waiting in self._queue:
            self._queue.remove(waiting)
            self._free(0)  # requests behind it may need fewer permits

    def _full(self) -> errors.Overloaded:
        return errors.Overloaded(
            f"the server is at capacity: {self.in_use} of {self.limit} choices are running and {len(self._queue)} of "
            f"{self._max_queued} requests are queued; try again later"
        )
