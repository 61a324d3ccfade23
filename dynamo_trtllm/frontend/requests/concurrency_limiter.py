"""Limit how many choices run at the same time, and queue further requests in a fair order."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from dynamo_trtllm.frontend.requests.fair_queue import Claim, FairQueue, QueuedRequest
from dynamo_trtllm.frontend.requests.recent_rate import WINDOW_S, RecentRate
from dynamo_trtllm.frontend.requests.token_counters import CountedRequest, TokenCounters
from dynamo_trtllm.observability.metrics import ClientLoad
from dynamo_trtllm.protocol import errors
from dynamo_trtllm.protocol.messages import ClientShare
from dynamo_trtllm.support.network.by_group import ByGroup

_MAX_RETRY_S = 60
# For each permit that is free, one client may hold 15 permits. So each client leaves a sixteenth of
# all permits to other clients, however long its answers are and however slowly it reads them. If
# there are at most 15 permits, one client may hold all of them.
_MAX_HELD_PER_FREE = 15


class QueuedChoices(NamedTuple):
    """The choices that wait for one model."""

    choices: int = 0
    prompt_tokens: int = 0  # of all these choices


class ConcurrencyLimiter:
    """A limit on running choices, and the queue of the requests that may not run yet.

    Further requests wait in a fair queue; beyond its size they are rejected. Requests for a model
    wait as well while its workers are busy enough (`start_window`).

    Each choice takes a permit, because each choice is a stream of its own for engines and memory. A
    request gets the permits of all its choices at once: otherwise it would hold some permits while
    it waits for the others. It holds them until its client has the answer. So slow clients hold
    permits for long, and therefore the permits of one client are limited, too.

    Args:
        limit: how many permits there are.
        max_queued: how many requests may wait for permits. If there are permits for all waiting
            requests, these only wait for workers, and their number is not limited.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self, limit: int, max_queued: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.in_use = 0
        self._max_queued = max_queued
        self._clock = clock
        self._held = Counter[str]()  # permits by client
        self._waiting = ByGroup(_client_of)
        self._num_waiting_choices = 0
        # The queues by model. An empty queue is removed.
        self._queues: OrderedDict[str, FairQueue] = OrderedDict()
        self._counters: dict[str, TokenCounters] = {}  # the counters of tokens, by model
        # The next request for some model waits for permits. No other request overtakes it.
        self._lacks_permits = False
        # Since when no permit is in use. Valid only while this is the case.
        self._idle_since_s = clock()
        self._finished = RecentRate(clock)  # the rate at which choices end

    @property
    def queued(self) -> int:
        """The number of requests that wait."""
        return len(self._waiting)

    def check(self, client: str) -> None:
        """Raise Overloaded if there is no place in the queue for a client.

        Called before the body of a request is read.
        """
        if self._is_full(1) and self._displaced_by(client) is None:
            raise self._full()

    async def acquire(
        self, claim: Claim, within_s: float, more_tokens: Callable[[], int]
    ) -> CountedRequest:
        """Wait for the turn of one request. Take its permits and reserve its places at the workers.

        Args:
            claim: what the request needs.
            within_s: seconds until the request's deadline.
            more_tokens: see `CountedRequest`.

        Returns:
            The entry of the request in the token counters. The caller calls its `end`.

        Raises:
            DeadlineUnreachable: the request would wait for more than `within_s` seconds.
            Overloaded: the queue is full, or a request of another client took the place of this
                one in it.
            DeadlineExceeded: the permits were not free within `within_s` seconds.
        """
        count = claim.num_choices
        places = claim.places
        are_permits_free = not self._lacks_permits and self.in_use + count <= self.limit
        others_wait = places.model in self._queues
        if are_permits_free and not others_wait and self._may_hold(claim):
            counters = self.counters(places.model)
            counter = counters.counter(claim.client)
            # The client gets no credit for the time in which none of its requests waited.
            counters.lift(counter)
            share = counters.share(counter)
            if places.may_begin(share):
                if not self.in_use:
                    self._restart_stale_rate()
                return self._begin(claim, share, more_tokens)
        self._check_deadline(claim, within_s)
        if self._is_full(count):
            self._displace(claim.client.name)
        decided = asyncio.get_running_loop().create_future()
        waiting = QueuedRequest(claim, more_tokens, decided)
        self._add(waiting)
        if not are_permits_free:
            self._lacks_permits = True
        else:
            # The request begins at once if the clients of all requests before it may not hold more
            # permits.
            self.grant()
        await self._wait(waiting, within_s)
        if waiting.counted is None:
            raise errors.Overloaded(
                "the server is at capacity, and a request of another client took the place of this"
                " one in the queue, because its client has the most waiting requests; send fewer at"
                " the same time, or try again later"
            )
        return waiting.counted

    async def _wait(self, waiting: QueuedRequest, within_s: float) -> None:
        """Wait until a request has permits or was displaced. Raises DeadlineExceeded."""
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

    def counters(self, model: str) -> TokenCounters:
        """Return the counters of a model, which must exist."""
        counters = self._counters.get(model)
        if counters is None:
            counters = TokenCounters(self._clock)
            self._counters[model] = counters
        return counters

    def weights(self, model: str) -> dict[str, float]:
        """Return the weights of the clients whose requests for a model wait, by name."""
        queue = self._queues.get(model)
        return {} if queue is None else queue.weights()

    def queued_choices(self, model: str) -> QueuedChoices:
        """Return what waits for permits, or for the workers of a model."""
        queue = self._queues.get(model)
        if queue is None:
            return QueuedChoices()
        return QueuedChoices(queue.num_choices, queue.prompt_tokens)

    def loads(self) -> dict[str, ClientLoad]:
        """Return the load of each client, by name, in this process.

        A client is listed if it has requests now, or got tokens in the last minute.
        """
        waiting = self._waiting.counts()
        weights: dict[str, float] = {}
        tokens = Counter[str]()
        for model, counters in self._counters.items():
            weights |= self.weights(model)
            for name, (weight, num_tokens) in counters.last_minute().items():
                weights[name] = weight
                tokens[name] += num_tokens
        return {
            name: ClientLoad(
                weight=weights.get(name, 1.0),
                tokens=tokens[name],
                waiting=waiting.get(name, 0),
                running=self._held[name],
            )
            for name in tokens.keys() | waiting.keys() | self._held.keys()
        }

    def release(self, count: int, client: str) -> None:
        """Return the permits of `count` choices of a client that have ended."""
        if count == 0:
            return
        self._finished.add(count)
        self._free(count, client)

    def retry_after_s(self) -> int:
        """Estimate, in whole seconds, how long one more choice would wait.

        The estimate assumes that choices keep finishing at the recent rate.
        """
        wait_s = self._finished.seconds_for(self._num_waiting_choices + 1)
        return _retry_after_s(1.0 if wait_s is None else wait_s)

    def grant(self) -> None:
        """Let the next requests run, as long as there are permits and workers can begin them."""
        self._lacks_permits = False
        if not self._queues:
            return
        for model in list(self._queues):
            while model in self._queues:
                first = self._queues[model].first(self._may_hold)
                if first is None:
                    break
                share = self._client_share(first.claim)
                if not first.claim.places.may_begin(share):
                    break
                if self.in_use + first.claim.num_choices > self.limit:
                    self._lacks_permits = True
                    return
                self._queues.move_to_end(model)  # the models take turns
                self._let_run(first, share)

    def _restart_stale_rate(self) -> None:
        """Measure the rate of finished choices from now on, unless there is a recent one.

        Called at the end of idle time, which says nothing about the load.
        """
        if not self._finished.count or self._clock() - self._idle_since_s > WINDOW_S:
            self._finished.restart()

    def _let_run(self, first: QueuedRequest, share: ClientShare) -> None:
        """Let the first request of a queue run. `share`: the share of its client."""
        claim = first.claim
        model = claim.places.model
        self._queues[model].take(first)
        self._forget(first)
        if first.decided.cancelled():
            # The request is about to withdraw.
            return
        first.counted = self._begin(claim, share, first.more_tokens)
        first.decided.set_result(None)

    def _may_hold(self, claim: Claim) -> bool:
        """Return whether the client of a request may also hold the permits of this request."""
        free = self.limit - self.in_use
        return self._held[claim.client.name] + claim.num_choices <= _MAX_HELD_PER_FREE * free

    def _client_share(self, claim: Claim) -> ClientShare:
        """Return what the client of a request has got, compared with other clients."""
        counters = self.counters(claim.places.model)
        return counters.share(counters.counter(claim.client))

    def _check_deadline(self, claim: Claim, within_s: float) -> None:
        """Raise DeadlineUnreachable if a request would wait for longer than it may take."""
        queue = self._queues.get(claim.places.model)
        if queue is None or within_s <= 0:
            return  # after its deadline, the request gets another error
        wait_s = queue.least_wait_s(claim, within_s)
        if wait_s > within_s:
            raise errors.DeadlineUnreachable(
                f"the request would wait for about {wait_s:.0f} s, and must be complete within"
                f" {within_s:.0f} s; try again later, or send a longer timeout",
                retry_after_s=_retry_after_s(wait_s - within_s),
            )

    def _begin(
        self, claim: Claim, share: ClientShare, more_tokens: Callable[[], int]
    ) -> CountedRequest:
        """Take the permits and places of a request, and count it for its client."""
        self.in_use += claim.num_choices
        self._held[claim.client.name] += claim.num_choices
        claim.places.begin(share)
        counters = self.counters(claim.places.model)
        return counters.begin(claim.client, share, claim.prompt_tokens, more_tokens)

    def _free(self, count: int, client: str) -> None:
        """Free permits of a client, and let waiting requests use them."""
        self.in_use -= count
        self._held[client] -= count
        if not self._held[client]:
            del self._held[client]
        if not self.in_use:
            self._idle_since_s = self._clock()
        self.grant()

    def _is_full(self, count: int) -> bool:
        """Return whether the queue has no place for a request of `count` choices."""
        if len(self._waiting) < self._max_queued:
            return False
        # While there are permits for all requests, they wait for workers only, and need no place.
        return self.in_use + self._num_waiting_choices + count > self.limit

    def _add(self, waiting: QueuedRequest) -> None:
        model = waiting.claim.places.model
        queue = self._queues.get(model)
        if queue is None:
            queue = FairQueue(self.counters(model), self._clock)
            self._queues[model] = queue
        queue.add(waiting)
        self._waiting.add(waiting)
        self._num_waiting_choices += waiting.claim.num_choices

    def _remove(self, waiting: QueuedRequest) -> None:
        self._queues[waiting.claim.places.model].remove(waiting)
        self._forget(waiting)

    def _forget(self, waiting: QueuedRequest) -> None:
        """Stop counting a request that has left the queue of its model. Drop an empty queue."""
        model = waiting.claim.places.model
        if self._queues[model].is_empty:
            del self._queues[model]
        self._waiting.discard(waiting)
        self._num_waiting_choices -= waiting.claim.num_choices

    def _displaced_by(self, client: str) -> QueuedRequest | None:
        """Return the request that gives its place to one more of this client.

        It is the newest request of the client that has the most waiting requests. Return None if
        that client would then have fewer waiting requests than this client.
        """
        largest_client = self._waiting.largest()
        if largest_client is None:
            return None
        if self._waiting.count(client) + 1 >= self._waiting.count(largest_client):
            return None
        return self._waiting.newest(largest_client)

    def _displace(self, client: str) -> None:
        """Reject a waiting request, so that one more of this client has a place in the queue.

        Raises Overloaded.
        """
        displaced = self._displaced_by(client)
        if displaced is None:
            raise self._full()
        self._remove(displaced)
        if not displaced.decided.cancelled():
            displaced.decided.set_result(None)

    def _withdraw(self, waiting: QueuedRequest) -> None:
        """Remove a request from the queue, or return permits that were granted just now."""
        if waiting.counted is not None:
            waiting.counted.cancel()
            waiting.claim.places.close()
            self._free(waiting.claim.num_choices, waiting.claim.client.name)
        elif waiting in self._waiting:
            self._remove(waiting)
            self.grant()  # requests behind this one may need fewer permits

    def _full(self) -> errors.Overloaded:
        return errors.Overloaded(
            f"the server is at capacity: {self.in_use} of {self.limit} choices are running and"
            f" {len(self._waiting)} of {self._max_queued} requests are queued; try again later"
        )


def _client_of(waiting: QueuedRequest) -> str:
    return waiting.claim.client.name


def _retry_after_s(wait_s: float) -> int:
    """Return the whole seconds after which a client should try again."""
    return max(1, min(_MAX_RETRY_S, math.ceil(wait_s)))
