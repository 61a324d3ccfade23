"""Limits on the bytes of bodies, and turns in which bodies are planned and choices are started."""

from __future__ import annotations

import asyncio
import weakref
from itertools import chain

import pytest

from dynamo_trtllm.frontend.requests import request_body
from dynamo_trtllm.frontend.requests.admission import (
    CHOICES_PER_ITERATION,
    TURNS_PER_ITERATION,
    WORK_S,
    ChoiceTurns,
    IterationTime,
)
from dynamo_trtllm.frontend.requests.request_body import (
    SMALL_BODY_BYTES,
    TINY_BODY_BYTES,
    BodyBudget,
    read_body,
)
from dynamo_trtllm.protocol.errors import Overloaded, PayloadTooLarge, RequestTimeout
from dynamo_trtllm.support.http_server.exchange import HttpRequest
from dynamo_trtllm.support.http_server.request_head import Headers
from tests.kit.admission import Clock, left, wait_until_loaded

# Work that takes the time of an iteration: a little more, because differences of times are rounded.
ALL_TIME_S = 1.01 * WORK_S


async def test_body_budget_full_of_large_bodies_serves_small_ones() -> None:
    budget = BodyBudget(8 * SMALL_BODY_BYTES)
    first, second, third, small = (budget.body() for _ in range(4))
    for body in (first, second):
        await budget.acquire(2 * SMALL_BODY_BYTES, body)
    await budget.acquire(2 * SMALL_BODY_BYTES, first)  # else the two would wait for each other
    waiting = [
        asyncio.create_task(budget.acquire(2 * SMALL_BODY_BYTES, body)) for body in (third, second)
    ]
    await wait_until_loaded()
    await budget.acquire(SMALL_BODY_BYTES, small)
    assert not any(task.done() for task in waiting)
    budget.release(first)
    await waiting[1]
    assert not waiting[0].done()
    budget.release(second)
    await waiting[0]
    assert budget.in_use == 3 * SMALL_BODY_BYTES


async def test_body_budget_favored_body_passes_an_older_one() -> None:
    budget = BodyBudget(8 * SMALL_BODY_BYTES)
    older = budget.body()
    favored = budget.body()
    await budget.acquire(4 * SMALL_BODY_BYTES, budget.body())
    await budget.acquire(SMALL_BODY_BYTES + 1, favored)
    waiting = asyncio.create_task(budget.acquire(2 * SMALL_BODY_BYTES, older))
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await budget.acquire(1, favored)
    assert not waiting.done()
    waiting.cancel()


async def test_body_budget_reserves_the_favored_quarter() -> None:
    budget = BodyBudget(8 * SMALL_BODY_BYTES)
    first = budget.body()
    second = budget.body()
    for body in (first, second):
        await budget.acquire(2 * SMALL_BODY_BYTES, body)
    await budget.acquire(SMALL_BODY_BYTES, first)
    # while the first receives its next part
    waits = asyncio.create_task(budget.acquire(SMALL_BODY_BYTES, second))
    await wait_until_loaded()
    assert not waits.done()
    await budget.acquire(SMALL_BODY_BYTES, first)
    budget.release(first)
    await waits


async def test_body_budget_not_free_in_time_is_overloaded() -> None:
    budget = BodyBudget(100, wait_s=0.0)
    await budget.acquire(60, budget.body())
    with pytest.raises(Overloaded, match="--max-total-body-bytes"):
        await budget.acquire(60, budget.body())
    assert budget.in_use == 60


async def test_read_body_error_releases_the_received_bytes() -> None:
    class Part(bytearray):
        """Bytes to which a weak reference is possible."""

    request = HttpRequest("POST", "/", "", Headers(), "", lambda: None)
    parts = [Part(b"x" * 60), Part(b"x" * 60)]
    received = weakref.ref(parts[0])
    budget = BodyBudget(1000)

    async def receive() -> bytes:
        return parts.pop(0)  # type: ignore[return-value]

    request.receive = receive  # type: ignore[method-assign]
    with pytest.raises(PayloadTooLarge) as failed:
        await read_body(request, 100, 60.0, budget, budget.body())
    assert failed.value.__traceback__ is not None
    assert received() is None


async def test_body_budget_granted_to_a_leaving_client_is_freed() -> None:
    budget = BodyBudget(100)
    holding = budget.body()
    leaving = budget.body()
    await budget.acquire(100, holding)
    task = asyncio.create_task(budget.acquire(50, leaving))
    await wait_until_loaded()
    budget.release(holding)
    await left(task)
    budget.release(leaving)
    assert budget.in_use == 0


async def test_body_budget_grant_looks_at_few_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    fits = BodyBudget._fits

    def count_looks(budget: BodyBudget, waiting: request_body._WaitingBody) -> bool:
        nonlocal looks
        looks += 1
        return fits(budget, waiting)

    monkeypatch.setattr(BodyBudget, "_fits", count_looks)
    budget = BodyBudget(4 * TINY_BODY_BYTES)
    holding = [budget.body() for _ in range(4)]
    for body in holding:
        await budget.acquire(TINY_BODY_BYTES, body)
    waiting = [budget.body() for _ in range(200)]
    tasks = [asyncio.create_task(budget.acquire(TINY_BODY_BYTES, body)) for body in waiting]
    await wait_until_loaded()
    await left(*tasks[:50])
    for body in [*holding, *waiting]:
        budget.release(body)
        await wait_until_loaded()
    assert all(task.done() for task in tasks)
    assert looks <= 4 * len(tasks)
    assert budget.in_use == 0


async def planned(num_bodies: int, each_s: float, cancelled: int | None = None) -> list[list[int]]:
    """Return the bodies that were planned in each iteration of the event loop.

    Planning one takes `each_s`.
    """
    clock = Clock()
    planning = IterationTime(clock)
    by_iteration: list[list[int]] = [[]]

    async def plan(number: int) -> None:
        async with planning.turn():
            clock.now += each_s
            by_iteration[-1].append(number)

    tasks = [asyncio.create_task(plan(number)) for number in range(num_bodies)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        by_iteration.append([])
        if cancelled is not None:
            tasks[cancelled].cancel()
    return [numbers for numbers in by_iteration if numbers]


async def test_planning_of_quick_bodies_takes_one_iteration() -> None:
    assert await planned(4, WORK_S / 5) == [[0, 1, 2, 3]]


async def test_planning_over_time_continues_in_order() -> None:
    assert await planned(7, WORK_S / 2.5) == [[0, 1, 2], [3, 4, 5], [6]]


async def test_planning_of_later_bodies_follows_waiting_ones() -> None:
    clock = Clock()
    order = list[int]()
    planning = IterationTime(clock)

    async def plan(number: int) -> None:
        async with planning.turn():
            clock.now += ALL_TIME_S
            order.append(number)

    tasks = []
    for number in range(8):
        tasks += [asyncio.create_task(plan(2 * number)), asyncio.create_task(plan(2 * number + 1))]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert order == list(range(16))


async def test_planning_cancelled_lets_others_continue() -> None:
    assert await planned(4, ALL_TIME_S, cancelled=2) == [[0], [1], [3]]


async def test_planning_when_one_fails_then_its_time_counts() -> None:
    clock = Clock()
    events = list[str]()
    planning = IterationTime(clock)

    async def fail() -> None:
        async with planning.turn():
            clock.now += ALL_TIME_S
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await fail()
    asyncio.get_running_loop().call_soon(events.append, "other work")
    async with planning.turn():
        events.append("planned")
    assert events == ["other work", "planned"]


async def test_planning_of_unlike_bodies_bounds_each_iteration() -> None:
    clock = Clock()
    planning = IterationTime(clock)
    took = [0.0]

    async def plan(seconds: float) -> None:
        async with planning.turn():
            clock.now += seconds
            took[-1] += seconds

    each_s = [ALL_TIME_S, *[0.0] * 40, *[0.6 * WORK_S] * 40]
    tasks = [asyncio.create_task(plan(seconds)) for seconds in each_s]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        took.append(0.0)
    assert max(took) == pytest.approx(1.2 * WORK_S)


async def test_planning_ignores_time_of_other_tasks() -> None:
    clock = Clock()
    planning = IterationTime(clock)
    planned_in = list[int]()
    iteration = 0

    async def plan() -> None:
        async with planning.turn():
            planned_in.append(iteration)
        clock.now += WORK_S  # other work of the same iteration

    tasks = [asyncio.create_task(plan()) for _ in range(3)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        iteration += 1
    assert planned_in == [0, 0, 0]


async def test_ending_of_many_choices_takes_an_iteration_each() -> None:
    ending = IterationTime(Clock())
    ended_in = list[int]()
    iteration = 0
    num_choices = 2 * TURNS_PER_ITERATION  # more than an iteration has turns

    async def end() -> None:
        async with ending.turn(num_choices):
            ended_in.append(iteration)

    tasks = [asyncio.create_task(end()) for _ in range(3)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        iteration += 1
    assert len(ended_in) == len(set(ended_in)) == 3


async def test_planning_of_many_bodies_checks_only_own_turn() -> None:
    looks = 0

    def count_looks() -> float:
        nonlocal looks
        looks += 1
        return 0.0

    planning = IterationTime(count_looks)

    async def plan() -> None:
        async with planning.turn():
            pass

    num_bodies = 20 * TURNS_PER_ITERATION
    await asyncio.gather(*(plan() for _ in range(num_bodies)))
    assert looks <= 2 * num_bodies


async def acted_on(*requests: int, leaving: int | None = None) -> list[list[int]]:
    """Return, for each iteration of the event loop, the requests whose choices had a turn, once per
    choice.

    Args:
        requests: the choices of each request, which all begin at the same time.
        leaving: the request that is cancelled after the first iteration.
    """
    turns = ChoiceTurns(Clock())
    by_iteration: list[list[int]] = [[]]
    tasks = [
        asyncio.create_task(
            turns.run([request] * count, lambda request: by_iteration[-1].append(request))
        )
        for request, count in enumerate(requests)
    ]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        if leaving is not None:
            tasks[leaving].cancel()
        by_iteration.append([])
    return [acted for acted in by_iteration if acted]


async def test_choice_turns_of_requests_alternate() -> None:
    by_iteration = await acted_on(128, 128, 128)
    assert max(map(len, by_iteration)) <= CHOICES_PER_ITERATION
    assert set(chain(*by_iteration[:2])) == {0, 1, 2}
    assert sorted(chain(*by_iteration)) == [0] * 128 + [1] * 128 + [2] * 128


async def test_choice_turns_include_requests_with_few_choices() -> None:
    by_iteration = await acted_on(*[2] * 100)
    assert max(map(len, by_iteration)) == CHOICES_PER_ITERATION
    assert [*chain(*by_iteration)] == sorted([*range(100)] * 2)


async def test_choice_turns_of_a_gone_request_are_skipped() -> None:
    by_iteration = await acted_on(128, 128, leaving=0)
    assert [*chain(*by_iteration)].count(0) <= CHOICES_PER_ITERATION
    assert [*chain(*by_iteration)].count(1) == 128


async def test_choice_turns_are_not_needed_for_one_choice() -> None:
    assert [0] * 100 not in await acted_on(100, 1)
    assert 1 in (await acted_on(100, 1))[0]


class Arrivals:
    """Bodies that have arrived in part."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.tasks: list[asyncio.Task[None]] = []
        # client and bytes of the bodies that were ended, and why
        self.ended: list[tuple[str, int]] = []
        self.errors: list[str] = []

    async def add(self, client: str, size: int) -> None:
        self.tasks.append(asyncio.create_task(self._receive(client, size)))
        await wait_until_loaded()

    async def _receive(self, client: str, size: int) -> None:
        body = self._budget.body(client)
        try:
            async with self._budget.arrival(body, 600.0):
                await self._budget.acquire(size, body)
                await asyncio.Event().wait()
        except RequestTimeout as error:
            self.ended.append((client, size))
            self.errors.append(error.message)
        finally:
            self._budget.release(body)


async def test_body_budget_reserves_space_for_a_tiny_body() -> None:
    budget = BodyBudget(16 * SMALL_BODY_BYTES)
    for _ in range(14):
        await budget.acquire(SMALL_BODY_BYTES, budget.body())
    small = asyncio.create_task(budget.acquire(SMALL_BODY_BYTES, budget.body()))
    await wait_until_loaded()
    assert not small.done()
    await budget.acquire(TINY_BODY_BYTES, budget.body())
    await left(small)


@pytest.mark.parametrize(
    ("seconds", "size", "ended"),
    [
        pytest.param(0.9, 128, [], id="they have just begun, then none ends"),
        pytest.param(1.9, 128, [("busy", 64)], id="one is slow, then it ends"),
        pytest.param(60.0, 128, [("busy", 64)], id="all are slow, then no more end than needed"),
        pytest.param(
            60.0,
            192,
            [("busy", 64), ("busy", 120)],
            id="it needs more, then one client gives way first",
        ),
        pytest.param(60.0, 64, [], id="enough is free, then none ends"),
    ],
)
async def test_body_budget_when_a_body_needs_the_share_of_others_and(
    seconds: float, size: int, ended: list[tuple[str, int]]
) -> None:
    clock = Clock()
    budget = BodyBudget(1024 << 10, clock=clock)  # 896 KiB for those of this size
    arrivals = Arrivals(budget)
    for client, kib in (
        ("other", 124),
        ("busy", 124),
        ("busy", 120),
        ("other", 96),
        ("busy", 64),
        ("busy", 124),
    ):
        await arrivals.add(client, kib << 10)
    await arrivals.add("another", 120 << 10)
    await arrivals.add("idle", 0)
    clock.now += seconds
    half_bytes = size // 2 << 10
    asking = []
    for _ in range(2):
        acquired = budget.acquire(half_bytes, budget.body("new"))
        asking.append(asyncio.create_task(acquired))
    await wait_until_loaded()
    assert sorted(arrivals.ended) == [(client, kib << 10) for client, kib in ended]
    assert all(task.done() for task in asking) == (seconds > 1 or size == 64)
    assert all(
        "arrived at less than 64 KiB/s while other requests needed" in text
        for text in arrivals.errors
    )
    await left(*asking, *arrivals.tasks)


async def test_body_budget_ends_bodies_that_become_slow() -> None:
    clock = Clock()
    budget = BodyBudget(16 << 10, clock=clock, eviction_age_s=0.01)
    arrivals = Arrivals(budget)
    await arrivals.add("slow", 16 << 10)
    asking = asyncio.create_task(budget.acquire(1, budget.body("new")))
    await wait_until_loaded()
    assert not asking.done()
    clock.now += 60.0
    await asking
    assert arrivals.ended == [("slow", 16 << 10)]


async def test_body_budget_wait_is_not_time_of_the_body() -> None:
    clock = Clock()
    budget = BodyBudget(64 << 10, wait_s=600.0, clock=clock, eviction_age_s=0.01)
    full = budget.body()
    arrivals = Arrivals(budget)
    await budget.acquire(56 << 10, full)
    await arrivals.add("patient", 16 << 10)
    clock.now += 60.0
    budget.release(full)
    await wait_until_loaded()
    await budget.acquire(40 << 10, budget.body())
    asking = asyncio.create_task(budget.acquire(16 << 10, budget.body()))
    await asyncio.sleep(0.03)
    assert (asking.done(), arrivals.ended) == (False, [])
    await left(asking, *arrivals.tasks)


async def test_body_budget_all_free_returns_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    returned = asyncio.Event()
    monkeypatch.setattr(request_body, "return_freed_memory", returned.set)
    budget = BodyBudget(1000, returned_bytes=100, return_after_s=0.0)
    for sizes, is_returned in (((60, 60), True), ((60,), False)):
        returned.clear()
        bodies = [budget.body() for _ in sizes]
        for size, body in zip(sizes, bodies, strict=True):
            await budget.acquire(size, body)
        for body in bodies:
            budget.release(body)
        await asyncio.sleep(0.01)
        assert returned.is_set() == is_returned
