"""Runs workers and the router of a frontend in one process, with real etcd and NATS."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from dynamo_trtllm.cluster.discovery.etcd import EtcdDiscovery
from dynamo_trtllm.cluster.request_plane.client import DEFAULT_LIMITS, PlaneLimits
from dynamo_trtllm.cluster.request_plane.nats import NatsPlane
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.engines.mock.engine import MockEngine
from dynamo_trtllm.frontend.process.frontend import Frontend
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.generation_events import RouterOptions
from dynamo_trtllm.frontend.routing.model_registry import ModelRegistry
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.protocol.messages import Chunk, GenerateRequest, Phase, Role, Sampling, token_ids
from dynamo_trtllm.support.network.listening import listen
from dynamo_trtllm.worker import Worker
from dynamo_trtllm.worker.timing import TIMING, WorkerTiming
from tests.kit.generator_streams import routed_stream
from tests.kit.waiting import SOON_S


def config(etcd: str, nats: str, **fields: Any) -> WorkerConfig:
    values = {
        "model_path": "tiny",
        "engine": "mock",
        "namespace": f"t{uuid.uuid4().hex}",
        "drain_timeout_s": 2.0,
        "stall_timeout_s": 2.0,
    }
    return WorkerConfig(etcd_endpoints=etcd, nats_server=nats, **{**values, **fields})


def request(
    *, max_tokens: int, phase: Phase = Phase.AGGREGATED, prompt: int = 100, seconds: float = 30
) -> GenerateRequest:
    return GenerateRequest(
        request_id=uuid.uuid4().hex,
        model="tiny",
        token_ids=token_ids(range(10, 10 + prompt)),
        sampling=Sampling(max_tokens=max_tokens),
        deadline=time.time() + seconds,
        phase=phase,
    )


class FrontendSide:
    """The frontend's view of the cluster, its model registry and its router."""

    def __init__(
        self,
        chosen: WorkerConfig,
        plane: NatsPlane,
        discovery: EtcdDiscovery,
        options: RouterOptions,
    ) -> None:
        self.view = ClusterView()
        self.models = ModelRegistry(self.view, discovery, plane, chosen.namespace)
        self.router = RequestRouter(self.view, plane, options)
        self.plane = plane

    async def until_instances(self, count: int) -> None:
        async with asyncio.timeout(SOON_S):
            while len(self.view.instances()) != count:  # noqa: ASYNC110  # the view has no event
                await asyncio.sleep(0.01)

    async def ask(self, max_tokens: int) -> list[Chunk]:
        async with aclosing(
            routed_stream(self.router, request(max_tokens=max_tokens), ChoiceTimeline())
        ) as chunks:
            return [chunk async for chunk in chunks]


@asynccontextmanager
async def frontend_side(
    chosen: WorkerConfig, options: RouterOptions | None = None, limits: PlaneLimits = DEFAULT_LIMITS
) -> AsyncIterator[FrontendSide]:
    plane = await NatsPlane.connect(chosen.nats_server, limits)
    discovery = EtcdDiscovery(chosen, lease_ttl_s=chosen.lease_ttl_s)
    side = FrontendSide(chosen, plane, discovery, options or RouterOptions())
    watch = asyncio.create_task(side.models.watch())
    try:
        yield side
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await side.router.aclose()
        await side.models.aclose()
        await discovery.aclose()
        await plane.aclose()


class RunningWorkers:
    """Running workers with their engines and request planes, in the order of creation."""

    def __init__(self, engines: list[Engine], planes: list[NatsPlane]) -> None:
        self.workers: list[Worker] = []
        self.engines = engines
        self.planes = planes
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, chosen: WorkerConfig, timing: WorkerTiming = TIMING) -> Worker:
        worker = Worker(chosen, timing=timing)
        self.workers.append(worker)
        self.tasks.append(asyncio.create_task(worker.serve(), name=f"worker-{len(self.workers)}"))
        return worker

    def ids(self) -> list[int]:
        return sorted(worker.instance_id for worker in self.workers)

    def engine_of(self, role: Role) -> MockEngine:
        """Return the engine of the first worker with this role."""
        (worker, *_) = [
            worker for worker in self.workers if worker._config.disaggregation_mode is role
        ]
        engines = [engine for engine in self.engines if isinstance(engine, MockEngine)]
        (engine,) = [
            e for e in engines if e._transfers.identity.prefill_instance_id == worker.instance_id
        ]
        return engine

    def alive(self) -> bool:
        return not any(task.done() for task in self.tasks)

    def held(self) -> list[tuple[int, int, int, int]]:
        """Return for each engine what requests hold: running, waiting, KV blocks, pending KV
        transfers.
        """
        stats = [engine.stats() for engine in self.engines]
        return [(s.running, s.waiting, s.kv_blocks_used, s.pending_kv_transfers) for s in stats]

    async def wait_idle(self, within_s: float = SOON_S) -> None:
        await until(lambda: set(self.held()) == {(0, 0, 0, 0)}, within_s, self.held)


def start_pairs(chosen: WorkerConfig, running_workers: RunningWorkers, count: int = 1) -> None:
    for role in (Role.PREFILL, Role.DECODE) * count:
        running_workers.start(chosen.model_copy(update={"disaggregation_mode": role}))


async def until(
    condition: Callable[[], bool], within_s: float, state: Callable[[], object] = lambda: ""
) -> None:
    """Wait for a condition. Fail with the value of `state` after a timeout."""
    try:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110  # counters have no event
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"condition not met within {within_s:g} s: {state()}") from None


def start_frontend(etcd: str, nats: str, namespace: str) -> tuple[asyncio.Task[None], str]:
    """Start a frontend. Return its task and its URL."""
    chosen = FrontendConfig(
        etcd_endpoints=etcd, nats_server=nats, namespace=namespace, probe_interval_s=60.0
    )
    sock = listen("127.0.0.1", 0)
    frontend = Frontend(chosen, sock=sock)
    return asyncio.create_task(frontend.serve()), f"http://127.0.0.1:{sock.getsockname()[1]}"
