"""Count the tokens that the workers of a model have computed for each client.

The queue of a frontend orders clients by these counters. They are the virtual token counters of
"Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024), over prefill and decode:

- A prompt counts when its request begins, because a client could otherwise begin many requests
  before the first prompt counts. Tokens that a worker had in its prefix cache are taken off later.
- Tokens of the output count while they are generated.
- When a client that had nothing waiting sends a request, its counter is lifted to the counters of
  the clients that wait, so that it can't save up credit. If it was active just now, it may be
  BURST_TOKENS behind them: otherwise, a client with short bursts would wait, in each burst, for a
  client that always has requests waiting.
- A client is below its share if its counter is behind the counters of the clients whose requests
  have begun. Its requests then go before requests that wait at workers already.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from dynamo_trtllm.frontend.requests.recent_rate import LastMinute
from dynamo_trtllm.protocol.messages import ClientShare

# A token of the output counts as this many tokens of a prompt, as in the paper.
OUTPUT_COST: Final = 2
# By how much a client may be behind the clients that wait, if one of its requests has begun within
# IDLE_S. A worker computes this many tokens in a few seconds.
BURST_TOKENS: Final = 32_768
IDLE_S: Final = 30.0
# A client that is this much behind is below its share. Clients whose requests wait get equal
# amounts of work, so their counters differ by less, unless prefix caches take off much.
BELOW_TOKENS: Final = 4096
# Each update looks at all running requests: 1 ms of CPU time for 4,000 of them.
UPDATE_S: Final = 0.1
# Limit of the counters, above the number of requests that can wait or run. The counters of clients
# without requests are dropped, the least recently used one first.
MAX_COUNTERS: Final = 16_384
MAX_REPORTED: Final = 4096  # limit of the clients in one report to other frontends


class Client(NamedTuple):
    """The sender of requests, as far as shares depend on it."""

    name: str  # the name of its API key; without keys, its network
    weight: float = 1.0  # its share, relative to the weights of other clients


class TokenCounter:
    """The tokens of one client, divided by its weight."""

    __slots__ = ("begun_s", "minute", "name", "unreported", "value", "weight")

    def __init__(self, name: str) -> None:
        self.name = name
        self.weight = 1.0
        self.value = 0.0
        self.begun_s = -math.inf  # when its last request began
        self.unreported = 0.0  # the part of `value` that other frontends do not know yet
        self.minute = LastMinute()  # tokens of this process only, not divided by the weight


class _Mark:
    """The value of a counter at one moment, to compare other clients with.

    Args:
        counter: the counter.
    """

    __slots__ = ("_counter", "_value")

    def __init__(self, counter: TokenCounter) -> None:
        self._counter = counter
        self._value = counter.value

    @property
    def value(self) -> float:
        """The value at that moment, or the present one if tokens were taken off since.

        So it never exceeds the present value, and no client is behind itself.
        """
        return min(self._value, self._counter.value)


class CountedRequest:
    """What the workers have computed for one running request.

    Args:
        counters: the counters of its model.
        counter: the counter of its client.
        prompt_tokens: tokens of the prompts of all choices.
        more_tokens: returns the tokens that the request took until now, without its prompts.
    """

    __slots__ = ("_counted", "_counter", "_counters", "_more_tokens", "_prompt_tokens")

    def __init__(
        self,
        counters: TokenCounters,
        counter: TokenCounter,
        prompt_tokens: int,
        more_tokens: Callable[[], int],
    ) -> None:
        self._counters = counters
        self._counter = counter
        self._prompt_tokens = prompt_tokens
        self._more_tokens = more_tokens
        self._counted = 0

    def update(self) -> None:
        """Count what was computed since the last update."""
        num_tokens = self._prompt_tokens + self._more_tokens()
        self._counters.count(self._counter, num_tokens - self._counted)
        self._counted = num_tokens

    def end(self) -> None:
        """Count the rest, because the request has ended."""
        self.update()
        self._counters.end(self)

    def cancel(self) -> None:
        """Count nothing, because the request has left before its choices were started."""
        self._counters.count(self._counter, -self._counted)
        self._counters.end(self)


class TokenCounters:
    """The counters of all clients of one model.

    Nothing is done per token: an update reads how many tokens each running request has.

    Args:
        clock: returns seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_client: OrderedDict[str, TokenCounter] = OrderedDict()
        self._running: dict[CountedRequest, None] = {}
        self._updated_s = clock()
        self._last_begun = TokenCounter("")  # the counter of the client whose request began last
        # The counter of the client that last began a request and was not below its share, when it
        # did. Requests that wait at workers began with about this value. None: no request began.
        self._begun: _Mark | None = None
        self._below_s = -math.inf  # when a client below its share last began a request
        # Clients whose requests wait at other processes, and the least one of their counters.
        self._at_others: frozenset[str] = frozenset()
        self._others_least: _Mark | None = None
        # When another process last reported that a client below its share has begun a request.
        self._others_below_s = -math.inf
        self._unreported: dict[TokenCounter, None] = {}

    def counter(self, client: Client) -> TokenCounter:
        """Return the counter of a client."""
        counter = self._named(client.name)
        counter.weight = client.weight  # the file of keys may have changed
        return counter

    def count(self, counter: TokenCounter, num_tokens: int) -> None:
        """Count tokens of a client."""
        if num_tokens:
            value = num_tokens / counter.weight
            counter.value += value
            counter.unreported += value
            counter.minute.add(num_tokens, self._clock())
            self._unreported[counter] = None

    def count_others(self, tokens: Mapping[str, float]) -> None:
        """Count what another frontend has reported: tokens divided by weights, by client."""
        for name, value in tokens.items():
            self._named(name).value += value

    def take_unreported(self) -> dict[str, float]:
        """Return what other frontends do not know yet, for `count_others`."""
        tokens: dict[str, float] = {}
        while self._unreported and len(tokens) < MAX_REPORTED:
            counter, _ = self._unreported.popitem()
            tokens[counter.name] = counter.unreported
            counter.unreported = 0.0
        return tokens

    def lift(self, counter: TokenCounter, least: float | None = None) -> None:
        """Raise the counter of a client that had nothing waiting, so that it has saved no credit.

        Args:
            counter: the counter of the client.
            least: the least value of the clients that wait. None: no client waits here. Then the
                value of the client whose request began last is used, or the least value of the
                clients that wait at other processes, if this is higher.
        """
        if least is None:
            least = max(self._last_begun.value, _value_of(self._others_least))
        if self._clock() - counter.begun_s < IDLE_S:
            least -= BURST_TOKENS / counter.weight
        counter.value = max(counter.value, least)

    def share(self, counter: TokenCounter) -> ClientShare:
        """Return what a client has got, compared with the clients whose requests began last."""
        # Clients that wait at another process began their last requests with about their value.
        begun_value = max(_value_of(self._begun), _value_of(self._others_least))
        if begun_value - counter.value >= BELOW_TOKENS / counter.weight:
            return ClientShare.BELOW
        # While a client below its share is active, all other clients count as above their share.
        if self._clock() - max(self._below_s, self._others_below_s) < IDLE_S:
            return ClientShare.ABOVE
        return ClientShare.EVEN

    @property
    def has_below(self) -> bool:
        """Whether a client below its share has begun a request here, within IDLE_S."""
        return self._clock() - self._below_s < IDLE_S

    def note_others(self, waiting: Iterable[str], *, has_below: bool) -> None:
        """Note what other processes have reported.

        Args:
            waiting: names of the clients whose requests wait at these processes.
            has_below: whether one of these processes has begun a request of a client below its
                share.
        """
        names = frozenset(waiting)
        for name in names - self._at_others:
            self.lift(self._named(name))
        self._at_others = names
        counters = [self._named(name) for name in names]
        least = min(counters, key=lambda counter: counter.value, default=None)
        self._others_least = None if least is None else _Mark(least)
        self._others_below_s = self._clock() if has_below else -math.inf

    def begin(
        self,
        client: Client,
        share: ClientShare,
        prompt_tokens: int,
        more_tokens: Callable[[], int],
    ) -> CountedRequest:
        """Begin a request of a client. Its tokens count until it ends.

        Args:
            client: the client whose request begins.
            share: what the client has got until now, see `share`.
            prompt_tokens, more_tokens: see `CountedRequest`.
        """
        counter = self.counter(client)
        now_s = self._clock()
        if share is ClientShare.BELOW:
            self._below_s = now_s
        else:
            self._begun = _Mark(counter)
        request = CountedRequest(self, counter, prompt_tokens, more_tokens)
        request.update()
        self._running[request] = None
        counter.begun_s = now_s
        self._last_begun = counter
        return request

    def last_minute(self) -> dict[str, tuple[float, int]]:
        """Return weight and tokens of each client that got tokens in the last minute."""
        self.update()
        now_s = self._clock()
        totals: dict[str, tuple[float, int]] = {}
        for counter in self._by_client.values():
            tokens = counter.minute.total(now_s)
            if tokens:
                totals[counter.name] = (counter.weight, tokens)
        return totals

    def end(self, request: CountedRequest) -> None:
        """Do not update a request any more. Idempotent."""
        self._running.pop(request, None)

    def update(self) -> bool:
        """Count what was computed since the last update.

        Return False, and count nothing, if the last update was just now.
        """
        now_s = self._clock()
        if now_s - self._updated_s < UPDATE_S:
            return False
        self._updated_s = now_s
        for request in self._running:
            request.update()
        return True

    def _named(self, name: str) -> TokenCounter:
        counter = self._by_client.get(name)
        if counter is None:
            if len(self._by_client) == MAX_COUNTERS:
                self._by_client.popitem(last=False)
            counter = TokenCounter(name)
            self._by_client[name] = counter
        else:
            self._by_client.move_to_end(name)
        return counter


def _value_of(mark: _Mark | None) -> float:
    return -math.inf if mark is None else mark.value
