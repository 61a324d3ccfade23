"""Order the waiting requests of one model by priority, then by the tokens of their clients."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from dynamo_trtllm.frontend.requests.recent_rate import RecentRate
from dynamo_trtllm.frontend.requests.token_counters import (
    Client,
    CountedRequest,
    TokenCounter,
    TokenCounters,
)
from dynamo_trtllm.frontend.routing.start_window import RequestPlaces

# Clients that send many requests of a high priority could keep the requests of all other clients
# waiting. Therefore a request that has waited for OVERDUE_AFTER_S seconds is overdue. One of every
# OVERDUE_TURNS turns is for the rank of the oldest overdue request. If the client that has such a
# turn has a late request that is overdue, this request goes before the client's other requests.
OVERDUE_AFTER_S: Final = 30.0
OVERDUE_TURNS: Final = 8
# So many entries of empty flows may always stay in the heap of a rank.
_SPARE_ENTRIES: Final = 32
# A wait is predicted only after this many choices of the queue have begun.
_LEAST_BEGUN: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a request needs to begin, and what decides when it may."""

    client: Client
    num_choices: int
    prompt_tokens: int  # tokens of the prompts of all choices
    places: RequestPlaces
    # The priority of the request among the requests of all clients. Lower values come first.
    rank: int = 0
    # Its priority among the requests of its own client. Lower values come first, too.
    priority: int = 0
    # If the request begins after this time of the queue's clock, its first token will be late.
    late_at_s: float = math.inf


class _Order(NamedTuple):
    """The place of a request among those of one client and one rank: the least value is first."""

    is_late: bool
    priority: int
    number: int  # requests are numbered in the order of their arrival


# The place of a request that is not queued yet.
_NO_ORDER: Final = _Order(is_late=False, priority=0, number=0)


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request that waits."""

    claim: Claim
    # Returns how many tokens the request has used so far, in addition to its prompt tokens. Prompt
    # tokens count when the request begins.
    more_tokens: Callable[[], int]
    decided: asyncio.Future[None]  # done when the request has permits or was displaced
    queued_s: float = 0.0  # when it was queued, by the queue's clock
    order: _Order = _NO_ORDER
    counted: CountedRequest | None = None  # None: the request has no permits yet


class _Flow:
    """The requests of one client and one rank, in the order of priority and arrival.

    Late requests come last: they would make other requests late, too.
    """

    __slots__ = ("counter", "last_turn", "requests")

    def __init__(self, counter: TokenCounter, last_turn: int) -> None:
        self.counter = counter
        self.last_turn = last_turn  # the number of the flow's last turn, or of its arrival
        self.requests: list[QueuedRequest] = []

    def put_late_last(self, now: float) -> None:
        """Move late requests from the front to behind all requests that are not late."""
        requests = self.requests
        while not requests[0].order.is_late and requests[0].claim.late_at_s <= now:
            late = requests.pop(0)
            late.order = late.order._replace(is_late=True)
            insort(requests, late, key=_order)

    def first_overdue(self, now: float) -> QueuedRequest | None:
        """Return the first of the late requests that were put last, if this request is overdue."""
        # False sorts before True: this is the index of the first late request.
        index = bisect_left(self.requests, True, key=_is_late)
        if index == len(self.requests):
            return None
        late = self.requests[index]
        is_overdue = now - late.queued_s >= OVERDUE_AFTER_S
        return late if is_overdue else None


class _Rank:
    """The requests of one rank. The next request is that of the client with the least counter.

    Of several clients with this counter, the client whose last turn, or arrival, is the longest ago
    comes first.
    """

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] = {}  # by client; each flow has at least one request
        # One entry for each flow, and entries of flows that have become empty. Counters grow while
        # the heap stays as it is: `next_flow` moves the entries whose values are outdated.
        self._heap: list[tuple[float, int, _Flow]] = []
        self._arrivals: dict[QueuedRequest, None] = {}  # the oldest request first

    @property
    def counters(self) -> Iterable[TokenCounter]:
        """The counters of the clients whose requests wait."""
        return (flow.counter for flow in self._flows.values())

    def num_choices(self) -> int:
        """Return how many choices wait."""
        return sum(map(_num_choices, self._arrivals))

    def num_choices_before(self, client: Client, priority: int, now: float) -> int:
        """Estimate the number of choices that begin before a further request of a client.

        The estimate counts the choices of the client itself that come first. Of each other client,
        it counts the choices that get their turns while the client's own choices begin. This
        assumes that clients get choices in proportion to their weights. A client whose counter is
        far lower than the other counters gets more, so the estimate is too high for this client.
        """
        own = self._flows.get(client.name)
        if own is None:
            # `FairQueue.add` raises the client's counter to the least one, but not higher. So the
            # client may be the next.
            return 0
        num_own = 0
        for request in own.requests:
            # `is_late` is not set yet if the request has become late behind another one:
            # `put_late_last` looks at the first request only.
            is_late = request.order.is_late or request.claim.late_at_s <= now
            if not is_late and request.claim.priority <= priority:
                num_own += request.claim.num_choices
        total = num_own
        for flow in self._flows.values():
            if flow is not own:
                num_meanwhile = int(num_own * flow.counter.weight / client.weight)
                total += min(num_meanwhile, sum(map(_num_choices, flow.requests)))
        return total

    @property
    def oldest(self) -> QueuedRequest:
        """The request that has waited longest."""
        return next(iter(self._arrivals))

    @property
    def is_empty(self) -> bool:
        """Return whether no request waits."""
        return not self._flows

    def has(self, client: str) -> bool:
        """Return whether a request of a client waits."""
        return client in self._flows

    def add(self, request: QueuedRequest, counter: TokenCounter, number: int) -> None:
        """Add a request. `number`: the number of its arrival."""
        flow = self._flows.get(counter.name)
        if flow is None:
            flow = _Flow(counter, number)
            self._flows[counter.name] = flow
            heapq.heappush(self._heap, (counter.value, number, flow))
        insort(flow.requests, request, key=_order)
        self._arrivals[request] = None

    def remove(self, request: QueuedRequest) -> None:
        """Remove a request."""
        client = request.claim.client.name
        requests = self._flows[client].requests
        del requests[bisect_left(requests, request.order, key=_order)]
        del self._arrivals[request]
        if not requests:
            del self._flows[client]
            # `next_flow` drops entries of empty flows at the top of the heap only. If most entries
            # are such ones, all of them are dropped.
            if len(self._heap) > 2 * len(self._flows) + _SPARE_ENTRIES:
                self.reorder()

    def least_counter(self) -> float:
        """Return the least counter of the clients whose requests wait."""
        # With these arguments, all clients may hold permits, and no request is late.
        flow = self.next_flow(lambda _: True, -math.inf)
        assert flow is not None
        return flow.counter.value

    def next_flow(self, may_hold: Callable[[Claim], bool], now: float) -> _Flow | None:
        """Return the flow whose first request is the next; None if no request may run."""
        heap = self._heap
        passed: list[tuple[float, int, _Flow]] = []
        found: _Flow | None = None
        while heap and found is None:
            value, last_turn, flow = heap[0]
            if not flow.requests:
                heapq.heappop(heap)
            elif flow.counter.value > value or flow.last_turn > last_turn:
                heapq.heapreplace(heap, (flow.counter.value, flow.last_turn, flow))
            else:
                flow.put_late_last(now)
                if may_hold(flow.requests[0].claim):
                    found = flow
                else:
                    passed.append(heapq.heappop(heap))
        for entry in passed:
            heapq.heappush(heap, entry)
        return found

    def reorder(self) -> None:
        """Order all clients again, because counters may have become less."""
        self._heap = [(flow.counter.value, flow.last_turn, flow) for flow in self._flows.values()]
        heapq.heapify(self._heap)

    def take(self, first: QueuedRequest, number: int) -> None:
        """Remove the next request. `number`: the number of the client's turn."""
        self._flows[first.claim.client.name].last_turn = number
        self.remove(first)


class FairQueue:
    """The requests for one model that wait.

    Lower ranks come first. Clients of one rank take turns, so that the tokens that the workers
    compute for them are in proportion to their weights. Requests of one client and rank are in the
    order of priority and arrival. Requests whose first token would be late come after the others,
    because they would make the others late, too. The CPU time per request depends on the number of
    different ranks, and on the logarithm of the number of clients.

    Args:
        counters: the token counters of the model.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self, counters: TokenCounters, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._counters = counters
        self._clock = clock
        self._ranks: dict[int, _Rank] = {}  # by `Claim.rank`; an empty rank is removed
        self._numbers = itertools.count()  # numbers arrivals and turns
        self._num_taken = 0
        self._num_waiting = 0  # how many choices wait
        self.prompt_tokens = 0  # tokens of the prompts of all choices that wait
        # The rate at which choices of this queue begin. An empty queue is dropped, so choices have
        # waited during the whole time of the rate.
        self._begun = RecentRate(clock)

    @property
    def is_empty(self) -> bool:
        """Return whether no request waits."""
        return not self._ranks

    @property
    def num_choices(self) -> int:
        """Return how many choices wait."""
        return self._num_waiting

    def weights(self) -> dict[str, float]:
        """Return the weights of the clients whose requests wait, by name."""
        return {
            counter.name: counter.weight
            for rank in self._ranks.values()
            for counter in rank.counters
        }

    def add(self, request: QueuedRequest) -> None:
        """Add a request."""
        self._update()
        claim = request.claim
        number = next(self._numbers)
        request.order = _Order(is_late=False, priority=claim.priority, number=number)
        request.queued_s = self._clock()
        counter = self._counters.counter(claim.client)
        rank = self._ranks.setdefault(claim.rank, _Rank())
        # A client without a waiting request in this rank gets no credit for the time in which it
        # had none.
        if rank.is_empty:
            # No client waits in this rank to compare with. So `lift` compares with the client that
            # began last, and with the clients that wait at other processes.
            self._counters.lift(counter)
        elif not rank.has(claim.client.name):
            self._counters.lift(counter, rank.least_counter())
        rank.add(request, counter, number)
        self._num_waiting += claim.num_choices
        self.prompt_tokens += claim.prompt_tokens

    def remove(self, request: QueuedRequest) -> None:
        """Remove a request that waits."""
        self._leave(request.claim)
        self._ranks[request.claim.rank].remove(request)
        self._drop_if_empty(request.claim.rank)

    def first(self, may_hold: Callable[[Claim], bool]) -> QueuedRequest | None:
        """Return the request that is the next; None if no request may run.

        Args:
            may_hold: returns whether the client of a request may hold its permits. Clients that
                may not are passed over.
        """
        self._update()
        now = self._clock()
        for rank in self._in_turn():
            flow = rank.next_flow(may_hold, now)
            if flow is None:
                continue
            if self._is_overdue_turn():
                overdue = flow.first_overdue(now)
                if overdue is not None and may_hold(overdue.claim):
                    return overdue
            return flow.requests[0]
        return None

    def take(self, first: QueuedRequest) -> None:
        """Remove the request that `first` has returned."""
        rank = self._ranks[first.claim.rank]
        rank.take(first, next(self._numbers))
        self._num_taken += 1
        self._leave(first.claim)
        self._begun.add(first.claim.num_choices)
        self._drop_if_empty(first.claim.rank)

    def least_wait_s(self, claim: Claim, enough_s: float) -> float:
        """Estimate how long one more request would wait at least, in seconds.

        The estimate holds if choices keep beginning as in the last half minute, and no further
        request comes. It is 0 while too few choices have begun. For some clients it is too high,
        see `_Rank.num_choices_before`.

        Args:
            claim: what the request needs.
            enough_s: a wait of up to this time need not be exact. If the whole queue begins within
                this time, the time of the whole queue is returned, which is faster to compute.
        """
        if self._begun.count < _LEAST_BEGUN:
            return 0.0
        longest_s = self._begun.seconds_for(self._num_waiting)
        if longest_s is None:
            return 0.0
        if longest_s <= enough_s:
            return longest_s
        now = self._clock()
        num_before = 0
        for rank_value, rank in self._ranks.items():
            if rank_value < claim.rank:
                num_before += rank.num_choices()
            elif rank_value == claim.rank:
                num_before += rank.num_choices_before(claim.client, claim.priority, now)
        return self._begun.seconds_for(num_before) or 0.0

    def _leave(self, claim: Claim) -> None:
        self._num_waiting -= claim.num_choices
        self.prompt_tokens -= claim.prompt_tokens

    def _update(self) -> None:
        if self._counters.update():
            for rank in self._ranks.values():
                rank.reorder()

    def _in_turn(self) -> Iterator[_Rank]:
        """Yield the ranks in the order of their turns."""
        if self._ranks and self._is_overdue_turn():
            rank = min(self._ranks.values(), key=_waiting_since)
            if self._clock() - rank.oldest.queued_s >= OVERDUE_AFTER_S:
                yield rank
        for rank_value in sorted(self._ranks):
            yield self._ranks[rank_value]

    def _is_overdue_turn(self) -> bool:
        """Return whether an overdue request, if there is one, has this turn."""
        return self._num_taken % OVERDUE_TURNS == OVERDUE_TURNS - 1

    def _drop_if_empty(self, rank_value: int) -> None:
        if self._ranks[rank_value].is_empty:
            del self._ranks[rank_value]


def _order(request: QueuedRequest) -> _Order:
    return request.order


def _is_late(request: QueuedRequest) -> bool:
    return request.order.is_late


def _num_choices(request: QueuedRequest) -> int:
    return request.claim.num_choices


def _waiting_since(rank: _Rank) -> float:
    return rank.oldest.queued_s
