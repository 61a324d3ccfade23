"""The queue of requests: turns in order, nothing lost when a client leaves, the rate behind
Retry-After.
"""

from __future__ import annotations

import asyncio

import pytest

from dynamo_trtllm.frontend.requests.concurrency_limiter import ConcurrencyLimiter
from dynamo_trtllm.frontend.requests.token_counters import Client, CountedRequest
from dynamo_trtllm.observability.metrics import ClientLoad
from dynamo_trtllm.protocol.errors import DeadlineExceeded, DeadlineUnreachable, Overloaded
from tests.kit.admission import Clock, acquire, left, wait_until_loaded
from tests.kit.cases import each_case

CLIENT = "192.0.2.1"


async def waiting(
    limiter: ConcurrencyLimiter, count: int = 1, within_s: float = 30.0, client: str = CLIENT
) -> asyncio.Task[CountedRequest]:
    task = asyncio.create_task(acquire(limiter, count, client, within_s))
    await wait_until_loaded()
    return task


async def test_acquire_when_there_are_permits_then_at_once() -> None:
    limiter = ConcurrencyLimiter(3)
    await acquire(limiter, 2, CLIENT)
    await acquire(limiter, 1, CLIENT)
    assert (limiter.in_use, limiter.queued) == (3, 0)


async def test_take_when_full_then_turns_come_in_order_of_arrival() -> None:
    limiter = ConcurrencyLimiter(1, max_queued=2)
    await acquire(limiter, 1, CLIENT)
    first = await waiting(limiter)
    second = await waiting(limiter)
    assert limiter.queued == 2
    limiter.release(1, CLIENT)
    await wait_until_loaded()
    assert (first.done(), second.done()) == (True, False)
    limiter.release(1, CLIENT)
    await second
    assert (limiter.in_use, limiter.queued) == (1, 0)


async def test_take_with_full_queue_is_overloaded() -> None:
    limiter = ConcurrencyLimiter(1, max_queued=1)
    limiter.check(CLIENT)
    await acquire(limiter, 1, CLIENT)
    limiter.check(CLIENT)
    task = await waiting(limiter)
    with pytest.raises(
        Overloaded, match=r"at capacity: 1 of 1 choices .* 1 of 1 requests are queued"
    ):
        limiter.check(CLIENT)
    with pytest.raises(Overloaded):
        await acquire(limiter, 1, CLIENT)
    await left(task)
    limiter.check(CLIENT)


async def test_acquire_of_several_choices_is_atomic_and_fair() -> None:
    limiter = ConcurrencyLimiter(3, max_queued=9)
    await acquire(limiter, 2, CLIENT)
    large = await waiting(limiter, 3)
    small = await waiting(limiter, 1)
    assert limiter.in_use == 2
    limiter.release(2, CLIENT)
    await wait_until_loaded()
    assert (large.done(), small.done(), limiter.in_use) == (True, False, 3)
    limiter.release(3, CLIENT)
    await small
    assert limiter.in_use == 1


async def test_take_after_deadline_leaves_the_queue() -> None:
    limiter = ConcurrencyLimiter(2, max_queued=9)
    await acquire(limiter, 1, CLIENT)
    large = await waiting(limiter, 2, within_s=0.01)
    small = await waiting(limiter, 1)
    with pytest.raises(DeadlineExceeded, match="while it was queued"):
        await large
    await small  # there were bytes for it all the time
    assert (limiter.in_use, limiter.queued) == (2, 0)


async def test_take_when_no_time_is_left_then_deadline() -> None:
    limiter = ConcurrencyLimiter(1, max_queued=1)
    await acquire(limiter, 1, CLIENT)
    with pytest.raises(DeadlineExceeded):
        await acquire(limiter, 1, CLIENT, -1.0)
    assert (limiter.in_use, limiter.queued) == (1, 0)


async def test_take_by_gone_client_frees_its_place() -> None:
    limiter = ConcurrencyLimiter(1, max_queued=1)
    await acquire(limiter, 1, CLIENT)
    await left(await waiting(limiter))
    assert (limiter.in_use, limiter.queued) == (1, 0)
    limiter.release(1, CLIENT)
    assert limiter.in_use == 0


async def test_take_by_client_leaving_at_its_turn_passes_permit() -> None:
    limiter = ConcurrencyLimiter(1, max_queued=2)
    await acquire(limiter, 1, CLIENT)
    first = await waiting(limiter)
    second = await waiting(limiter)
    limiter.release(1, CLIENT)  # its turn came, and before it could run it is cancelled
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await second
    assert (limiter.in_use, limiter.queued) == (1, 0)


async def test_take_by_client_that_just_left_passes_permit() -> None:
    limiter = ConcurrencyLimiter(1, max_queued=2)
    await acquire(limiter, 1, CLIENT)
    first = await waiting(limiter)
    second = await waiting(limiter)
    first.cancel()
    limiter.release(1, CLIENT)
    await asyncio.gather(first, return_exceptions=True)
    await second
    assert (limiter.in_use, limiter.queued) == (1, 0)


async def test_permits_of_one_client_leave_some_to_others() -> None:
    limiter = ConcurrencyLimiter(160, max_queued=9)
    for _ in range(150):
        await acquire(limiter, 1, "a")
    own = await waiting(limiter, client="a")
    await acquire(limiter, 2, "b")
    assert (own.done(), limiter.in_use) == (False, 152)
    limiter.release(1, "a")
    await wait_until_loaded()
    assert not own.done()
    limiter.release(2, "b")
    await own
    assert (limiter.in_use, limiter.queued) == (150, 0)


async def test_small_limit_may_be_used_by_one_client() -> None:
    limiter = ConcurrencyLimiter(15)
    for _ in range(15):
        await acquire(limiter, 1, CLIENT)
    assert (limiter.in_use, limiter.queued) == (15, 0)


@each_case(
    ("queued", "newcomer", "displaced"),
    [
        (["a", "b", "a", "a"], "c", 3),
        (["a", "b", "a", "b"], "c", 2),
        (["b", "a", "a", "a"], "b", 3),
        (["b", "b", "a", "a"], "b", None),
        (["a", "b", "c", "d"], "e", None),
        (["a", "a", "a", "a"], "a", None),
    ],
)
async def test_acquire_with_full_queue_displaces_the_busiest_client(
    queued: list[str], newcomer: str, displaced: int | None
) -> None:
    limiter = ConcurrencyLimiter(1, max_queued=4)
    await acquire(limiter, 1, "a")
    tasks = [await waiting(limiter, client=client) for client in queued]
    if displaced is None:
        with pytest.raises(Overloaded, match="4 of 4 requests are queued"):
            limiter.check(newcomer)
        with pytest.raises(Overloaded, match="4 of 4 requests are queued"):
            await acquire(limiter, 1, newcomer)
    else:
        limiter.check(newcomer)
        tasks.append(await waiting(limiter, client=newcomer))
        with pytest.raises(
            Overloaded, match="a request of another client took the place of this one"
        ):
            await tasks.pop(displaced)
    assert [task.done() for task in tasks] == [False] * 4
    assert (limiter.in_use, limiter.queued) == (1, 4)
    await left(*tasks)
    assert (limiter.in_use, limiter.queued) == (1, 0)


async def test_acquire_by_displaced_client_returns_no_permit() -> None:
    limiter = ConcurrencyLimiter(1, max_queued=3)
    await acquire(limiter, 1, "a")
    tasks = [await waiting(limiter, client="a") for _ in range(3)]
    newcomer = asyncio.create_task(acquire(limiter, 1, "b"))
    # it takes a place, and before the displaced request could run it is cancelled
    await asyncio.sleep(0)
    await left(tasks[-1])
    assert (limiter.in_use, limiter.queued) == (1, 3)
    await left(newcomer, *tasks)
    assert (limiter.in_use, limiter.queued) == (1, 0)


@pytest.mark.parametrize(
    ("per_s", "queued", "least", "most"),
    [(1.0, 4, 5, 5), (0.1, 0, 8, 10), (100.0, 4, 1, 1), (0.01, 4, 60, 60)],
)
async def test_retry_after_is_the_time_of_the_queue(
    per_s: float, queued: int, least: int, most: int
) -> None:
    clock = Clock()
    limiter = ConcurrencyLimiter(1000, max_queued=queued, clock=clock)
    await acquire(limiter, 1000, CLIENT)
    for _ in range(400):
        clock.now += 1 / per_s
        limiter.release(1, CLIENT)
    await acquire(limiter, 400, CLIENT)
    tasks = [await waiting(limiter, 1) for _ in range(queued)]
    assert least <= limiter.retry_after_s() <= most
    await left(*tasks)


async def test_retry_after_counts_each_queued_choice() -> None:
    clock = Clock()
    limiter = ConcurrencyLimiter(400, max_queued=2, clock=clock)
    await acquire(limiter, 400, CLIENT)
    for _ in range(400):
        clock.now += 1.0
        limiter.release(1, CLIENT)
    await acquire(limiter, 400, CLIENT)
    tasks = [await waiting(limiter, 8) for _ in range(2)]
    assert limiter.retry_after_s() == 17
    await left(*tasks)


def test_retry_after_when_nothing_has_ended_yet_then_a_second() -> None:
    assert ConcurrencyLimiter(1).retry_after_s() == 1


async def test_retry_after_ignores_time_before_the_first_request() -> None:
    clock = Clock()
    limiter = ConcurrencyLimiter(2, clock=clock)
    clock.now += 29.0
    await acquire(limiter, 2, CLIENT)
    clock.now += 1.0
    limiter.release(1, CLIENT)
    assert limiter.retry_after_s() == 1


async def test_retry_after_ignores_ends_before_a_long_pause() -> None:
    now = 0.0
    limiter = ConcurrencyLimiter(1, clock=lambda: now)
    for _ in range(20):
        await acquire(limiter, 1, CLIENT)
        now += 1.0
        limiter.release(1, CLIENT)
    now += 600.0
    await acquire(limiter, 1, CLIENT)
    assert limiter.retry_after_s() == 1  # not a minute, as if one answer took that long
    now += 2.0
    limiter.release(1, CLIENT)
    await acquire(limiter, 1, CLIENT)
    assert limiter.retry_after_s() <= 2


async def test_request_that_would_wait_too_long_is_rejected_at_once() -> None:
    clock = Clock()
    limiter = ConcurrencyLimiter(1, max_queued=99, clock=clock)
    await acquire(limiter, 1, CLIENT)
    tasks = [await waiting(limiter, within_s=600.0) for _ in range(40)]
    for _ in range(10):  # one per second
        clock.now += 1.0
        limiter.release(1, CLIENT)
        await wait_until_loaded()
    with pytest.raises(DeadlineUnreachable, match=r"about 30 s.*within 12 s") as caught:
        await acquire(limiter, 1, CLIENT, 12.0)
    assert caught.value.retry_after_s == 18
    assert limiter.queued == 30
    tasks.append(await waiting(limiter, within_s=31.0))
    # Another client has its turn after one of this client.
    tasks.append(await waiting(limiter, within_s=12.0, client="192.0.2.2"))
    assert limiter.queued == 32
    await left(*tasks)


async def test_loads_of_clients_say_what_waits_runs_and_ran() -> None:
    limiter = ConcurrencyLimiter(3, max_queued=9)
    heavy = Client("heavy", 2.0)
    await acquire(limiter, 3, heavy, prompt_tokens=50)
    tasks = [await waiting(limiter, client="light") for _ in range(2)]
    assert limiter.loads() == {
        "heavy": ClientLoad(weight=2.0, tokens=50, waiting=0, running=3),
        "light": ClientLoad(weight=1.0, tokens=0, waiting=2, running=0),
    }
    await left(*tasks)
