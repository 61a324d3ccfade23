"""Limit how many choices run at the same time, and queue further requests in a fair order."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from dynamo_trtllm.protocol import errors
from dynamo_trtllm.support.network.by_network import ByNetwork

_RATE_WINDOW_S = 30.0  # a generation takes seconds, so a shorter window would count too few
_LONGEST_RETRY_S = 60


@dataclass(slots=True, eq=False)
class _Waiting:
    network: str  # of the client
    count: int  # choices
    decided: asyncio.Future[None]  # done when the request has permits or was displaced
    has_permits: bool = False


class FairQueue:
    """The requests that wait.

    Networks of clients take turns; requests of one network wait in order of arrival.

    This is deficit round robin: in each turn, a network gains one choice, and when it has gained as
    many as its oldest request has, this request is the next. So a network with large requests
    starts no more choices than one with small ones. The time per request depends on its choices
    only.
    """

    def __init__(self) -> None:
        self.num_choices = 0
        self._requests = ByNetwork[_Waiting]()
        # Choices by network. The first network has the turn.
        self._gained: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: _Waiting) -> bool:
        return request in self._requests

    def add(self, request: _Waiting) -> None:
        """Add a request. The turn of a network that had none comes after those of the others."""
        self._requests.add(request)
        self._gained.setdefault(request.network, 0)
        self.num_choices += request.count

    def remove(self, request: _Waiting) -> None:
        """Remove a request that waits. A network without requests loses what it has gained."""
        self._requests.discard(request)
        self.num_choices -= request.count
        if not self._requests.count(request.network):
            del self._gained[request.network]

    def first(self) -> _Waiting | None:
        """Return the request that is the next; None if none waits.

        Further calls return the same until it leaves.
        """
        while self._gained:
            network = next(iter(self._gained))
            oldest = self._requests.oldest(network)
            if self._gained[network] >= oldest.count:
                return oldest
            self._gained[network] += 1
            self._gained.move_to_end(network)
        return None

    def take(self, first: _Waiting) -> None:
        """Remove the request that `first` has returned."""
        self._gained[first.network] -= first.count
        self.remove(first)

    def displaced_by(self, network: str) -> _Waiting | None:
        """Return the request that gives its place to one more of this network.

        It is the newest of the network with the most. Return None if that network would then have
        fewer requests than this one.
        """
        largest = self._requests.largest()
        if largest is None or self._requests.count(network) + 1 >= self._requests.count(largest):
            return None
        return self._requests.newest(largest)


class ConcurrencyLimiter:
    """A limit on running choices.

    Further requests wait in a fair queue; beyond its size they are rejected.

    Each choice takes a permit, because each is a stream of its own for engines and memory. A
    request gets the permits of all its choices at once: otherwise it would hold some while it waits
    for others.
    """

    def __init__(
        self, limit: int, max_queued: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.in_use = 0
        self._max_queued = max_queued
        self._clock = clock
        self._queue = FairQueue()
        self._idle_since_s = clock()  # valid while no permit is in use
        # Choices that have ended. Their rate is that of the load.
        self._finished = 0.0
        self._counted_since_s = clock()

    @property
    def queued(self) -> int:
        """The number of requests that wait."""
        return len(self._queue)

    def check(self, network: str) -> None:
        """Raise Overloaded if there is no place in the queue.

        Called before the body of a request is read.

        Args:
            network: of the client, see `network_of`.
        """
        if self.in_use < self.limit or len(self._queue) < self._max_queued:
            return
        if self._queue.displaced_by(network) is None:
            raise self._full()

    async def acquire(self, count: int, network: str, within_s: float) -> None:
        """Take `count` permits for one request of a client, waiting for its turn.

        Raises:
            Overloaded: the queue is full, or a request of another network took the place of this
                one in it.
            DeadlineExceeded: the permits were not free within `within_s` seconds.
        """
        if not self._queue and self.in_use + count <= self.limit:
            now_s = self._clock()
            is_stale = not self._finished or now_s - self._idle_since_s > _RATE_WINDOW_S
            if not self.in_use and is_stale:
                # Idle time says nothing about the load.
                self._finished = 0.0
                self._counted_since_s = now_s
            self.in_use += count
            return
        if len(self._queue) >= self._max_queued:
            self._displace(network)
        waiting = _Waiting(network, count, asyncio.get_running_loop().create_future())
        self._queue.add(waiting)
        try:
            async with asyncio.timeout(within_s):
                await waiting.decided
        except TimeoutError:
            self._withdraw(waiting)
            raise errors.DeadlineExceeded(
                f"the request's deadline passed while it was queued behind {self.in_use} running"
                " choices; try again later, or send a longer timeout"
            ) from None
        except asyncio.CancelledError:
            self._withdraw(waiting)
            raise
        if not waiting.has_permits:
            raise errors.Overloaded(
                "the server is at capacity, and a request of another client took the place of this"
                " one in the queue, because its client has the most waiting requests; send fewer at"
                " the same time, or try again later"
            )

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
        """Estimate, in whole seconds, how long one more choice would wait.

        The rate of finished choices stays the recent one.
        """
        # The first choices alone would give too high a rate.
        counted_s = max(self._clock() - self._counted_since_s, 1.0)
        wait_s = 1.0
        if self._finished:
            wait_s = (self._queue.num_choices + 1) * counted_s / self._finished
        return max(1, min(_LONGEST_RETRY_S, math.ceil(wait_s)))

    def _free(self, count: int) -> None:
        self.in_use -= count
        if not self.in_use:
            self._idle_since_s = self._clock()
        first = self._queue.first()
        while first is not None and self.in_use + first.count <= self.limit:
            self._queue.take(first)
            if not first.decided.cancelled():  # a cancelled request is about to withdraw
                self.in_use += first.count
                first.has_permits = True
                first.decided.set_result(None)
            first = self._queue.first()

    def _displace(self, network: str) -> None:
        """Reject a waiting request, so that one more of this network has a place in the queue.

        Raises Overloaded.
        """
        displaced = self._queue.displaced_by(network)
        if displaced is None:
            raise self._full()
        self._queue.remove(displaced)
        if not displaced.decided.cancelled():
            displaced.decided.set_result(None)

    def _withdraw(self, waiting: _Waiting) -> None:
        """Remove a request from the queue, or return permits that were granted just now."""
        if waiting.has_permits:
            self._free(waiting.count)
        elif waiting in self._queue:
            self._queue.remove(waiting)
            self._free(0)  # requests behind it may need fewer permits

    def _full(self) -> errors.Overloaded:
        return errors.Overloaded(
            f"the server is at capacity: {self.in_use} of {self.limit} choices are running and"
            f" {len(self._queue)} of {self._max_queued} requests are queued; try again later"
        )
