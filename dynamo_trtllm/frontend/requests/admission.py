"""Admit requests: give them memory for bodies, permits for choices, and time of the event loop."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import NamedTuple, Self, TypeVar

from dynamo_trtllm.access.key_usage import Charge
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.requests.concurrency_limiter import ConcurrencyLimiter
from dynamo_trtllm.frontend.requests.fair_queue import Claim
from dynamo_trtllm.frontend.requests.preprocess import GenerationPlan
from dynamo_trtllm.frontend.requests.request_body import BodyBudget, RequestBody, read_body
from dynamo_trtllm.frontend.requests.timeline import RequestFacts, RequestTimeline
from dynamo_trtllm.frontend.requests.token_counters import OUTPUT_COST, Client, CountedRequest
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.start_window import GROUP, RequestPlaces
from dynamo_trtllm.frontend.routing.start_windows import StartWindows
from dynamo_trtllm.protocol.errors import DeadlineExceeded, InvalidRequest
from dynamo_trtllm.support.background import MAX_THREADS
from dynamo_trtllm.support.http_server.exchange import HttpRequest

T = TypeVar("T")

# CPU time of the turns of an iteration. With 10 ms, requests of 32 streams at once take about 10%
# more CPU time (burst-32 of benchmarks.plane).
WORK_S = 0.02
TURNS_PER_ITERATION = 64
# Starting 16 choices takes 3 to 5 ms, most of it in later iterations.
CHOICES_PER_ITERATION = 16
# With more choices, a request waits for a turn (see `IterationTime`) before it creates them.
FEW_CHOICES = 4


class AdmissionLimits:
    """The limits that all requests share: bytes of bodies, permits of choices, and threads.

    Args:
        config: has the limits.
        view: the workers, which limit how many choices may begin.
    """

    def __init__(self, config: FrontendConfig, view: ClusterView) -> None:
        self.config = config
        self.body_budget = BodyBudget(config.max_total_body_bytes)
        self.choice_permits = ConcurrencyLimiter(config.max_inflight, config.max_queued)
        self.start_windows = start_windows_of(config, view, self.choice_permits.grant)
        self.has_requests = asyncio.Event()  # set by each request
        self._large_bodies = asyncio.Semaphore(MAX_THREADS)

    async def acquire_slot(self) -> None:
        """Wait until a large body may be processed.

        Each takes a thread, and several times its size in memory.

        Raises:
            DeadlineExceeded: the bodies before this one took too long.
        """
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                await self._large_bodies.acquire()
        except TimeoutError:
            raise DeadlineExceeded(
                "the request's deadline passed while other large requests were parsed"
            ) from None

    def release_slot(self) -> None:
        """Let another large body be processed."""
        self._large_bodies.release()

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None, None]:
        """Hold the slot of a large body during a `with` block. Raises as `acquire_slot`."""
        await self.acquire_slot()
        try:
            yield
        finally:
            self.release_slot()


class RequestAdmission:
    """What one request holds of the limits. The end of its `with` block releases all of it."""

    def __init__(self, limits: AdmissionLimits, timeline: RequestTimeline) -> None:
        self._limits = limits
        self._timeline = timeline
        self._body_hold = limits.body_budget.body(timeline.facts.client)
        self._received: RequestBody | None = None
        self._has_slot = False
        self._num_permits = 0
        # The places of the choices in the start window.
        self._places: RequestPlaces | None = None
        self._client = _client(timeline.facts)
        # Counts the tokens of the request for the share of its client.
        self._counted: CountedRequest | None = None
        # What the API key uses, and the part of this request in it.
        tenant = timeline.facts.tenant
        self._key_usage = None if tenant is None else tenant.usage
        self._charge: Charge | None = None
        limits.has_requests.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release_body()
        if self._places is not None:
            self._places.close()
            self._places = None
        if self._counted is not None:
            self._counted.end()
            self._counted = None
        self._limits.choice_permits.release(self._num_permits, self._client.name)
        self._num_permits = 0
        if self._charge is not None:
            usage = self._timeline.usage
            self._charge.close(usage.prompt_tokens + usage.completion_tokens)
            self._charge = None

    def check_key(self) -> None:
        """Raise RateLimitExceeded if a limit of the API key is reached.

        Call it before the body is read.
        """
        if self._key_usage is not None:
            self._key_usage.check()

    def charge_key(self, plan: GenerationPlan) -> dict[str, str]:
        """Count the choices and tokens of a plan for the API key. Return the headers of its limits.

        Tokens of the prompt count now. Tokens of the output count now, too, if the request limits
        them, and otherwise at its end.

        Raises:
            ExceedsKeyLimit: this request alone is more than a limit of the API key allows.
            RateLimitExceeded: a limit of the API key is reached.
        """
        if self._key_usage is None:
            return {}
        self._charge = self._key_usage.charge(len(plan.choices), plan.max_tokens)
        return self._key_usage.headers()

    def check_queue(self) -> None:
        """Raise Overloaded if there is no place in the queue.

        Call it before the body is read.
        """
        self._limits.choice_permits.check(self._client.name)

    async def read_body(self, request: HttpRequest) -> RequestBody:
        """Read the body.

        Until `release_body`, the request holds the bytes of the body, and a slot if it is large.

        Raises:
            PayloadTooLarge, RequestTimeout, Overloaded, ClientDisconnected: as
                `request_body.read_body`.
            DeadlineExceeded: as `AdmissionLimits.acquire_slot`.
        """
        config = self._limits.config
        data = await read_body(
            request,
            config.max_body_bytes,
            config.receive_timeout_s,
            self._limits.body_budget,
            self._body_hold,
        )
        received = RequestBody(data, self._timeline)
        self._received = received
        self._timeline.body_received()
        if received.is_large:
            await self._limits.acquire_slot()
            self._has_slot = True
        return received

    def release_body(self) -> None:
        """Drop the body when it is not needed any more, and release what it holds. Idempotent."""
        if self._received is not None:
            self._received.data = b""
            self._received = None
        if self._has_slot:
            self._limits.release_slot()
            self._has_slot = False
        self._limits.body_budget.release(self._body_hold)

    def check_choices(self, count: int) -> None:
        """Raise InvalidRequest if a request may not have so many choices."""
        limit = self._limits.choice_permits.limit
        if count > limit:
            raise InvalidRequest(
                f"the request has {count} choices; this server runs at most {limit} at once,"
                " lower n"
            )

    async def acquire_places(self, plan: GenerationPlan) -> RequestPlaces:
        """Wait for the permits of all choices of a plan, and until workers can begin them.

        Return the places of the choices in the start window of the model.

        Raises:
            Overloaded, DeadlineExceeded: as `ConcurrencyLimiter.acquire`.
        """
        self._timeline.enter("frontend_queue")
        request = plan.choices[0].request
        num_choices = len(plan.choices)
        window = self._limits.start_windows.window(request.model)
        tenant = self._timeline.facts.tenant
        # Lower ranks come first, so `max` takes the later one: a request can go behind what its key
        # allows, but not before it. Without a key, 0 is allowed.
        key_priority = 0 if tenant is None else tenant.key.priority
        rank = max(request.priority, key_priority)
        ttft_s = None if request.slo is None else request.slo.ttft_s
        places = window.places_for(num_choices, plan.longest_prompt, rank, ttft_s)
        claim = Claim(
            client=self._client,
            num_choices=num_choices,
            prompt_tokens=sum(len(choice.request.token_ids) for choice in plan.choices),
            places=places,
            rank=rank,
            priority=request.priority,
            late_at_s=places.late_at_s,
        )
        within_s = plan.deadline - time.time()
        try:
            permits = self._limits.choice_permits
            self._counted = await permits.acquire(claim, within_s, self._more_tokens)
        finally:
            self._timeline.left_queue()
        self._timeline.enter("select")
        self._num_permits = num_choices
        self._places = places
        return places

    def _more_tokens(self) -> int:
        """Return the tokens to count beside those of the prompts, see `CountedRequest`.

        Tokens of the output have a weight. Cached tokens of the prompts are subtracted, because no
        worker computes them.
        """
        num_tokens = 0
        for choice in self._timeline.choices:
            num_tokens += OUTPUT_COST * choice.num_tokens
            num_tokens -= choice.cached_tokens
        return num_tokens


def _client(facts: RequestFacts) -> Client:
    """Return the sender of a request: its API key, or else its network."""
    if facts.tenant is None:
        return Client(facts.client)
    return Client(facts.tenant.key.name, facts.tenant.key.weight)


def start_windows_of(
    config: FrontendConfig,
    view: ClusterView,
    on_capacity: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> StartWindows:
    """Return the start windows of a frontend.

    With `best-effort`, late requests are put behind others. Otherwise no request is late here: the
    router rejects those that can't keep their limit.

    Args:
        config: of the frontend.
        view: see `StartWindow`.
        on_capacity: see `StartWindow`.
        clock: see `StartWindow`.
    """
    uses_slo = config.router_mode == "slo"
    ttft_s = math.inf
    if uses_slo and config.slo_policy == "best-effort" and config.slo_ttft_ms is not None:
        ttft_s = config.slo_ttft_ms / 1000
    return StartWindows(view, on_capacity, uses_all_paths=uses_slo, ttft_s=ttft_s, clock=clock)


class _WaitingTurn(NamedTuple):
    """A piece of work that waits for its turn."""

    size: int
    granted: asyncio.Future[None]


class IterationTime:
    """A limit on the time that an iteration of the event loop spends on one kind of work.

    Otherwise this work, such as the planning of bodies, would delay streams for longer.

    Each piece of work has a turn. In each iteration, turns begin in order of arrival until they
    have used WORK_S seconds of CPU time; the others wait for the next iterations. Two rules save
    CPU time:

    - Several turns may share an iteration. Requests that are planned together begin in the same
      engine step, and a worker sends the tokens of a step in one message. If each iteration planned
      only one body, each request would have messages of its own. With an engine that takes no time,
      that costs 40% more CPU time per request in frontends, and 100% more in workers.
    - The work of other tasks between turns does not count. Otherwise, bodies that arrive together
      would be planned in several iterations. With 32 streams, that costs 10% more CPU time per
      token.
    """

    def __init__(
        self, clock: Callable[[], float] = time.thread_time, max_size: int = TURNS_PER_ITERATION
    ) -> None:
        """Create the queue for one kind of work.

        Args:
            clock: returns seconds of CPU time.
            max_size: the largest sum of the sizes of the turns of an iteration.
        """
        self._clock = clock
        self._max_size = max_size
        # The CPU time and the sum of sizes of the turns that have begun in this iteration.
        self._used_s = 0.0
        self._used_size = 0
        self._waiting: deque[_WaitingTurn] = deque()
        # Turns that were granted, but could not begin: earlier ones had used the time.
        self._postponed: list[_WaitingTurn] = []
        self._num_granted = 0  # turns that were granted and have not begun
        self._is_scheduled = False  # the next iteration calls `_begin_iteration`

    @asynccontextmanager
    async def turn(self, size: int = 1) -> AsyncGenerator[None, None]:
        """Wait for a turn, in which the block runs. It must not wait for anything.

        Args:
            size: the number of choices that start or are cancelled; 1 for a body. The sum of an
                iteration is limited, too, because a turn causes work in later iterations.
        """
        has_others_before = bool(self._waiting or self._postponed or self._num_granted)
        if has_others_before or self._exceeds_limits(size):
            await self._wait(self._waiting, size)
            while self._exceeds_limits(size):
                await self._wait(self._postponed, size)
        self._schedule()
        self._used_size += size
        begun_s = self._clock()
        try:
            yield
        finally:
            self._used_s += self._clock() - begun_s

    def _exceeds_limits(self, size: int) -> bool:
        """Return whether one more turn of this size would exceed the limits of this iteration.

        The first turn of an iteration never does.
        """
        if not self._used_size:
            return False
        return self._used_size + size > self._max_size or self._used_s >= WORK_S

    async def _wait(self, queue: deque[_WaitingTurn] | list[_WaitingTurn], size: int) -> None:
        waiting = _WaitingTurn(size, asyncio.get_running_loop().create_future())
        queue.append(waiting)
        self._schedule()
        try:
            await waiting.granted
        finally:
            # A task may be cancelled before or after its turn was granted.
            was_granted = waiting.granted.done() and not waiting.granted.cancelled()
            if was_granted:
                self._num_granted -= 1

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_iteration)

    def _begin_iteration(self) -> None:
        """Begin an iteration: reset its sums, and grant turns to the first that wait."""
        self._is_scheduled = False
        # How many turns fit into WORK_S is not known before they run. A task whose turn does not
        # fit was woken in vain, and waits again. So grant at most twice the size that began in the
        # previous iteration, but at least one group.
        left = min(self._max_size, max(GROUP, 2 * self._used_size))
        self._used_s = 0.0
        self._used_size = 0
        self._waiting.extendleft(reversed(self._postponed))
        self._postponed.clear()
        is_first = True
        while self._waiting and (is_first or self._waiting[0].size <= left):
            waiting = self._waiting.popleft()
            is_cancelled = waiting.granted.done()
            if not is_cancelled:
                is_first = False
                left -= waiting.size
                self._num_granted += 1
                waiting.granted.set_result(None)
        # The granted turns run before the next call of this method, which begins another iteration.
        if self._num_granted:
            self._schedule()


class ChoiceTurns:
    """A limit on the choices that one iteration of the event loop starts, or cancels.

    Requests with several choices handle them in groups, and the groups of all requests take turns.
    Otherwise, all other streams would wait for hundreds of choices. The number is limited, too,
    because most of the work for a choice follows in later iterations. A request with one choice
    takes no turn, because reading its body takes longer than starting its choice.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._time = IterationTime(clock, max_size=CHOICES_PER_ITERATION)

    async def run(
        self,
        choices: Sequence[T],
        act: Callable[[T], None],
        wait_for_group: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Call `act` with all choices, in order.

        Args:
            choices: the choices of one request.
            act: called with each choice.
            wait_for_group: waits until the next GROUP choices, or those that are left, may start.
        """
        if len(choices) == 1:
            act(choices[0])
            return
        for first in range(0, len(choices), GROUP):
            group = choices[first : first + GROUP]
            if first > 0:
                # Other requests have their turn.
                await asyncio.sleep(0)
            if wait_for_group is not None:
                await wait_for_group()
            async with self._time.turn(len(group)):
                for choice in group:
                    act(choice)


class LoopTurns:
    """The turns of all requests, by kind of work."""

    def __init__(self) -> None:
        self.planning = IterationTime()  # plans bodies on the event loop
        self.ending = IterationTime()  # ends requests whose last choice has ended, or that failed
        self.starts = ChoiceTurns()  # starts new choices
        self.cancels = ChoiceTurns()  # cancels running choices

    def creation(self, num_choices: int) -> AbstractAsyncContextManager[None]:
        """Return the turn in which the choices of a request are created.

        Requests with few choices need not wait.
        """
        if num_choices <= FEW_CHOICES:
            return nullcontext()
        return self.planning.turn()
