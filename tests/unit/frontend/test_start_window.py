"""Choices at workers: how many there are, and who starts next."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing

import msgspec
import pytest

from dynamo_trtllm.frontend.requests.concurrency_limiter import ConcurrencyLimiter
from dynamo_trtllm.frontend.requests.token_counters import BELOW_TOKENS, Client
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.start_window import (
    GROUP,
    RequestPlaces,
    Stage,
    StartPlace,
    StartWindow,
)
from dynamo_trtllm.frontend.routing.start_windows import StartWindows
from dynamo_trtllm.protocol.errors import InternalError, Overloaded
from dynamo_trtllm.protocol.messages import (
    ClientShare,
    Instance,
    Limits,
    Phase,
    PhaseTimings,
    Role,
    token_ids,
)
from dynamo_trtllm.protocol.shares import Shares
from tests.kit.admission import Clock, acquire, left, wait_until_loaded
from tests.kit.cases import each_case
from tests.kit.instances import elastic_instance, make_instance
from tests.kit.routing import FINISHED, Cluster, kv_chunk, request, routed_stream
from tests.kit.waiting import SOON_S

MODEL = "mock"
NUM_BLOCKS = 1024
MODEL_NAME = make_instance(1).card.name
PREFILL, OTHER_PREFILL, DECODE, OTHER_DECODE = range(1, 5)
PHASES = {Role.PREFILL: Phase.PREFILL, Role.DECODE: Phase.DECODE}


PREFILL_LIMITS = Limits(max_batch_size=4, kv_blocks=NUM_BLOCKS)
DECODE_LIMITS = Limits(max_batch_size=512, kv_blocks=64 * NUM_BLOCKS)


class Frontend:
    """The queue of a frontend, and its choices at two prefill and two decode workers."""

    def __init__(
        self,
        prefill: Limits = PREFILL_LIMITS,
        decode: Limits = DECODE_LIMITS,
        *,
        can_aggregate: bool = False,
        uses_all_paths: bool = False,
    ) -> None:
        self.can_aggregate = can_aggregate
        self.view = ClusterView()
        for instance_id in (PREFILL, OTHER_PREFILL):
            self.add(make_instance(instance_id, role=Role.PREFILL), prefill)
        for instance_id in (DECODE, OTHER_DECODE):
            self.add(make_instance(instance_id, role=Role.DECODE), decode)
        self.limiter = ConcurrencyLimiter(4096, max_queued=1024)
        self.windows = StartWindows(
            self.view, lambda: self.limiter.grant(), uses_all_paths=uses_all_paths
        )
        self.waiting_places: list[tuple[str, StartPlace]] = []  # choices that have not ended
        self.started: Counter[str] = Counter()  # choices by client
        self.tasks: list[asyncio.Task[None]] = []

    def add(self, instance: Instance, limits: Limits) -> None:
        instance = msgspec.structs.replace(instance, can_aggregate=self.can_aggregate)
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
        places = window.places_for(num_choices, prompt_tokens)

        async def run() -> None:
            await acquire(self.limiter, num_choices, client, 60.0, places)
            for first in range(0, num_choices, GROUP):
                await places.wait_for_group()
                for _ in range(min(GROUP, num_choices - first)):
                    place = places.take()
                    place.called(self.worker(worker), PHASES[self.worker(worker).role])
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

    def take(self, client: str, tokens: int) -> None:
        """Count tokens of a client."""
        counters = self.limiter.counters(self.worker(PREFILL).card.name)
        counters.count(counters.counter(Client(client)), tokens)

    async def end(self) -> None:
        """Let the oldest choice end."""
        _, place = self.waiting_places.pop(0)
        place.leave()
        await wait_until_loaded()

    async def close(self) -> None:
        await left(*self.tasks)


@each_case(
    ("limits", "prompt_tokens", "expected"),
    [
        (PREFILL_LIMITS, 1, 16),  # two steps of each prefill worker
        (Limits(max_batch_size=4096), 1, 256),
        (Limits(max_batch_size=64, max_num_tokens=1000), 100, 40),
        (Limits(max_batch_size=64, max_num_tokens=1000), 5000, 4),  # two at each worker
        (Limits(max_batch_size=64, max_num_tokens=1000), 980, 4),  # a fifth one would not fit
        # A quarter of the KV blocks of the prefill workers; a prompt takes two blocks.
        (Limits(max_batch_size=64, kv_blocks=256), 17, 64),
        (Limits(max_batch_size=64, kv_blocks=256), 16 * 256, 4),
    ],
)
async def test_prompts_at_workers_are_limited_to_two_steps(
    limits: Limits, prompt_tokens: int, expected: int
) -> None:
    frontend = Frontend(limits)
    started = await frontend.send_until_one_waits("a", prompt_tokens=prompt_tokens)
    assert started == expected
    assert frontend.windows.window(MODEL_NAME).full_stage in (Stage.PREFILL, Stage.START)
    await frontend.end()
    assert not frontend.limiter.queued
    await frontend.close()


# Six choices run and wait at each worker whose step has four.
@pytest.mark.parametrize(("can_aggregate", "expected"), [(True, 24), (False, 12)])
async def test_all_paths_use_capable_workers_of_both_roles(
    can_aggregate: bool, expected: int
) -> None:
    frontend = Frontend(decode=PREFILL_LIMITS, can_aggregate=can_aggregate, uses_all_paths=True)
    assert await frontend.send_until_one_waits("a") == expected
    await frontend.close()


async def test_client_below_its_share_waits_for_no_prompts_of_others() -> None:
    frontend = Frontend(Limits(max_batch_size=64, max_num_tokens=1000))
    await frontend.send("light", 1)  # it is active when the flood begins
    await frontend.end()
    assert await frontend.send_until_one_waits("flood", prompt_tokens=1000) == 4
    frontend.take("flood", 2 * BELOW_TOKENS)
    await frontend.end()  # the next one begins behind these tokens
    for _ in range(6):
        await frontend.send("light", 1, prompt_tokens=1000)
    assert frontend.started == {"flood": 5, "light": 5}  # as many as of the other client
    _, place = frontend.waiting_places[-1]
    assert place.share is ClientShare.BELOW
    await frontend.close()


async def test_client_below_its_share_waits_for_decode_slots() -> None:
    frontend = Frontend(decode=Limits(max_batch_size=4))
    await frontend.send("light", 1)
    await frontend.end()
    while not frontend.limiter.queued:
        await frontend.send("flood", 1, worker=DECODE + len(frontend.tasks) % 2)
        if not frontend.limiter.queued:
            frontend.waiting_places[-1][1].decode_began()
    frontend.take("flood", 2 * BELOW_TOKENS)
    await frontend.end()
    await frontend.send("light", 1)
    assert frontend.started["light"] == 1
    await frontend.close()


async def test_share_of_a_client_reaches_the_worker() -> None:
    cluster = Cluster()
    prefill = await cluster.add(PREFILL, Role.PREFILL, [kv_chunk("t1")])
    await cluster.add(DECODE, Role.DECODE, FINISHED)
    window = StartWindow("tiny", cluster.router.view, lambda: None)
    places = window.places_for(1, 3)
    places.begin(ClientShare.BELOW)
    timeline = ChoiceTimeline()
    timeline.place = places.take()
    await cluster.tokens(timeline)
    assert [call.client_share for call in prefill.requests] == [ClientShare.BELOW]


@pytest.mark.parametrize(("priority", "expected"), [(-5, -2), (-1, -1), (3, 3)])
async def test_worker_gets_no_priority_above_the_rank(priority: int, expected: int) -> None:
    cluster = Cluster()
    prefill = await cluster.add(
        PREFILL, Role.PREFILL, [kv_chunk("t1")], supported_features=("priority",)
    )
    decode = await cluster.add(DECODE, Role.DECODE, FINISHED, supported_features=("priority",))
    window = StartWindow("tiny", cluster.router.view, lambda: None)
    places = window.places_for(1, 3, rank=-2)
    places.begin(ClientShare.EVEN)
    timeline = ChoiceTimeline()
    timeline.place = places.take()
    asked = msgspec.structs.replace(request(), priority=priority)
    async with aclosing(routed_stream(cluster.router, asked, timeline)) as stream:
        async for _ in stream:
            pass
    assert [call.priority for call in (*prefill.requests, *decode.requests)] == [expected] * 2


async def test_computed_prompt_lets_the_next_request_begin() -> None:
    frontend = Frontend()
    await frontend.send_until_one_waits("a")
    _, place = frontend.waiting_places[0]
    place.called(frontend.worker(DECODE), Phase.DECODE)
    await wait_until_loaded()
    assert not frontend.limiter.queued
    await frontend.close()


async def test_choices_without_token_are_limited_to_batches() -> None:
    frontend = Frontend()
    # 16 choices of the prefill workers, and 64 of each decode worker.
    assert await frontend.send_until_one_waits("a", worker=DECODE) > 144
    for _, place in frontend.waiting_places[:-100]:
        place.called(frontend.worker(OTHER_DECODE), Phase.DECODE)
    await wait_until_loaded()
    assert frontend.limiter.queued == 1
    await frontend.close()


async def test_decoding_choices_are_limited_to_slots_and_few_more() -> None:
    frontend = Frontend(decode=Limits(max_batch_size=4))
    for number in range(12):  # a slot, and one of four, for each of two workers
        await frontend.send("a", 1, worker=DECODE + number % 2)
        frontend.waiting_places[-1][1].decode_began()
    assert not frontend.limiter.queued
    await frontend.send("a", 1)
    assert frontend.limiter.queued == 1
    assert frontend.windows.window(MODEL_NAME).full_stage is Stage.RUN
    await frontend.end()
    assert not frontend.limiter.queued
    assert frontend.windows.window(MODEL_NAME).full_stage is None
    await frontend.close()


async def test_migrated_choice_counts_as_decoding() -> None:
    frontend = Frontend()
    await frontend.send("a", 1, worker=DECODE)
    ((_, place),) = frontend.waiting_places
    place.decode_began()
    place.called(frontend.worker(PREFILL), Phase.PREFILL)
    window = frontend.windows.window(frontend.worker(PREFILL).card.name)
    assert [usage.total > 0 for usage in window.usages] == [False, False, True]
    assert window.usages[-1].by_worker == {DECODE: 0, PREFILL: window.usages[-1].total}
    await frontend.close()


async def test_cached_prompts_leave_place_for_more() -> None:
    frontend = Frontend(Limits(max_batch_size=64, max_num_tokens=1000))
    # The longest prompt of this request is longer than that of the choice.
    await frontend.send("a", 1, prompt_tokens=400)
    ((_, place),) = frontend.waiting_places
    timeline = ChoiceTimeline(place=place, prefill_stats=PhaseTimings(cached_tokens=75))
    timeline.ended(msgspec.structs.replace(request(), token_ids=token_ids(range(100))))
    await frontend.end()
    started = await frontend.send_until_one_waits("b", prompt_tokens=100)
    assert started == 4 * 40
    await frontend.close()


async def test_start_window_flooded_by_one_client_lets_another_next() -> None:
    frontend = Frontend()
    for _ in range(50):
        await frontend.send("a", 128)
    await frontend.send("b", 1)
    # Two requests of a have begun, one at each prefill worker. Its next one has waited longer than b.
    while not frontend.started["b"]:
        await frontend.end()
    assert frontend.started["a"] == 2 * 128 + GROUP
    await frontend.close()


async def test_start_window_starts_many_choices_in_groups() -> None:
    frontend = Frontend()
    await frontend.send("a", 128)
    assert frontend.started["a"] == 8  # the share of one of two workers
    for _ in range(128):
        await frontend.end()
    assert frontend.started == {"a": 128}
    await frontend.close()


async def test_group_of_hanging_workers_lets_other_requests_begin() -> None:
    frontend = Frontend()
    await frontend.send("a", 128, worker=PREFILL)
    await frontend.send("b", 1, worker=OTHER_PREFILL)
    await frontend.send("c", 128, worker=OTHER_PREFILL)
    assert frontend.started == {"a": GROUP, "b": 1, "c": GROUP}
    await frontend.close()


async def test_group_with_free_places_starts_before_requests() -> None:
    frontend = Frontend()
    await frontend.send("a", 128, worker=PREFILL)
    for _ in range(20):
        await frontend.send("b", 1, worker=OTHER_PREFILL)
    assert frontend.started == {"a": GROUP, "b": 8}
    await frontend.end()  # now fewer than its share wait
    assert frontend.started == {"a": 2 * GROUP, "b": 8}
    await frontend.close()


async def test_start_window_with_hanging_worker_serves_others() -> None:
    frontend = Frontend()
    for _ in range(200):  # they never get a token
        await frontend.send("a", 1, worker=DECODE)
    assert not frontend.limiter.queued
    await frontend.send_until_one_waits("b", worker=OTHER_DECODE)
    assert frontend.started["b"] >= 72
    await frontend.close()


async def test_start_window_forgets_workers_that_have_left() -> None:
    frontend = Frontend()
    places = await frontend.send("a", 1, worker=OTHER_DECODE)
    frontend.view.remove(OTHER_DECODE)
    await frontend.send_until_one_waits("b", worker=DECODE)
    usage = places.window.usages[Stage.START]
    assert OTHER_DECODE in usage.by_worker  # its choice has not ended
    await frontend.end()
    await frontend.send("b", 1, worker=DECODE)
    assert OTHER_DECODE not in usage.by_worker
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
    assert sum(window.usages[Stage.PREFILL].by_worker.values()) > 0  # the last one
    await frontend.close()


async def test_start_window_of_ended_request_starts_the_next() -> None:
    frontend = Frontend()
    places = await frontend.send("a", 128, worker=PREFILL)
    for _ in range(20):
        await frontend.send("b", 1, worker=OTHER_PREFILL)
    assert frontend.started["b"] == 8
    frontend.tasks[0].cancel()  # its client leaves
    places.close()
    await wait_until_loaded()
    assert frontend.started["b"] == 16
    await frontend.close()


async def test_start_window_of_full_model_spares_another() -> None:
    frontend = Frontend()
    await frontend.send_until_one_waits("a")
    places = frontend.windows.window("other").places_for(1, 1)
    await asyncio.wait_for(acquire(frontend.limiter, 1, "a", 60.0, places), 10)
    assert frontend.limiter.queued == 1
    await frontend.close()


async def test_request_does_not_overtake_another_model() -> None:
    frontend = Frontend(Limits(max_batch_size=8))
    frontend.limiter = ConcurrencyLimiter(30, max_queued=10)
    for _ in range(20):
        await frontend.send("a", 1)
    large = frontend.windows.window("other").places_for(20, 1)
    waiting = asyncio.create_task(acquire(frontend.limiter, 20, "b", 60.0, large))
    await wait_until_loaded()
    await frontend.send("c", 1)
    frontend.limiter.release(5, "a")
    small = frontend.windows.window("third").places_for(1, 1)
    later = asyncio.create_task(acquire(frontend.limiter, 1, "d", 60.0, small))
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
    assert (frontend.started["a"], frontend.limiter.queued) == (16, 24)
    with pytest.raises(Overloaded, match="24 of 0 requests are queued"):
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
    window = StartWindow("tiny", cluster.router.view, lambda: None)
    places = window.places_for(1, 3)
    places.begin(ClientShare.EVEN)
    timeline = ChoiceTimeline()
    timeline.place = places.take()
    generating = asyncio.create_task(cluster.tokens(timeline))
    await wait_until_loaded()
    prefill, start, _ = window.usages
    assert prefill.by_worker == {PREFILL: prefill.total}
    assert start.by_worker == {PREFILL: start.total}
    assert min(prefill.total, start.total) > 0
    prefilled.set()
    if fails:
        with pytest.raises(InternalError):
            await generating
    else:
        await asyncio.wait_for(decode.hanging.wait(), SOON_S)
        await wait_until_loaded()
    assert (prefill.total, start.total, sum(start.by_worker.values())) == (0, 0, 0)
    held.set()
    await asyncio.gather(generating, return_exceptions=True)


def test_a_request_is_late_when_its_first_token_would_be() -> None:
    clock = Clock()
    window = StartWindow("tiny", ClusterView(), lambda: None, ttft_s=2.0, clock=clock)
    first = window.places_for(1, 3)
    assert first.late_at_s == clock.now + 2.0
    first.begin(ClientShare.EVEN)
    place = first.take()
    clock.now += 0.5
    place.decode_began()
    assert window.places_for(1, 3).late_at_s == clock.now + 2.0 - 0.5
    assert window.places_for(1, 3, ttft_s=1.0).late_at_s == clock.now + 1.0 - 0.5
    place.decode_began()  # of another attempt
    assert window.places_for(1, 3).late_at_s == clock.now + 2.0 - 0.5


async def test_wait_of_a_later_group_is_not_its_time_to_first_token() -> None:
    clock = Clock()
    window = StartWindow("tiny", ClusterView(), lambda: None, ttft_s=2.0, clock=clock)
    places = window.places_for(GROUP + 1, 3)
    places.begin(ClientShare.EVEN)
    first_group = [places.take() for _ in range(GROUP)]
    for seconds in (0.5, 60.0):  # to the first tokens, and to the ends
        clock.now += seconds
        for place in first_group:
            place.decode_began()
    await places.wait_for_group()
    later = places.take()
    clock.now += 0.5
    later.decode_began()
    assert window.first_token_s == 0.5


@each_case(("num_prefill", "expected"), [(1, 5), (3, 7)])
def test_prompts_wait_for_elastic_workers_that_compute_them(
    num_prefill: int, expected: int
) -> None:
    """Two for each of these, and one for each other one, which computes few."""
    limits = Limits(max_batch_size=256, max_num_tokens=8192)
    workers = [
        msgspec.structs.replace(
            elastic_instance(number, Shares(*((1.0, 0.0) if number < num_prefill else (0.0, 1.0)))),
            limits=limits,
        )
        for number in range(4)
    ]
    view = ClusterView()
    for worker in workers:
        view.add(worker)
    window = StartWindow("tiny", view, lambda: None, uses_all_paths=True)
    num_started = 0
    places = window.places_for(1, 8192)
    while num_started < 20 and places.may_begin(ClientShare.EVEN):
        places.begin(ClientShare.EVEN)
        places.take().called(workers[num_started % num_prefill], Phase.PREFILL)
        num_started += 1
        places = window.places_for(1, 8192)
    assert num_started == expected


def test_prompts_of_one_elastic_worker_leave_the_place_of_others() -> None:
    """What a worker has above its part of the window does not count."""
    limits = Limits(max_batch_size=256, max_num_tokens=8192)
    busy, idle = (
        msgspec.structs.replace(elastic_instance(number), limits=limits) for number in (1, 2)
    )
    view = ClusterView()
    view.add(busy)
    view.add(idle)
    window = StartWindow("tiny", view, lambda: None)
    for _ in range(10):
        places = window.places_for(1, 8192)
        assert places.may_begin(ClientShare.EVEN)
        places.begin(ClientShare.EVEN)
        places.take().called(busy, Phase.PREFILL)
