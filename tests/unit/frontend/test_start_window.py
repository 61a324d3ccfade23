"""Choices that wait for their first token: how many workers get, and who starts next."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pytest

from dynamo_trtllm.frontend.requests.concurrency_limiter import ConcurrencyLimiter
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.start_window import (
    GROUP,
    RequestPlaces,
    StartPlace,
    StartWindow,
    StartWindows,
)
from dynamo_trtllm.protocol.errors import InternalError, Overloaded
from dynamo_trtllm.protocol.messages import Instance, Limits, Role
from tests.kit.admission import left, wait_until_loaded
from tests.kit.instances import make_instance
from tests.kit.routing import FINISHED, Cluster, kv_chunk
from tests.kit.waiting import SOON_S

MODEL = "mock"
NUM_BLOCKS = 1024
PREFILL, OTHER_PREFILL, DECODE, OTHER_DECODE = range(1, 5)


class Frontend:
    """The queue of a frontend, and its choices at two prefill and two decode workers."""

    def __init__(self, batch_size: int = 4, num_processes: int = 1) -> None:
        self.view = ClusterView()
        limits = Limits(max_batch_size=batch_size, kv_blocks=NUM_BLOCKS)
        for instance_id in (PREFILL, OTHER_PREFILL):
            self.add(make_instance(instance_id, role=Role.PREFILL), limits)
        for instance_id in (DECODE, OTHER_DECODE):
            self.add(make_instance(instance_id, role=Role.DECODE), limits)
        self.limiter = ConcurrencyLimiter(4096, max_queued=1024)
        self.windows = StartWindows(self.view, num_processes, lambda: self.limiter.grant())
        self.waiting_places: list[tuple[str, StartPlace]] = []  # choices without a token
        self.started: Counter[str] = Counter()  # choices by client
        self.tasks: list[asyncio.Task[None]] = []

    def add(self, instance: Instance, limits: Limits) -> None:
        self.view.add(msgspec.structs.replace(instance, limits=limits))

    def worker(self, instance_id: int) -> Instance:
        worker = self.view.instance(instance_id)
        assert worker is not None
        return worker

    async def send(
        self, client: str, num_choices: int, prompt_tokens: int = 1, worker: int | None = None
    ) -> RequestPlaces:
        """Send a request, whose choices start when they may, and are called at a worker.

        Without a worker, the prefill workers take turns.
        """
        if worker is None:
            worker = PREFILL if len(self.tasks) % 2 else OTHER_PREFILL
        window = self.windows.window(self.worker(PREFILL).card.name)
        places = window.request(num_choices, prompt_tokens)

        async def run() -> None:
            await self.limiter.acquire(num_choices, client, 60.0, places)
            for first in range(0, num_choices, GROUP):
                await places.wait_for_group()
                for _ in range(min(GROUP, num_choices - first)):
                    place = places.take()
                    place.called(self.worker(worker))
                    self.started[client] += 1
                    self.waiting_places.append((client, place))

        self.tasks.append(asyncio.create_task(run()))
        await wait_until_loaded()
        return places

    async def send_until_one_waits(self, client: str, **options: int) -> int:
        """Send requests for one choice until one waits. Return how many have started."""
        while not self.limiter.queued:
            await self.send(client, 1, **options)
        return self.started[client]

    async def first_token(self) -> None:
        """Let the oldest choice have its first token."""
        _, place = self.waiting_places.pop(0)
        place.leave()
        await wait_until_loaded()

    async def close(self) -> None:
        await left(*self.tasks)


@pytest.mark.parametrize(
    ("batch_size", "prompt_tokens", "num_processes", "expected"),
    [
        (4, 1, 1, 24),  # two steps of each prefill worker, one of each decode worker
        (4, 1, 2, 12),
        (4096, 1, 1, 384),
        (4096, 17, 1, 256),  # each prompt takes two blocks
        (4096, 16 * 16, 1, 32),  # a quarter of the KV of the prefill workers
        (4096, 16 * NUM_BLOCKS, 1, 4),  # two at each prefill worker
    ],
)
async def test_start_window_is_limited_until_a_token(
    batch_size: int, prompt_tokens: int, num_processes: int, expected: int
) -> None:
    frontend = Frontend(batch_size, num_processes)
    started = await frontend.send_until_one_waits("a", prompt_tokens=prompt_tokens)
    assert expected <= started <= expected + 1
    await frontend.first_token()
    await frontend.first_token()
    assert not frontend.limiter.queued
    await frontend.close()


async def test_start_window_flooded_by_one_client_lets_another_next() -> None:
    frontend = Frontend()
    for _ in range(50):
        await frontend.send("a", 128)
    await frontend.send("b", 1)
    # Of the requests of a, the first has begun, and the next one has had the turn before.
    while not frontend.started["b"]:
        await frontend.first_token()
    assert frontend.started["a"] <= 2 * 128 + 2 * GROUP
    await frontend.close()


async def test_start_window_starts_many_choices_in_groups() -> None:
    frontend = Frontend()
    await frontend.send("a", 128)
    assert 12 <= frontend.started["a"] <= 12 + GROUP  # the share of one of two workers
    for _ in range(128):
        await frontend.first_token()
    assert frontend.started == {"a": 128}
    await frontend.close()


async def test_group_of_hanging_workers_lets_other_requests_begin() -> None:
    frontend = Frontend()
    await frontend.send("a", 128, worker=PREFILL)
    await frontend.send("b", 1, worker=OTHER_PREFILL)
    await frontend.send("c", 128, worker=OTHER_PREFILL)
    assert frontend.started == {"a": 2 * GROUP, "b": 1, "c": 2 * GROUP}
    await frontend.close()


async def test_group_with_free_places_starts_before_requests() -> None:
    frontend = Frontend()
    await frontend.send("a", 128, worker=PREFILL)
    for _ in range(20):
        await frontend.send("b", 1, worker=OTHER_PREFILL)
    assert frontend.started == {"a": 2 * GROUP, "b": 12}
    for _ in range(5):  # now fewer than its share wait
        await frontend.first_token()
    assert frontend.started == {"a": 3 * GROUP, "b": 12}
    await frontend.close()


async def test_start_window_with_hanging_worker_serves_others() -> None:
    frontend = Frontend()
    for _ in range(100):  # they never get a token
        await frontend.send("a", 1, worker=DECODE)
    assert not frontend.limiter.queued
    await frontend.send_until_one_waits("b", worker=OTHER_DECODE)
    assert frontend.started["b"] >= 12
    await frontend.close()


async def test_start_window_forgets_workers_that_have_left() -> None:
    frontend = Frontend()
    places = await frontend.send("a", 1, worker=OTHER_DECODE)
    frontend.view.remove(OTHER_DECODE)
    await frontend.send_until_one_waits("b", worker=DECODE)
    assert OTHER_DECODE in places.window.cost_at  # its choice has not ended
    await frontend.first_token()
    await frontend.send("b", 1, worker=DECODE)
    assert OTHER_DECODE not in places.window.cost_at
    await frontend.close()


@pytest.mark.parametrize("ends", [StartPlace.leave, StartPlace.waits_for_workers])
async def test_start_window_skips_choices_without_worker(ends: object) -> None:
    frontend = Frontend()
    await frontend.send_until_one_waits("a")
    for _, place in frontend.waiting_places:
        ends(place)  # type: ignore[operator]
        ends(place)  # type: ignore[operator]
    await wait_until_loaded()
    assert not frontend.limiter.queued
    window = frontend.windows.window(frontend.worker(PREFILL).card.name)
    assert sum(window.cost_at.values()) > 0  # the last one
    await frontend.close()


async def test_start_window_of_ended_request_starts_the_next() -> None:
    frontend = Frontend()
    places = await frontend.send("a", 128, worker=PREFILL)
    for _ in range(20):
        await frontend.send("b", 1, worker=OTHER_PREFILL)
    assert frontend.started["b"] == 12
    frontend.tasks[0].cancel()  # its client leaves
    places.close()
    await wait_until_loaded()
    assert frontend.started["b"] == 20
    await frontend.close()


async def test_start_window_of_full_model_spares_another() -> None:
    frontend = Frontend()
    await frontend.send_until_one_waits("a")
    places = frontend.windows.window("other").request(1, 1)
    await asyncio.wait_for(frontend.limiter.acquire(1, "a", 60.0, places), 10)
    assert frontend.limiter.queued == 1
    await frontend.close()


async def test_request_does_not_overtake_another_model() -> None:
    frontend = Frontend()
    frontend.limiter = ConcurrencyLimiter(30, max_queued=10)
    for _ in range(20):
        await frontend.send("a", 1)
    large = frontend.windows.window("other").request(20, 1)
    waiting = asyncio.create_task(frontend.limiter.acquire(20, "b", 60.0, large))
    await wait_until_loaded()
    await frontend.send("c", 1)
    frontend.limiter.release(5, "a")
    small = frontend.windows.window("third").request(1, 1)
    later = asyncio.create_task(frontend.limiter.acquire(1, "d", 60.0, small))
    await wait_until_loaded()
    assert (frontend.limiter.queued, frontend.limiter.in_use) == (3, 15)
    frontend.limiter.release(5, "a")
    await wait_until_loaded()
    assert (waiting.done(), frontend.limiter.in_use) == (True, 30)
    await left(later)
    await frontend.close()


async def test_queue_with_permits_for_all_is_never_full() -> None:
    frontend = Frontend()
    frontend.limiter = ConcurrencyLimiter(40, max_queued=0)
    for _ in range(40):
        await frontend.send("a", 1)
    assert (frontend.started["a"], frontend.limiter.queued) == (24, 16)
    with pytest.raises(Overloaded, match="16 of 0 requests are queued"):
        frontend.limiter.check("a")
    await frontend.close()


@pytest.mark.parametrize("fails", [False, True])
async def test_place_is_free_at_first_token_or_failure(fails: bool) -> None:
    cluster = Cluster()
    prefilled = asyncio.Event()
    held = asyncio.Event()
    await cluster.add(PREFILL, Role.PREFILL, [prefilled, kv_chunk("t1")])
    decoded = [InternalError("a bug")] if fails else [FINISHED[0], held, *FINISHED[1:]]
    decode = await cluster.add(DECODE, Role.DECODE, decoded)
    window = StartWindow("tiny", cluster.router.view, 1, lambda: None)
    places = window.request(1, 3)
    places.begin()
    timeline = ChoiceTimeline()
    timeline.place = places.take()
    generating = asyncio.create_task(cluster.tokens(timeline))
    await wait_until_loaded()
    assert window.cost_at == {PREFILL: window.cost}
    assert window.cost > 0
    prefilled.set()
    if fails:
        with pytest.raises(InternalError):
            await generating
    else:
        await asyncio.wait_for(decode.hanging.wait(), SOON_S)
        await wait_until_loaded()
    assert (window.cost, sum(window.cost_at.values())) == (0, 0)
    held.set()
    await asyncio.gather(generating, return_exceptions=True)
