"""The order of waiting requests: shares of clients, idle clients, weights, ranks and priorities."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import pytest

from dynamo_trtllm.frontend.requests.fair_queue import (
    OVERDUE_AFTER_S,
    OVERDUE_TURNS,
    Claim,
    FairQueue,
    QueuedRequest,
)
from dynamo_trtllm.frontend.requests.token_counters import (
    BELOW_TOKENS,
    BURST_TOKENS,
    IDLE_S,
    MAX_COUNTERS,
    OUTPUT_COST,
    UPDATE_S,
    Client,
    CountedRequest,
    TokenCounters,
)
from dynamo_trtllm.protocol.messages import ClientShare
from tests.kit.admission import FREE, Clock


class Queue:
    """A queue of one model, and what its running requests have generated."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.counters = TokenCounters(self.clock)
        self.queue = FairQueue(self.counters, self.clock)
        self.more_tokens: Counter[str] = Counter()  # by client, of its running requests

    def claim(
        self,
        client: str,
        tokens: int = 1,
        *,
        weight: float = 1.0,
        rank: int = 0,
        priority: int = 0,
        late_at_s: float = math.inf,
    ) -> Claim:
        return Claim(
            client=Client(client, weight),
            num_choices=1,
            prompt_tokens=tokens,
            places=FREE,
            rank=rank,
            priority=priority,
            late_at_s=late_at_s,
        )

    def add(self, client: str, tokens: int = 1, **options: Any) -> QueuedRequest:
        claim = self.claim(client, tokens, **options)
        decided = asyncio.get_running_loop().create_future()
        request = QueuedRequest(claim, lambda: self.more_tokens[client], decided)
        self.queue.add(request)
        return request

    def begin(self) -> tuple[QueuedRequest, CountedRequest]:
        """Let the next request begin."""
        first = self.queue.first(lambda _: True)
        assert first is not None
        self.queue.take(first)
        claim = first.claim
        share = self.counters.share(self.counters.counter(claim.client))
        counted = self.counters.begin(claim.client, share, claim.prompt_tokens, first.more_tokens)
        return first, counted

    def next(self) -> str:
        """Let the next request begin. Return its client."""
        return self.begin()[0].claim.client.name

    def order(self, num_requests: int) -> str:
        """Return the clients of the next requests, one letter each."""
        return "".join(self.next() for _ in range(num_requests))

    def share(self, client: str, weight: float = 1.0) -> ClientShare:
        """Return what a client has got, compared with others."""
        return self.counters.share(self.counters.counter(Client(client, weight)))

    def take(self, client: str, tokens: int) -> None:
        """Count tokens of a client."""
        self.counters.count(self.counters.counter(Client(client)), tokens)

    def add_all(self, clients: str, tokens: int = 1) -> None:
        """Add a request of each of these clients, one letter each."""
        for client in clients:
            self.add(client, tokens)


async def test_clients_with_equal_requests_take_turns() -> None:
    queue = Queue()
    queue.add_all("aaabbc")
    assert queue.order(6) == "abcaba"
    assert queue.queue.is_empty


async def test_client_with_large_prompts_has_fewer_turns() -> None:
    queue = Queue()
    queue.add_all("aaa", tokens=400)
    queue.add_all("b" * 9, tokens=100)
    assert queue.order(12) == "abbbbabbbbab"


async def test_output_counts_while_it_is_generated() -> None:
    queue = Queue()
    queue.add_all("aabbb", tokens=10)
    assert queue.order(2) == "ab"
    queue.more_tokens["a"] = 15 * OUTPUT_COST
    queue.clock.now += 2 * UPDATE_S
    assert queue.order(3) == "bba"


async def test_cached_tokens_do_not_count() -> None:
    queue = Queue()
    queue.add_all("aa", tokens=150)
    queue.add_all("bbb", tokens=100)
    assert queue.order(2) == "ab"
    queue.more_tokens["a"] = -100  # they were in a prefix cache
    queue.clock.now += 2 * UPDATE_S
    assert queue.next() == "a"


async def test_output_of_an_ended_request_counts_at_once() -> None:
    queue = Queue()
    queue.add_all("aabbb", tokens=10)
    _, counted = queue.begin()
    queue.more_tokens["a"] = 15
    counted.end()
    queue.more_tokens["a"] = 1000  # it does not count any more
    queue.clock.now += 2 * UPDATE_S
    assert queue.order(4) == "bbba"


async def test_request_that_leaves_before_its_start_does_not_count() -> None:
    queue = Queue()
    queue.add_all("aab", tokens=10)
    _, counted = queue.begin()
    counted.cancel()
    assert queue.counters.counter(Client("a")).value == 0


@pytest.mark.parametrize("num_tokens", [10 * BURST_TOKENS, 1000 * BURST_TOKENS])
async def test_active_client_saves_up_one_burst_only(num_tokens: int) -> None:
    queue = Queue()
    queue.add_all("ba")
    assert queue.order(2) == "ba"
    queue.take("a", num_tokens)
    queue.clock.now += IDLE_S - 1
    queue.add_all("a" * 9 + "b" * 9, tokens=BURST_TOKENS // 4)
    # The turns of a burst, and then each has its share.
    assert queue.order(10) == "bbbbababab"


@pytest.mark.parametrize("is_new", [True, False])
async def test_idle_client_is_lifted_to_those_that_wait(is_new: bool) -> None:
    queue = Queue()
    if not is_new:
        queue.add("b")
        queue.next()
    queue.add("a")
    queue.next()
    queue.take("a", 1000 * BURST_TOKENS)
    queue.clock.now += IDLE_S
    queue.add_all("aaabbb", tokens=10)
    assert queue.order(6) == "ababab"


async def test_idle_client_is_lifted_to_the_last_one_that_began() -> None:
    queue = Queue()
    queue.add("a", 1000)
    queue.next()
    queue.add("b", 1)
    assert queue.counters.counter(Client("b")).value == 1000


async def test_client_that_returns_pays_for_what_it_took() -> None:
    queue = Queue()
    queue.add_all("ab", tokens=10)
    queue.add_all("b", tokens=10)
    assert queue.next() == "a"
    queue.more_tokens["a"] = 1000
    queue.clock.now += 2 * UPDATE_S
    queue.add_all("a" + "b" * 10, tokens=100)
    # The output of a counts as ten requests of b.
    assert queue.order(13) == "bb" + "b" * 10 + "a"


async def test_keys_get_tokens_in_proportion_to_their_weights() -> None:
    queue = Queue()
    for _ in range(40):
        queue.add("a", 100, weight=3.0)
        queue.add("b", 100)
    assert Counter(queue.order(40)) == {"a": 30, "b": 10}


async def test_lower_rank_goes_first() -> None:
    queue = Queue()
    queue.add("a", rank=1)
    queue.add("b", rank=0)
    queue.add("c", rank=-5)
    queue.add("b", rank=1)
    assert queue.order(4) == "cbab"


async def test_priority_orders_the_requests_of_one_client() -> None:
    queue = Queue()
    requests = [queue.add("a", priority=priority) for priority in (0, 5, -1, 0)]
    queue.add("b", priority=-9)
    begun = [queue.begin()[0] for _ in range(5)]
    assert [request.claim.priority for request in begun] == [-1, -9, 0, 0, 5]
    assert begun[2] is requests[0]


async def test_overdue_rank_has_one_of_eight_turns() -> None:
    queue = Queue()
    for _ in range(2):
        queue.add("c", rank=2)
        queue.clock.now += 1
        queue.add("b", rank=1)
        queue.clock.now += 1
    for _ in range(40):
        queue.add("a")
    assert queue.order(OVERDUE_TURNS) == "a" * OVERDUE_TURNS
    queue.clock.now += OVERDUE_AFTER_S
    for _ in range(40):
        queue.add("a")
    # The oldest request of all has the turn.
    assert queue.order(4 * OVERDUE_TURNS) == "".join("a" * 7 + last for last in "cbcb")


async def test_client_that_leaves_does_not_hold_up_others() -> None:
    queue = Queue()
    queue.add("a")
    queue.add("b", 10)
    left = queue.add("b", 10)
    gone = queue.add("c")
    queue.queue.remove(left)
    queue.queue.remove(gone)
    assert queue.order(2) == "ab"
    assert queue.queue.is_empty
    assert queue.queue.first(lambda _: True) is None


async def test_client_that_holds_its_share_is_passed_over() -> None:
    queue = Queue()
    queue.add_all("aab")
    queue.add("c", rank=1)
    second = queue.queue.first(lambda claim: claim.client.name != "a")
    assert second is not None
    assert second.claim.client.name == "b"
    last = queue.queue.first(lambda claim: claim.rank == 1)
    assert last is not None
    assert last.claim.client.name == "c"
    assert queue.order(4) == "abac"


async def test_client_that_waits_longest_is_first_among_equals() -> None:
    queue = Queue()
    queue.add_all("ab")
    assert queue.order(2) == "ab"
    queue.add_all("ba")
    assert queue.next() == "b"
    queue.add("c")
    assert queue.order(2) == "ac"


async def test_counters_of_old_clients_are_dropped() -> None:
    queue = Queue()
    for number in range(2 * MAX_COUNTERS):
        queue.counters.count(queue.counters.counter(Client(str(number))), 1)
    newest = str(2 * MAX_COUNTERS - 1)
    assert queue.counters.counter(Client(newest)).value == 1
    assert queue.counters.counter(Client("0")).value == 0


async def test_client_behind_those_that_began_is_below_its_share() -> None:
    queue = Queue()
    queue.add_all("a")
    queue.next()
    queue.take("b", BELOW_TOKENS)
    queue.add("b")
    queue.next()
    assert queue.share("a") is ClientShare.EVEN  # by less than it may be
    queue.take("b", 1)
    queue.add("b")
    queue.next()
    assert queue.share("a") is ClientShare.BELOW
    assert queue.share("b") is ClientShare.EVEN


async def test_weight_divides_what_a_client_may_be_behind() -> None:
    queue = Queue()
    queue.take("b", BELOW_TOKENS)
    queue.add("b")
    queue.next()
    assert queue.share("a", weight=0.5) is ClientShare.EVEN
    assert queue.share("a", weight=2.0) is ClientShare.BELOW


async def test_others_are_above_while_a_client_is_below() -> None:
    queue = Queue()
    queue.take("b", 2 * BELOW_TOKENS)
    queue.add("b")
    queue.next()
    assert queue.share("b") is ClientShare.EVEN
    queue.counters.begin(Client("a"), queue.share("a"), 1, lambda: 0)
    assert queue.share("b") is ClientShare.ABOVE
    queue.clock.now += IDLE_S
    assert queue.share("b") is ClientShare.EVEN


async def test_equal_clients_are_never_below_their_shares() -> None:
    queue = Queue()
    for _ in range(50):
        queue.add_all("ab", tokens=100)
        queue.add_all("c", tokens=10 * BELOW_TOKENS)
    for _ in range(100):
        first = queue.queue.first(lambda _: True)
        assert first is not None
        assert queue.share(first.claim.client.name) is ClientShare.EVEN
        queue.begin()


async def test_wait_is_that_of_the_clients_turns() -> None:
    queue = Queue()
    queue.add_all("a" * 60)
    queue.add_all("b" * 8)
    for _ in range(10):
        queue.clock.now += 1.0
        queue.next()
    waits = {
        client: queue.queue.least_wait_s(queue.claim(client), 10.0) for client in ("a", "b", "c")
    }
    # Of a, all 55 that wait, and the three of b. Of b, these three, and as many of a.
    assert waits == {"a": 58.0, "b": 6.0, "c": 0.0}


@pytest.mark.parametrize("is_put_last", [False, True])
async def test_wait_is_without_late_requests_of_the_client(is_put_last: bool) -> None:
    queue = Queue()
    for _ in range(20):
        queue.add("a", late_at_s=110.5)
    queue.add_all("a" * 2)
    queue.add_all("b" * 20)
    for _ in range(10):
        queue.clock.now += 1.0
        queue.next()
    queue.clock.now = 111.0
    if is_put_last:
        queue.queue.first(lambda _: True)
    # The two requests of a that are not late, and as many of b.
    assert queue.queue.least_wait_s(queue.claim("a"), 2.0) == pytest.approx(4.4)


async def test_requests_of_lower_ranks_wait_for_the_others() -> None:
    queue = Queue()
    queue.add_all("a" * 30)
    for _ in range(10):
        queue.clock.now += 1.0
        queue.next()
    assert queue.queue.least_wait_s(queue.claim("c", rank=1), 5.0) == 20.0
    assert queue.queue.least_wait_s(queue.claim("c", rank=-1), 5.0) == 0.0


async def test_wait_is_not_predicted_from_a_few_requests() -> None:
    queue = Queue()
    queue.add_all("a" * 60)
    for _ in range(7):
        queue.clock.now += 1.0
        queue.next()
    assert queue.queue.least_wait_s(queue.claim("a"), 1.0) == 0.0


async def test_last_minute_has_the_tokens_of_its_time() -> None:
    queue = Queue()
    queue.counters.count(queue.counters.counter(Client("a", 2.0)), 100)
    queue.clock.now += 59
    queue.take("b", 7)
    assert queue.counters.last_minute() == {"a": (2.0, 100), "b": (1.0, 7)}
    queue.clock.now += 6
    assert queue.counters.last_minute() == {"b": (1.0, 7)}


async def test_late_requests_come_after_the_others_of_a_client() -> None:
    queue = Queue()
    late = queue.add("a", late_at_s=101.0)
    others = [queue.add("a", late_at_s=at_s) for at_s in (103.0, math.inf)]
    queue.clock.now = 102.0
    assert [queue.begin()[0] for _ in range(3)] == [*others, late]


async def test_late_requests_keep_the_order_of_their_arrival() -> None:
    queue = Queue()
    requests = [queue.add("a", late_at_s=101.0) for _ in range(3)]
    queue.queue.remove(requests[1])
    queue.clock.now = 102.0
    assert queue.begin()[0] is requests[0]
    assert queue.begin()[0] is requests[2]
    assert queue.queue.is_empty


async def test_late_requests_do_not_wait_for_ever() -> None:
    queue = Queue()
    late = queue.add("a", late_at_s=101.0)
    queue.clock.now += OVERDUE_AFTER_S
    for _ in range(OVERDUE_TURNS):
        queue.add("a")
    begun = [queue.begin()[0] for _ in range(OVERDUE_TURNS)]
    assert begun.index(late) == OVERDUE_TURNS - 1


async def test_late_requests_of_a_client_have_its_turns() -> None:
    queue = Queue()
    for client in "ab":
        for _ in range(2):
            queue.add(client, late_at_s=101.0 if client == "a" else math.inf)
    queue.clock.now = 102.0
    assert queue.order(4) in ("abab", "baba")


async def test_withdrawn_requests_behind_a_waiting_one_leave_nothing() -> None:
    queue = Queue()
    first = queue.add("a")
    for _ in range(1000):
        queue.queue.remove(queue.add("b"))
    (rank,) = queue.queue._ranks.values()
    assert len(rank._heap) < 100
    assert queue.queue.first(lambda _: True) is first
