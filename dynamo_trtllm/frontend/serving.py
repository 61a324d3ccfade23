"""Everything behind the door of a frontend: wires the rooms together and keeps them running, nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.discovery.etcd import EtcdDiscovery, tls_files
from dynamo_trtllm.errors import InternalError
from dynamo_trtllm.frontend import heap
from dynamo_trtllm.frontend.app import build_app
from dynamo_trtllm.frontend.base import Colleagues
from dynamo_trtllm.frontend.canary import Canaries, CanaryOptions
from dynamo_trtllm.frontend.door import Door
from dynamo_trtllm.frontend.models import Models
from dynamo_trtllm.frontend.pipeline import Pipeline, PipelineOptions
from dynamo_trtllm.frontend.recovery import RecoveryLimits
from dynamo_trtllm.frontend.responses.shelf import store_limits
from dynamo_trtllm.observe.metrics import FrontendMetrics
from dynamo_trtllm.plane.jetstream import JetStreamStore
from dynamo_trtllm.plane.linked import PlaneLimits
from dynamo_trtllm.plane.nats import NatsPlane
from dynamo_trtllm.plane.store import MemoryStore, Store
from dynamo_trtllm.router.pairs import PairBook
from dynamo_trtllm.router.view import ClusterView

_SETTLE_S = 15.0  # longest wait for the models that are there already, before the first request is taken


async def keep_serving(config: FrontendConfig, door: Door, colleagues: Colleagues) -> None:
    """Until cancelled. Opens the door when the models that are there are served. Raises Unreachable with no etcd or
    NATS, and what ended the watch on discovery, the connection to NATS or the canaries."""
    async with AsyncExitStack() as stack:
        # asked twice within the time-out: a worker that answers neither is dead
        plane = await NatsPlane.connect(config.nats_server, PlaneLimits(ping_interval_s=config.stall_timeout_s / 2))
        stack.push_async_callback(plane.aclose)
        discovery = EtcdDiscovery(config.etcd_endpoints, tls=tls_files(config))
        stack.push_async_callback(discovery.aclose)
        view, book, metrics = ClusterView(), PairBook(), FrontendMetrics()
        colleagues.share(metrics)
        tries_pairs = config.canary_interval_s > 0
        models = Models(view, discovery, plane, config.namespace, book if tries_pairs else None)
        stack.push_async_callback(models.aclose)
        pipeline = Pipeline(view, plane, _options(config), book)
        stack.push_async_callback(pipeline.aclose)
        work = [models.watch(), plane.until_ended(), forget_gone(view, book)]
        if tries_pairs:
            options = CanaryOptions(interval_s=config.canary_interval_s, timeout_s=config.canary_timeout_s)
            work.append(Canaries(view, pipeline, book, options).run(plane, metrics))
        store = await _store(config)
        stack.push_async_callback(store.aclose)
        app = build_app(config, models, pipeline, metrics, store)

        def begin() -> None:
            heap.settle()
            door.open(app)
            colleagues.served()

        await _all([asyncio.create_task(each) for each in work], asyncio.create_task(_settled(models)), begin)


async def forget_gone(view: ClusterView, book: PairBook) -> None:
    """Keeps in the book only pairs whose instances are there. Until cancelled."""
    while True:
        changed = view.changed
        book.keep_only({instance.id for instance in view.instances()})
        await changed.wait()


async def _settled(models: Models) -> None:
    try:
        async with asyncio.timeout(_SETTLE_S):
            await models.settled()
    except TimeoutError:
        return  # the door is opened all the same: others of the models may be served


async def _all(tasks: Sequence[asyncio.Task[None]], first: asyncio.Task[None], then: Callable[[], None]) -> None:
    """`then` once `first` is done; the end of any other task is the end of all."""
    try:
        await asyncio.wait({first, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            then()
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()  # raises what ended it
        raise InternalError("the watch on discovery or the canaries ended; restart the frontend")
    finally:
        for task in (first, *tasks):
            task.cancel()
        await asyncio.gather(first, *tasks, return_exceptions=True)


def _options(config: FrontendConfig) -> PipelineOptions:
    return PipelineOptions(
        limits=RecoveryLimits(retries=config.retry_limit, migrations=config.migration_limit),
        hold_s=config.hold_for_roles_s,
        decode_fallback=config.decode_fallback,
        has_canaries=config.canary_interval_s > 0,
    )


async def _store(config: FrontendConfig) -> Store:
    """Raises Unreachable when it is JetStream and there is none."""
    if config.shares_responses:
        return await JetStreamStore.connect(config.nats_server, config.namespace, store_limits(config))
    return MemoryStore(store_limits(config))
