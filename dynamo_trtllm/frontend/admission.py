"""Which generations run, which wait for their turn, and each by its id. No HTTP."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from dynamo_trtllm.errors import Cancelled, DeadlineExceeded, Overloaded

_RATE_WINDOW_S = 30.0  # an answer takes seconds: in less there would be too few to count
_LONGEST_RETRY_S = 60
_BODY_WAIT_S = 5.0
SMALL_BODY_BYTES = 128 << 10

T = TypeVar("T")


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Run `work` on a thread. When cancelled, return after it has ended: it uses what was reserved for it."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # seen: its caller has left
        raise
    finally:
        del running  # an error refers to this frame, and the task to the error: a cycle would keep the arguments


class DecayingRate:
    """How many came per second lately: each counts less the longer ago it was. Callers pass the time."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._weight = 0.0
        self._at: float | None = None
        self._begun_at = 0.0

    def note(self, now: float, count: int) -> None:
        if self._at is None:
            self._begun_at = now
        self._weight = self._decayed(now) + count
        self._at = now

    def per_s(self, now: float) -> float:
        """0: nothing is known."""
        if self._at is None:
            return 0.0
        seen_s = max(now - self._begun_at, 1.0)  # what came in the first moment says little
        return self._decayed(now) / (self._window_s * -math.expm1(-seen_s / self._window_s))

    def _decayed(self, now: float) -> float:
        return 0.0 if self._at is None else self._weight * math.exp((self._at - now) / self._window_s)


@dataclass(slots=True, eq=False)
class _Waiting:
    count: int
    granted: asyncio.Future[None]


class ConcurrencyLimiter:
    """So many choices run, further requests wait in order of arrival, and what is beyond is refused at once.

    A choice takes a permit, because it is a request of the pipeline like any other: what engines and memory bear is
    a number of streams, however clients bundle them. A request gets the permits of all its choices at one time: it
    would else hold some while it waits for others.
    """

    def __init__(self, limit: int, max_queued: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.in_use = 0
        self._max_queued = max_queued
        self._clock = clock
        self._queue: deque[_Waiting] = deque()
        self._finished = DecayingRate(_RATE_WINDOW_S)
        self._idle_since_s = clock()  # on the clock; while none is taken

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def check(self) -> None:
        """For the door, before anything is read. Raises Overloaded when not even a place in the queue is left."""
        if self.in_use >= self.limit and len(self._queue) >= self._max_queued:
            raise self._full()

    async def acquire(self, count: int, within_s: float) -> None:
        """Returns when it is this request's turn. Raises Overloaded, or DeadlineExceeded after `within_s`."""
        if not self._queue and self.in_use + count <= self.limit:
            if not self.in_use and self._clock() - self._idle_since_s > _RATE_WINDOW_S:
                self._finished = DecayingRate(_RATE_WINDOW_S)  # that nothing ended was for want of requests
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
            raise DeadlineExceeded(
                f"the request's deadline passed while it waited behind {self.in_use} running choices"
            ) from None
        except asyncio.CancelledError:
            self._withdraw(waiting)
            raise

    def release(self, count: int) -> None:
        """Of choices that have ended."""
        if count == 0:
            return
        self._finished.note(self._clock(), count)
        self._free(count)

    def retry_after_s(self) -> int:
        """In how many whole seconds it would be the turn of one more, at the rate at which they ended lately."""
        rate = self._finished.per_s(self._clock())
        wait_s = (len(self._queue) + 1) / rate if rate > 0 else 1.0
        return max(1, min(_LONGEST_RETRY_S, math.ceil(wait_s)))

    def _free(self, count: int) -> None:
        self.in_use -= count
        if not self.in_use:
            self._idle_since_s = self._clock()
        while self._queue and self.in_use + self._queue[0].count <= self.limit:
            first = self._queue.popleft()
            if not first.granted.cancelled():  # else it is about to leave
                self.in_use += first.count
                first.granted.set_result(None)

    def _withdraw(self, waiting: _Waiting) -> None:
        """It waits no more: for its place, or, when its turn came at that very moment, for its permits."""
        if not waiting.granted.cancelled():
            self._free(waiting.count)
        elif waiting in self._queue:
            self._queue.remove(waiting)
            self._free(0)  # it may have been the one that was too large for what is free

    def _full(self) -> Overloaded:
        return Overloaded(
            f"{self.in_use} of at most {self.limit} choices are being generated and {len(self._queue)} requests wait, "
            f"of at most {self._max_queued}; try again later"
        )


@dataclass(slots=True, eq=False)
class BodyBytes:
    """The part of the budget that one request body holds."""

    number: int  # in order of arrival
    in_use: int = 0  # bytes


class BodyBudget:
    """The bytes of all request bodies that are being received or parsed.

    Large bodies share one half of it, so that small requests are served meanwhile. When that half is full, the oldest
    large body that waits may have a quarter more: without it, partly received bodies would wait for each other.
    """

    def __init__(self, limit: int, wait_s: float = _BODY_WAIT_S) -> None:
        """`limit`: bytes. `wait_s`: longest wait of one piece of a body, seconds."""
        self.limit = limit
        self.in_use = 0
        self._wait_s = wait_s
        self._numbers = itertools.count()
        self._waiting: dict[BodyBytes, tuple[int, asyncio.Future[None]]] = {}  # bytes wanted; the order has no meaning

    def body(self) -> BodyBytes:
        """Return the account of a new body."""
        return BodyBytes(next(self._numbers))

    async def acquire(self, count: int, body: BodyBytes) -> None:
        """Take `count` bytes more for the body.

        Raises:
            Overloaded: they were not free in time.
        """
        granted = asyncio.get_running_loop().create_future()
        self._waiting[body] = count, granted
        self._grant()
        try:
            if not granted.done():
                async with asyncio.timeout(self._wait_s):
                    await granted
        except TimeoutError:
            raise Overloaded(
                f"request bodies of {self.in_use} bytes are being received and parsed, of at most {self.limit} "
                "(--max-total-body-bytes); try again later"
            ) from None
        finally:
            self._waiting.pop(body, None)

    def release(self, body: BodyBytes) -> None:
        """Free all bytes of the body."""
        self.in_use -= body.in_use
        body.in_use = 0
        self._grant()

    def _grant(self) -> None:
        is_oldest = True
        for body in sorted(self._waiting, key=lambda each: each.number):
            count, granted = self._waiting[body]
            max_bytes = self.limit
            if body.in_use + count > SMALL_BODY_BYTES:
                max_bytes = max_bytes // 4 * (3 if is_oldest else 2)
                is_oldest = False
            if self.in_use + count <= max_bytes and not granted.done():
                self.in_use += count
                body.in_use += count
                del self._waiting[body]
                granted.set_result(None)


class InFlight:
    """The answers being made, by id."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[str] = set()

    def __contains__(self, answer_id: str) -> bool:
        return answer_id in self._tasks

    def cancel(self, answer_id: str) -> bool:
        """Ends the answer with the error `Cancelled`, its choices closed. False: none of this id is running."""
        task = self._tasks.get(answer_id)
        if task is None:
            return False
        self._cancelled.add(answer_id)
        task.cancel()
        return True

    @contextmanager
    def track(self, answer_id: str) -> Iterator[None]:
        """Around the making, in the task that makes it."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks[answer_id] = task
        try:
            yield
        except asyncio.CancelledError:
            if answer_id in self._cancelled:
                raise Cancelled(f"{answer_id} was cancelled on request") from None
            raise
        finally:
            del self._tasks[answer_id]
            self._cancelled.discard(answer_id)
