"""Simulate a frontend and its workers in virtual time.

The code is the real one, but without HTTP, text and network. As in a real deployment, a request
passes the queue of the frontend, the selection of workers, the request flow, the limits of the
workers, and the scheduler of the mock engine. The work of the frontend takes a fixed time. Only
workers of the mock engine can be simulated. `constants` has arguments with which the mock engine
takes the time of another engine.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final

import msgspec

from dynamo_trtllm.cluster.discovery.records import EndpointId
from dynamo_trtllm.cluster.request_plane.subjects import load_subject
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.engines.mock.engine import MockEngine
from dynamo_trtllm.frontend.process.routing_setup import create_router, routing_work
from dynamo_trtllm.frontend.requests.admission import start_windows_of
from dynamo_trtllm.frontend.requests.concurrency_limiter import ConcurrencyLimiter
from dynamo_trtllm.frontend.requests.fair_queue import Claim
from dynamo_trtllm.frontend.requests.token_counters import OUTPUT_COST, Client
from dynamo_trtllm.frontend.requests.usage_reports import model_usage
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.pair_breakers import PairBreakers
from dynamo_trtllm.frontend.routing.start_window import RequestPlaces
from dynamo_trtllm.kv_transfer.memory import MemoryRegion
from dynamo_trtllm.observability.metrics import FrontendMetrics, WorkerMetrics
from dynamo_trtllm.planner.observe import Observer
from dynamo_trtllm.planner.planner import PLAN_EVERY_S, Planner, changes_of
from dynamo_trtllm.planner.predict import TimeLimits
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.frontend_usage import FrontendUsage
from dynamo_trtllm.protocol.kv_events import KvEventPublisher, kv_events_subject
from dynamo_trtllm.protocol.messages import (
    Chunk,
    GenerateRequest,
    LoadReport,
    Sampling,
    SamplingDefaults,
    decode,
)
from dynamo_trtllm.protocol.shares import Shares
from dynamo_trtllm.protocol.streams import StreamEvent
from dynamo_trtllm.simulate.direct_plane import DirectPlane
from dynamo_trtllm.simulate.memory_transfers import MemoryBackend
from dynamo_trtllm.simulate.outcomes import Outcome, SimulatedRequest
from dynamo_trtllm.simulate.virtual_time import run_virtual, virtual_clocks
from dynamo_trtllm.simulate.workload import (
    Arrival,
    Shape,
    check_context,
    check_duration,
    varied_arrivals,
)
from dynamo_trtllm.support.background import BackgroundTasks
from dynamo_trtllm.worker.cost_fit import CostFit
from dynamo_trtllm.worker.description import admission_of, describe
from dynamo_trtllm.worker.load_reports import broadcast_load
from dynamo_trtllm.worker.service import WorkerService
from dynamo_trtllm.worker.timing import TIMING

# So many tokens come in one event. With one token per event, the events would take most of the time
# of a simulation.
_TOKENS_PER_EVENT: Final = 32
_CLIENT: Final = Client("simulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDeployment:
    """A deployment to be simulated."""

    frontend: FrontendConfig
    workers: Sequence[WorkerConfig]  # workers of the mock engine
    num_gpus: int  # number of GPUs of all workers; a worker without GPUs counts as one
    # The time that a request takes outside the engines: for HTTP, tokenization and messages.
    frontend_s: float = 0.0
    # The limits of a planner. None: there is no planner, so the shares of elastic workers stay.
    planner: TimeLimits | None = None


def simulate(
    deployment: SimulatedDeployment, arrivals: Sequence[Arrival], seed: int = 1
) -> Outcome:
    """Run requests on a deployment in virtual time. Equal arguments give equal outcomes.

    Args:
        deployment: the deployment.
        arrivals: the requests, in order.
        seed: the seed of all random choices of the frontend, and of the noise of steps.

    Raises:
        ConfigError: a request does not fit into the context, or the last one comes too late.
    """
    return run_virtual(_simulate(deployment, arrivals, seed))


def simulate_closed_loop(
    deployment: SimulatedDeployment,
    shape: Shape,
    concurrency: int,
    num_requests: int,
    seed: int = 1,
    least_part: float = 1.0,
) -> Outcome:
    """Run requests of one shape, of which `concurrency` run at any time.

    The other arguments and the errors are those of `simulate` and `varied_arrivals`.
    """
    arrivals = varied_arrivals(shape, least_part, num_requests, seed)
    return run_virtual(_simulate(deployment, arrivals, seed, concurrency))


async def _simulate(
    deployment: SimulatedDeployment,
    arrivals: Sequence[Arrival],
    seed: int,
    concurrency: int | None = None,
) -> Outcome:
    check_duration(arrivals)
    async with AsyncExitStack() as stack:
        cluster = SimulatedCluster(deployment, seed)
        stack.push_async_callback(cluster.aclose)
        await cluster.start()
        check_context(arrivals, cluster.context_tokens)
        if concurrency is None:
            requests = await cluster.run(arrivals)
        else:
            requests = await cluster.run_closed_loop(arrivals, concurrency)
        return Outcome(
            requests,
            deployment.num_gpus,
            cluster.num_share_changes,
            is_closed_loop=concurrency is not None,
        )


class SimulatedCluster:
    """The processes of a deployment, in the running `VirtualTimeLoop`.

    Args:
        deployment: the deployment.
        seed: see `simulate`.
    """

    def __init__(self, deployment: SimulatedDeployment, seed: int) -> None:
        # All pairs of workers work, so no pair has to be probed before it gets requests.
        config = deployment.frontend.model_copy(update={"probe_interval_s": 0.0})
        self._deployment = deployment
        self._seed = seed
        self._clocks = virtual_clocks()
        self._plane = DirectPlane(self._clocks)
        self._view = ClusterView()
        self._metrics = FrontendMetrics()
        self._router = create_router(
            config, self._view, self._plane, PairBreakers(), self._metrics, self._clocks, seed
        )
        self._limiter = ConcurrencyLimiter(
            config.max_inflight, config.max_queued, self._clocks.monotonic
        )
        self._windows = start_windows_of(
            config, self._view, self._limiter.grant, self._clocks.monotonic
        )
        self._tasks = BackgroundTasks()
        self._stack = AsyncExitStack()
        self._model = deployment.workers[0].model_name
        # The KV transfers of all workers, see `MemoryBackend`.
        self._published: dict[str, tuple[MemoryBackend, Sequence[MemoryRegion]]] = {}
        self._numbers = itertools.count(1)  # numbers of requests
        self.context_tokens = 0  # longest context of a request; set by `start`
        self.num_share_changes = 0

    async def start(self) -> None:
        """Start all workers, and the background work of the frontend."""
        namespace = self._deployment.frontend.namespace
        for name, work in routing_work(namespace, self._router, self._metrics).items():
            self._in_background(work, name)
        for number, config in enumerate(self._deployment.workers, start=1):
            await self._start_worker(number, config)
        if self._deployment.planner is not None:
            self._in_background(self._plan(self._deployment.planner), "planner")
        # Let the background work run once, so that it knows all workers.
        await asyncio.sleep(0.0)
        contexts = [instance.card.context_length for instance in self._view.instances()]
        self.context_tokens = min(contexts)

    async def run(self, arrivals: Sequence[Arrival]) -> list[SimulatedRequest]:
        """Send all requests, and return them when they have ended."""
        now = self._clocks.monotonic
        # The times of the arrivals count from this time. It is chosen so that the first request
        # comes now.
        zero_s = now() - arrivals[0].at_s
        requests: list[SimulatedRequest] = []
        async with asyncio.TaskGroup() as group:
            for arrival in arrivals:
                left_s = zero_s + arrival.at_s - now()
                if left_s > 0:
                    await asyncio.sleep(left_s)
                request = self._new_request(arrival)
                requests.append(request)
                group.create_task(self._serve(arrival, request))
        return requests

    async def run_closed_loop(
        self, arrivals: Sequence[Arrival], concurrency: int
    ) -> list[SimulatedRequest]:
        """Send the next request when one has ended, and return all when they have ended."""
        left = iter(arrivals)
        requests: list[SimulatedRequest] = []

        async def send() -> None:
            for arrival in left:
                request = self._new_request(arrival)
                requests.append(request)
                await self._serve(arrival, request)

        async with asyncio.TaskGroup() as group:
            # With fewer requests than `concurrency`, one task for each request is enough.
            for _ in range(min(concurrency, len(arrivals))):
                group.create_task(send())
        return requests

    def _new_request(self, arrival: Arrival) -> SimulatedRequest:
        """Return a request that arrives now."""
        return SimulatedRequest(
            self._clocks.monotonic(), arrival.input_tokens, wanted_tokens=arrival.output_tokens
        )

    async def aclose(self) -> None:
        """Stop all workers and the background work."""
        await self._router.aclose()
        await self._stack.aclose()

    async def _start_worker(self, number: int, config: WorkerConfig) -> None:
        """Start a worker, and register it with the frontend."""
        engine = MockEngine(
            config,
            instance_id=number,
            backend=MemoryBackend(self._published),
            clocks=self._clocks,
            seed=self._seed * 1000 + number,
            tokens_per_event=_TOKENS_PER_EVENT,
        )
        info = await engine.start()
        self._stack.push_async_callback(engine.aclose)
        namespace = self._deployment.frontend.namespace
        endpoint = EndpointId(namespace, config.disaggregation_mode.value, "generate")
        instance, files = describe(config, endpoint, number, info, SamplingDefaults())
        publisher = None
        if instance.publishes_kv_events:
            publish = partial(self._plane.try_publish, kv_events_subject(namespace))
            publisher = KvEventPublisher(number, publish)
            self._stack.callback(publisher.close)
            engine.start_kv_events(publisher.on_events)
        service = WorkerService(
            engine,
            instance,
            admission_of(config, instance, TIMING),
            files=files,
            metrics=WorkerMetrics(),
            kv_events=publisher,
            cost_prior=info.cost_prior,
            clocks=self._clocks,
        )
        self._plane.client.add(service)
        if self._router.placement is not None or self._deployment.planner is not None:
            # A real worker learns its cost model. Here, the arguments of the mock engine give it.
            cost = CostFit(info.cost_prior).model

            def load() -> LoadReport:
                return msgspec.structs.replace(service.load_report(), cost=cost)

            broadcast = partial(self._plane.try_publish, load_subject(namespace))
            loads = broadcast_load(load, service.called, broadcast)
            self._in_background(loads, f"load-reports-{number}")
        self._view.add(instance)

    async def _plan(self, limits: TimeLimits) -> None:
        """Set the shares of elastic workers as a planner does, until cancelled."""
        now = self._clocks.monotonic
        observer = Observer(self._view, now())
        planner = Planner(observer, limits)

        def take(data: bytes, _subject: str) -> None:
            observer.on_report(decode(data, LoadReport), now())

        shares: dict[int, Shares] = {}
        namespace = self._deployment.frontend.namespace
        unsubscribe = await self._plane.subscribe(load_subject(namespace), take)
        try:
            while True:
                await asyncio.sleep(PLAN_EVERY_S)
                decisions = planner.decisions(now())
                changes = changes_of(decisions)
                if changes:
                    self.num_share_changes += 1
                    shares |= changes
                    self._view.set_shares(dict(shares))
                # A real planner decides by reports of frontends that are up to a second old. So the
                # present usage is reported after the decision, and counts at the next one.
                usage = model_usage(self._windows.window(self._model), self._limiter)
                observer.on_usage(
                    FrontendUsage(process=1, frontend=1, models={self._model: usage}, keys={}),
                    now(),
                )
        finally:
            await unsubscribe()

    def _in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._tasks.start(work, name)
        self._stack.push_async_callback(self._tasks.cancel, task)

    async def _serve(self, arrival: Arrival, request: SimulatedRequest) -> None:
        """Serve a request as the frontend does: wait for a place, and run it."""
        if self._deployment.frontend_s:
            await asyncio.sleep(self._deployment.frontend_s)
        within_s = self._deployment.frontend.request_timeout_s
        places = self._windows.window(self._model).places_for(1, arrival.input_tokens)
        claim = Claim(
            client=_CLIENT,
            num_choices=1,
            prompt_tokens=arrival.input_tokens,
            places=places,
            late_at_s=places.late_at_s,
        )

        def more_tokens() -> int:
            # The claim includes the whole prompt, so cached tokens are subtracted.
            return OUTPUT_COST * request.output_tokens - request.cached_tokens

        try:
            counted = await self._limiter.acquire(claim, within_s, more_tokens)
        except DynamoError as exc:
            request.error = exc.code
            return
        request.begun_s = self._clocks.monotonic()
        try:
            await self._generate(arrival, request, places, within_s)
        finally:
            counted.end()
            places.close()
            self._limiter.release(1, _CLIENT.name)

    async def _generate(
        self,
        arrival: Arrival,
        request: SimulatedRequest,
        places: RequestPlaces,
        within_s: float,
    ) -> None:
        """Run the only choice of a request."""
        call = GenerateRequest(
            request_id=f"simulated-{next(self._numbers)}",
            model=self._model,
            token_ids=arrival.prompt(),
            sampling=Sampling(max_tokens=arrival.output_tokens, temperature=1.0),
            deadline=self._clocks.epoch() + within_s,
        )
        timeline = ChoiceTimeline(clock=self._clocks.monotonic)
        timeline.place = places.take()
        timeline.arrived_s = request.arrived_s
        ended = asyncio.get_running_loop().create_future()
        self._router.generate(call, timeline, _recorder(request, self._clocks.monotonic, ended))
        await ended
        within_call_s = self._plane.client.worst_gaps_s.pop(call.request_id, 0.0)
        request.worst_gap_s = max(request.worst_gap_s, within_call_s)
        if timeline.chosen is not None:
            request.path = timeline.chosen.path
        for span, next_span in pairwise(timeline.spans):
            if span.phase == "prefill":
                # The prompt is computed when the next span begins.
                request.computed_s = next_span.begin_s
        for stats in (timeline.decode_stats, timeline.prefill_stats):
            if stats is not None:
                request.cached_tokens = max(request.cached_tokens, stats.cached_tokens)


def _recorder(
    request: SimulatedRequest, now: Callable[[], float], ended: asyncio.Future[None]
) -> Callable[[StreamEvent], None]:
    """Return the function that gets the events of a request."""

    def on_event(event: StreamEvent) -> None:
        now_s = now()
        if not isinstance(event, Chunk):
            request.error = event.code
            ended.set_result(None)
            return
        num_tokens = len(event.token_ids)
        if num_tokens:
            if not request.output_tokens:
                request.first_s = now_s
            elif request.output_tokens == 1:
                # An early first token comes from the prefill call. So the plane, which measures the
                # gaps within a call, does not measure this one.
                request.worst_gap_s = now_s - request.first_s
            request.last_s = now_s
            request.output_tokens += num_tokens
        if event.finish_reason is not None:
            request.end_s = now_s
            ended.set_result(None)

    return on_event
