"""Shares of clients with a simulated prefill worker. Its steps take simulated time."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import pytest

from dynamo_trtllm.engines.waiting_requests import queue_order, step_limit
from dynamo_trtllm.frontend.requests.concurrency_limiter import ConcurrencyLimiter
from dynamo_trtllm.frontend.requests.token_counters import BURST_TOKENS, Client, CountedRequest
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.start_window import RequestPlaces, StartPlace
from dynamo_trtllm.frontend.routing.start_windows import StartWindows
from dynamo_trtllm.protocol.messages import Limits, Phase, Role
from dynamo_trtllm.testing.engine_requests import ask, prompt_of
from tests.kit.admission import Clock, acquire, left, wait_until_loaded
from tests.kit.instances import make_instance

STEP_TOKENS = 4096
STEP_S = 0.1
PROMPT_TOKENS = 512
NO_LIMIT_S = 1e6  # for a test of a few simulated seconds may take long
PREFILL, DECODE = 1, 2
CALL = ask(prompt_of(1))


class Request:
    def __init__(self, client: str, tokens: int, sent_s: float, places: RequestPlaces) -> None:
        self.client = client
        self.tokens = tokens
        self.tokens_left = tokens  # that are not computed yet
        self.sent_s = sent_s
        self.places = places
        self.place: StartPlace | None = None
        self.call = CALL
        self.counted: CountedRequest | None = None


class Simulation:
    """A frontend, and a prefill worker that takes prompts as the mock and the torch engine do.

    Args:
        most: tokens of a step, which takes STEP_S with as many.
        fixed_s: how much longer each step takes.
        settle_s: waits of requests that are sent before this time do not count.
    """

    def __init__(
        self, most: int = STEP_TOKENS, fixed_s: float = 0.0, settle_s: float = 0.0
    ) -> None:
        self.most = most
        self.fixed_s = fixed_s
        self.view = ClusterView()
        prefill = Limits(max_batch_size=64, max_num_tokens=most)
        for instance, limits in (
            (make_instance(PREFILL, role=Role.PREFILL), prefill),
            (make_instance(DECODE, role=Role.DECODE), Limits(max_batch_size=4096)),
        ):
            self.view.add(msgspec.structs.replace(instance, limits=limits))
            self.model = instance.card.name
        self.clock = Clock()
        self.counted_since_s = self.clock.now + settle_s
        self.limiter = ConcurrencyLimiter(4096, max_queued=4096, clock=self.clock)
        self.windows = StartWindows(self.view, lambda: self.limiter.grant())
        self.at_worker: list[Request] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.waits_s: dict[str, list[float]] = {}
        self.tokens: Counter[str] = Counter()

    async def run(
        self,
        arrivals: Mapping[str, Sequence[float]],
        until_s: float,
        weights: Mapping[str, float] | None = None,
        prompt_tokens: Mapping[str, int] | None = None,
    ) -> None:
        """Run until a time. `arrivals`: times of the requests by client."""
        events = [(at_s, client) for client, times in arrivals.items() for at_s in times]
        heapq.heapify(events)
        begin_s = self.clock.now
        step_ends_s = None
        while True:
            next_s = events[0][0] if events else until_s
            if step_ends_s is not None and step_ends_s <= next_s:
                self.clock.now = begin_s + step_ends_s
                self._end_step()
                await wait_until_loaded()
                step_ends_s = self._begin_step(step_ends_s)
                continue
            if next_s >= until_s:
                break
            at_s, client = heapq.heappop(events)
            self.clock.now = begin_s + at_s
            weight = (weights or {}).get(client, 1.0)
            self._send(Client(client, weight), (prompt_tokens or {}).get(client, PROMPT_TOKENS))
            await wait_until_loaded()
            if step_ends_s is None:
                step_ends_s = self._begin_step(at_s)
        await left(*self.tasks)

    def _send(self, client: Client, tokens: int) -> None:
        places = self.windows.window(self.model).places_for(1, tokens)
        request = Request(client.name, tokens, self.clock.now, places)

        async def run() -> None:
            request.counted = await acquire(
                self.limiter, 1, client, NO_LIMIT_S, places, prompt_tokens=tokens
            )
            request.place = places.take()
            worker = self.view.instance(PREFILL)
            assert worker is not None
            request.place.called(worker, Phase.PREFILL)
            request.call = msgspec.structs.replace(CALL, client_share=request.place.share)
            self.at_worker.append(request)

        self.tasks.append(asyncio.create_task(run()))

    def _begin_step(self, now_s: float) -> float | None:
        """Begin a step with the first prompts. Return its end; None: there are no prompts."""
        if not self.at_worker:
            return None
        self.at_worker.sort(key=lambda request: queue_order(request.call))
        tokens = 0
        for request in self.at_worker:
            most = step_limit(self.most, request.call)
            taken = max(0, min(most - tokens, request.tokens_left))
            request.tokens_left -= taken
            tokens += taken
        return now_s + self.fixed_s + STEP_S * tokens / self.most

    def _end_step(self) -> None:
        computed = [request for request in self.at_worker if not request.tokens_left]
        for request in computed:
            assert request.place is not None
            assert request.counted is not None
            self.at_worker.remove(request)
            if request.sent_s >= self.counted_since_s:
                wait_s = self.clock.now - request.sent_s
                self.waits_s.setdefault(request.client, []).append(wait_s)
            self.tokens[request.client] += request.tokens
            request.place.leave()
            request.counted.end()
            self.limiter.release(1, request.client)


def bursts(size: int, every_s: float, begin_s: float = 0.0) -> list[float]:
    num_requests = size * int((10.0 - begin_s) / every_s)
    return [begin_s + number // size * every_s for number in range(num_requests)]


@pytest.mark.parametrize(
    ("own", "num_steps"),
    [
        # A third of a step, which runs, and what b has in the one of the request.
        (bursts(1, 0.11, begin_s=2.0), 1.5),
        (bursts(8, 0.45, begin_s=2.0), 1.5),
        # As many as a client is lifted to be ahead of others. The last ones are not below its
        # share: one more step waits before them.
        (bursts(BURST_TOKENS // PROMPT_TOKENS, 2.5, begin_s=2.0), 2.5),
    ],
    ids=["single", "steps", "bursts"],
)
async def test_flood_delays_others_by_few_steps(own: list[float], num_steps: float) -> None:
    own = [0.0, *own]  # the client is active when the flood begins
    alone = Simulation()
    await alone.run({"a": own}, 11.0)
    together = Simulation()
    flood = [0.0] * 200 + bursts(1, 0.004)  # ten times its half
    await together.run({"a": own, "b": flood}, 11.0)
    assert len(together.waits_s["a"]) == len(alone.waits_s["a"]) == len(own)
    pairs = zip(sorted(alone.waits_s["a"]), sorted(together.waits_s["a"]), strict=True)
    assert max(with_b - without for without, with_b in pairs) < num_steps * STEP_S
    # The worker is never idle.
    assert together.tokens.total() >= 0.99 * 10.0 * STEP_TOKENS / STEP_S


def at_random(every_s: float, until_s: float) -> list[float]:
    """Return the times of requests that arrive independently of each other."""
    random_ = random.Random(1)
    times = [0.0]
    while times[-1] < until_s:
        times.append(times[-1] + random_.expovariate(1 / every_s))
    return times[:-1]


async def test_flood_delays_requests_at_random_by_a_third_of_a_step() -> None:
    # Each prompt takes a step. The client sends 0.7 of its half, and the other one more than all.
    until_s = 60.0
    own = at_random(STEP_S / 0.35, until_s)
    p99_s: list[float] = []
    for arrivals in ({"a": own}, {"a": own, "b": [0.0] * 1500}):
        # First, the client has got no less than its share.
        simulation = Simulation(most=512, fixed_s=0.001, settle_s=10.0)
        await simulation.run(arrivals, until_s, prompt_tokens={"a": 500, "b": 500})
        waits_s = sorted(simulation.waits_s["a"])
        p99_s.append(waits_s[int(0.99 * (len(waits_s) - 1))])
    assert p99_s[1] - p99_s[0] < STEP_S / 3
    assert simulation.tokens.total() >= 0.98 * 512 * until_s / (STEP_S + 0.001)


async def test_equal_keys_get_equal_tokens_whatever_they_send() -> None:
    simulation = Simulation()
    arrivals = {
        client: [0.0] * 60 + bursts(1, every_s)
        for client, every_s in (("a", 0.04), ("b", 0.02), ("c", 0.01), ("d", 0.08))
    }
    prompt_tokens = {"a": 500, "b": 1000, "c": 250, "d": 2000}
    await simulation.run(arrivals, 10.0, prompt_tokens=prompt_tokens)
    got = [simulation.tokens[client] for client in arrivals]
    assert max(got) <= 1.1 * min(got)


async def test_tokens_of_keys_are_in_proportion_to_weights() -> None:
    simulation = Simulation()
    arrivals = dict.fromkeys("ab", [0.0] * 800)
    await simulation.run(arrivals, 10.0, weights={"a": 3.0})
    assert simulation.tokens["a"] == pytest.approx(3 * simulation.tokens["b"], rel=0.05)
