"""Limit how many choices run at the same time, and queue further requests in a fair order."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from dynamo_trtllm.frontend.routing.start_window import RequestPlaces
from dynamo_trtllm.protocol import errors
from dynamo_trtllm.support.network.by_network import ByNetwork

_RATE_WINDOW_S = 30.0  # a generation takes seconds, so a shorter window would count too few
_MAX_RETRY_S = 60
# A network may hold so many times as many permits as are free. So one network leaves a sixteenth of
# all permits to others, however long its answers are and however slowly it reads them. A limit of
# up to 15 permits leaves none.
_MAX_HELD_PER_FREE = 15


@dataclass(slots=True, eq=False)
class _Waiting:
    network: str  # of the client
    count: int  # choices
    places: RequestPlaces
    decided: asyncio.Future[None]  # done when the request has permits or was displaced
    has_permits: bool = False


class FairQueue:
    """The requests for one model that wait.

    Networks of clients take turns; requests of one network wait in order of arrival.

    This is deficit round robin: in each turn, a network gains one choice, and when it has gained as
    many as its oldest request has, this request is the next. So a network with large requests
    starts no more choices than one with small ones. The time per request depends on its choices
    only.
    """

    def __init__(self) -> None:
        self._requests = ByNetwork[_Waiting]()
        # Choices by network. The first network has the turn.
        self._gained: OrderedDict[str, int] = OrderedDict()

    @property
    def is_empty(self) -> bool:
        """Return whether no request waits."""
        return not self._gained

    def add(self, request: _Waiting) -> None:
        """Add a request. The turn of a network that had none comes after those of the others."""
        self._requests.add(request)
        self._gained.setdefault(request.network, 0)

    def remove(self, request: _Waiting) -> None:
        """Remove a request that waits. A network without requests loses what it has gained."""
        self._requests.discard(request)
        if not self._requests.count(request.network):
            del self._gained[request.network]

    def first(self, has_share: Callable[[_Waiting], bool]) -> _Waiting | None:
        """Return the request that is the next; None if none may run.

        Further calls return the same until it leaves.

        Args:
            has_share: returns whether the network of a request may hold its permits. Networks
                that may not are passed over.
        """
        num_passed = 0
        while num_passed < len(self._gained):
            network = next(iter(self._gained))
            oldest = self._requests.oldest(network)
            if not has_share(oldest):
                num_passed += 1
            elif self._gained[network] >= oldest.count:
                return oldest
            else:
                num_passed = 0
                self._gained[network] += 1
            self._gained.move_to_end(network)
        return None

    def take(self, first: _Waiting) -> None:
        """Remove the request that `first` has returned."""
        self._gained[first.network] -= first.count
        self.remove(first)


class ConcurrencyLimiter:
    """A limit on running choices, and the queue of the requests that may not run yet.

    Further requests wait in a fair queue; beyond its size they are rejected. Requests for a model
    wait as well while its workers have enough to start (`start_window`).

    Each choice takes a permit, because each is a stream of its own for engines and memory. A
    request gets the permits of all its choices at once: otherwise it would hold some while it waits
    for others. It holds them until its client has the answer, so the permits of one network are
    limited, too.

    Args:
        limit: permits.
        max_queued: requests that may wait. Further ones may wait if there are permits for the
            choices of all of them: they only wait for workers.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self, limit: int, max_queued: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.in_use = 0
        self._max_queued = max_queued
        self._clock = clock
        self._held = Counter[str]()  # permits by network
        self._waiting = ByNetwork[_Waiting]()
        self._num_waiting_choices = 0
        # By model; none is empty.
        self._queues: OrderedDict[str, FairQueue] = OrderedDict()
        # The next request for some model waits for permits, and no other one overtakes it.
        self._lacks_permits = False
        self._idle_since_s = clock()  # valid while no permit is in use
        # Choices that have ended. Their rate is that of the load.
        self._finished = 0.0
        self._counted_since_s = clock()

    @property
    def queued(self) -> int:
        """The number of requests that wait."""
        return len(self._waiting)

    def check(self, network: str) -> None:
        """Raise Overloaded if there is no place in the queue.

        Called before the body of a request is read.

        Args:
            network: of the client, see `network_of`.
        """
        if self._is_full(1) and self._displaced_by(network) is None:
            raise self._full()

    async def acquire(
        self, count: int, network: str, within_s: float, places: RequestPlaces
    ) -> None:
        """Take `count` permits for one request of a client, waiting for its turn.

        Args:
            count: the choices of the request.
            network: of the client, see `network_of`.
            within_s: seconds until the request's deadline.
            places: those of the request in the start window of its model. They begin.

        Raises:
            Overloaded: the queue is full, or a request of another network took the place of this
                one in it.
            DeadlineExceeded: the permits were not free within `within_s` seconds.
        """
        are_permits_free = not self._lacks_permits and self.in_use + count <= self.limit
        if (
            are_permits_free
            and self._has_share(network, count)
            and places.model not in self._queues
            and places.may_begin()
        ):
            if not self.in_use:
                self._restart_stale_rate()
            self._take(network, count)
            places.begin()
            return
        if self._is_full(count):
            self._displace(network)
        decided = asyncio.get_running_loop().create_future()
        waiting = _Waiting(network, count, places, decided)
        self._add(waiting)
        if not are_permits_free:
            self._lacks_permits = True
        else:
            self.grant()  # the requests before it may be of networks that hold their share
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

    def release(self, count: int, network: str) -> None:
        """Return the permits of `count` choices that have ended, of a client of this network."""
        if count == 0:
            return
        self._finished += count
        counted_s = self._clock() - self._counted_since_s
        # Shorten the time to the window. The rate stays the same, but the next choices count more.
        if counted_s > 2 * _RATE_WINDOW_S:
            self._finished = self._finished * _RATE_WINDOW_S / counted_s
            self._counted_since_s += counted_s - _RATE_WINDOW_S
        self._free(count, network)

    def retry_after_s(self) -> int:
        """Estimate, in whole seconds, how long one more choice would wait.

        The rate of finished choices stays the recent one.
        """
        # The first choices alone would give too high a rate.
        counted_s = max(self._clock() - self._counted_since_s, 1.0)
        wait_s = 1.0
        if self._finished:
            wait_s = (self._num_waiting_choices + 1) * counted_s / self._finished
        return max(1, min(_MAX_RETRY_S, math.ceil(wait_s)))

    def grant(self) -> None:
        """Let the next requests run for which there are permits, and which workers can begin."""
        self._lacks_permits = False
        if not self._queues:
            return
        for model in list(self._queues):
            while model in self._queues:
                first = self._queues[model].first(self._has_share_for)
                if first is None or not first.places.may_begin():
                    break
                if self.in_use + first.count > self.limit:
                    self._lacks_permits = True
                    return
                self._queues.move_to_end(model)  # the models take turns
                self._let_run(first)

    def _restart_stale_rate(self) -> None:
        """Measure the rate of finished choices from now on, unless there is a recent one.

        Called at the end of idle time, which says nothing about the load.
        """
        now_s = self._clock()
        if not self._finished or now_s - self._idle_since_s > _RATE_WINDOW_S:
            self._finished = 0.0
            self._counted_since_s = now_s

    def _let_run(self, first: _Waiting) -> None:
        """Let the first request of its queue run."""
        model = first.places.model
        self._queues[model].take(first)
        self._forget(first)
        if first.decided.cancelled():
            return  # it is about to withdraw
        self._take(first.network, first.count)
        first.has_permits = True
        first.places.begin()
        first.decided.set_result(None)

    def _has_share(self, network: str, count: int) -> bool:
        """Return whether a network may hold so many more permits."""
        free = self.limit - self.in_use
        return self._held[network] + count <= _MAX_HELD_PER_FREE * free

    def _has_share_for(self, waiting: _Waiting) -> bool:
        return self._has_share(waiting.network, waiting.count)

    def _take(self, network: str, count: int) -> None:
        self.in_use += count
        self._held[network] += count

    def _free(self, count: int, network: str) -> None:
        self.in_use -= count
        self._held[network] -= count
        if not self._held[network]:
            del self._held[network]
        if not self.in_use:
            self._idle_since_s = self._clock()
        self.grant()

    def _is_full(self, count: int) -> bool:
        """Return whether a request for so many choices may not wait."""
        if len(self._waiting) < self._max_queued:
            return False
        return self.in_use + self._num_waiting_choices + count > self.limit

    def _add(self, waiting: _Waiting) -> None:
        queue = self._queues.setdefault(waiting.places.model, FairQueue())
        queue.add(waiting)
        self._waiting.add(waiting)
        self._num_waiting_choices += waiting.count

    def _remove(self, waiting: _Waiting) -> None:
        self._queues[waiting.places.model].remove(waiting)
        self._forget(waiting)

    def _forget(self, waiting: _Waiting) -> None:
        """Do not count a request that has left the queue of its model."""
        model = waiting.places.model
        if self._queues[model].is_empty:
            del self._queues[model]
        self._waiting.discard(waiting)
        self._num_waiting_choices -= waiting.count

    def _displaced_by(self, network: str) -> _Waiting | None:
        """Return the request that gives its place to one more of this network.

        It is the newest of the network with the most. Return None if that network would then have
        fewer requests than this one.
        """
        largest = self._waiting.largest()  # a network
        if largest is None:
            return None
        if self._waiting.count(network) + 1 >= self._waiting.count(largest):
            return None
        return self._waiting.newest(largest)

    def _displace(self, network: str) -> None:
        """Reject a waiting request, so that one more of this network has a place in the queue.

        Raises Overloaded.
        """
        displaced = self._displaced_by(network)
        if displaced is None:
            raise self._full()
        self._remove(displaced)
        if not displaced.decided.cancelled():
            displaced.decided.set_result(None)

    def _withdraw(self, waiting: _Waiting) -> None:
        """Remove a request from the queue, or return permits that were granted just now."""
        if waiting.has_permits:
            waiting.places.close()
            self._free(waiting.count, waiting.network)
        elif waiting in self._waiting:
            self._remove(waiting)
            self.grant()  # requests behind it may need fewer permits

    def _full(self) -> errors.Overloaded:
        return errors.Overloaded(
            f"the server is at capacity: {self.in_use} of {self.limit} choices are running and"
            f" {len(self._waiting)} of {self._max_queued} requests are queued; try again later"
        )
