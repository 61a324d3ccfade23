"""The queue at the frontend's door: turns in order, nothing lost when somebody leaves, the rate behind Retry-After."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_trtllm.errors import DeadlineExceeded, Overloaded
from dynamo_trtllm.frontend.admission import SMALL_BODY_BYTES, BodyBudget, ConcurrencyLimiter, DecayingRate


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def waiting(permits: ConcurrencyLimiter, count: int = 1, within_s: float = 30.0) -> asyncio.Task[None]:
    task = asyncio.create_task(permits.take(count, within_s))
    await settled()
    return task


async def left(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_take_when_there_is_room_then_at_once() -> None:
    permits = ConcurrencyLimiter(3)
    await permits.take(2, 30.0)
    await permits.take(1, 30.0)
    assert (permits.taken, permits.queued) == (3, 0)


async def test_take_when_full_then_turns_come_in_order_of_arrival() -> None:
    permits = ConcurrencyLimiter(1, max_queued=2)
    await permits.take(1, 30.0)
    first, second = await waiting(permits), await waiting(permits)
    assert permits.queued == 2
    permits.give_back(1)
    await settled()
    assert (first.done(), second.done()) == (True, False)
    permits.give_back(1)
    await second
    assert (permits.taken, permits.queued) == (1, 0)


async def test_take_when_the_queue_is_full_then_overloaded_and_check_says_so_before() -> None:
    permits = ConcurrencyLimiter(1, max_queued=1)
    permits.check()
    await permits.take(1, 30.0)
    permits.check()
    task = await waiting(permits)
    with pytest.raises(Overloaded, match=r"1 of at most 1 choices .* 1 requests wait, of at most 1"):
        permits.check()
    with pytest.raises(Overloaded):
        await permits.take(1, 30.0)
    await left(task)
    permits.check()


async def test_take_when_several_choices_then_all_at_one_time_and_nobody_passes() -> None:
    permits = ConcurrencyLimiter(3, max_queued=9)
    await permits.take(2, 30.0)
    large, small = await waiting(permits, 3), await waiting(permits, 1)
    assert permits.taken == 2
    permits.give_back(2)
    await settled()
    assert (large.done(), small.done(), permits.taken) == (True, False, 3)
    permits.give_back(3)
    await small
    assert permits.taken == 1


async def test_take_when_the_deadline_passes_in_the_queue_then_it_leaves_and_the_next_moves_up() -> None:
    permits = ConcurrencyLimiter(2, max_queued=9)
    await permits.take(1, 30.0)
    large = await waiting(permits, 2, within_s=0.01)
    small = await waiting(permits, 1)
    with pytest.raises(DeadlineExceeded, match="while it waited"):
        await large
    await small  # there was room for it all along
    assert (permits.taken, permits.queued) == (2, 0)


async def test_take_when_no_time_is_left_then_deadline() -> None:
    permits = ConcurrencyLimiter(1, max_queued=1)
    await permits.take(1, 30.0)
    with pytest.raises(DeadlineExceeded):
        await permits.take(1, -1.0)
    assert (permits.taken, permits.queued) == (1, 0)


async def test_take_when_the_client_leaves_the_queue_then_its_place_is_free_at_once() -> None:
    permits = ConcurrencyLimiter(1, max_queued=1)
    await permits.take(1, 30.0)
    await left(await waiting(permits))
    assert (permits.taken, permits.queued) == (1, 0)
    permits.give_back(1)
    assert permits.taken == 0


async def test_take_when_the_client_leaves_as_its_turn_comes_then_the_permit_goes_to_the_next() -> None:
    permits = ConcurrencyLimiter(1, max_queued=2)
    await permits.take(1, 30.0)
    first, second = await waiting(permits), await waiting(permits)
    permits.give_back(1)  # its turn came, and before it could run it is cancelled
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await second
    assert (permits.taken, permits.queued) == (1, 0)


async def test_take_when_the_turn_comes_as_the_client_has_just_left_then_the_permit_goes_to_the_next() -> None:
    permits = ConcurrencyLimiter(1, max_queued=2)
    await permits.take(1, 30.0)
    first, second = await waiting(permits), await waiting(permits)
    first.cancel()
    permits.give_back(1)
    await asyncio.gather(first, return_exceptions=True)
    await second
    assert (permits.taken, permits.queued) == (1, 0)


def test_rate_when_steady_then_it_is_what_came_per_second() -> None:
    rate = DecayingRate(10.0)
    for tick in range(200):
        rate.note(tick / 4, 2)
    assert rate.per_s(50.0) == pytest.approx(8.0, rel=0.05)


def test_rate_when_young_then_it_is_not_underrated() -> None:
    rate = DecayingRate(10.0)
    for tick in range(8):
        rate.note(tick / 4, 1)
    assert rate.per_s(2.0) == pytest.approx(4.0, rel=0.1)


def test_rate_when_nothing_comes_any_more_then_it_falls() -> None:
    rate = DecayingRate(10.0)
    assert rate.per_s(5.0) == 0.0
    rate.note(0.0, 10)
    assert rate.per_s(1.0) > 2 * rate.per_s(20.0) > 0


@pytest.mark.parametrize(
    ("per_s", "queued", "least", "most"), [(1.0, 4, 5, 5), (0.1, 0, 8, 10), (100.0, 4, 1, 1), (0.01, 4, 60, 60)]
)
async def test_retry_after_when_the_rate_is_known_then_the_time_of_the_queue(
    per_s: float, queued: int, least: int, most: int
) -> None:
    clock = Clock()
    permits = ConcurrencyLimiter(1000, max_queued=queued, clock=clock)
    await permits.take(1000, 30.0)
    tasks = [await waiting(permits, 1000) for _ in range(queued)]
    for _ in range(400):
        clock.now += 1 / per_s
        permits.give_back(1)
    assert least <= permits.retry_after_s() <= most
    await left(*tasks)


def test_retry_after_when_nothing_has_ended_yet_then_a_second() -> None:
    assert ConcurrencyLimiter(1).retry_after_s() == 1


async def test_retry_after_when_nothing_ran_for_long_then_what_ended_before_does_not_count() -> None:
    now = 0.0
    permits = ConcurrencyLimiter(1, clock=lambda: now)
    for _ in range(20):
        await permits.take(1, 30.0)
        now += 1.0
        permits.give_back(1)
    now += 600.0
    await permits.take(1, 30.0)
    assert permits.retry_after_s() == 1  # not a minute, as if one answer took that long
    now += 2.0
    permits.give_back(1)
    await permits.take(1, 30.0)
    assert permits.retry_after_s() <= 2


async def test_body_budget_when_large_bodies_have_their_half_then_the_oldest_goes_on_and_small_ones_are_served() -> (
    None
):
    budget = BodyBudget(8 * SMALL_BODY_BYTES)
    first, second, third, small = (budget.body() for _ in range(4))
    for body in (first, second):
        await budget.take(2 * SMALL_BODY_BYTES, body)
    await budget.take(2 * SMALL_BODY_BYTES, first)  # else the two would wait for each other
    waiting = [asyncio.create_task(budget.take(2 * SMALL_BODY_BYTES, body)) for body in (third, second)]
    await settled()
    await budget.take(SMALL_BODY_BYTES, small)
    assert not any(task.done() for task in waiting)
    budget.give_back(first)
    await waiting[1]
    assert not waiting[0].done()
    budget.give_back(second)
    await waiting[0]
    assert budget.taken == 3 * SMALL_BODY_BYTES


async def test_body_budget_when_bytes_are_not_free_in_time_then_overloaded() -> None:
    budget = BodyBudget(100, wait_s=0.0)
    await budget.take(60, budget.body())
    with pytest.raises(Overloaded, match="--max-total-body-bytes"):
        await budget.take(60, budget.body())
    assert budget.taken == 60


async def test_body_budget_when_bytes_are_granted_as_the_client_leaves_then_they_are_free_with_its_body() -> None:
    budget = BodyBudget(100)
    holding, leaving = budget.body(), budget.body()
    await budget.take(100, holding)
    task = asyncio.create_task(budget.take(50, leaving))
    await settled()
    budget.give_back(holding)
    await left(task)
    budget.give_back(leaving)
    assert budget.taken == 0
