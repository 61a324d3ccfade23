"""Elastic workers of one process, and a router as a frontend has it."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from dynamo_trtllm import Role, Worker, WorkerConfig
from dynamo_trtllm.cluster.connect import connect_plane, open_discovery
from dynamo_trtllm.cluster.discovery.discovery_interface import Discovery
from dynamo_trtllm.cluster.discovery.share_changes import change_shares
from dynamo_trtllm.cluster.request_plane.client import PlaneLimits
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.generation_events import RouterOptions
from dynamo_trtllm.frontend.routing.model_registry import ModelRegistry
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.protocol.messages import GenerateRequest, Sampling, token_ids
from dynamo_trtllm.protocol.shares import ALL_WORK, ShareChange, Shares
from dynamo_trtllm.support.background import BackgroundTasks
from tests.kit.cluster import PLAIN
from tests.kit.generator_streams import routed_stream
from tests.kit.waiting import SOON_S

PROMPT_TOKENS = 100  # 4 blocks of 32
OUTPUT_TOKENS = 8


def prompt_of_seed(seed: int) -> array[int]:
    """Return the prompt of a request."""
    return token_ids(20 + (seed * 31 + index * 7) % 200 for index in range(PROMPT_TOKENS))


class Elastic:
    """Elastic workers, and a router as a frontend has it, without limits of its own."""

    def __init__(
        self,
        router: RequestRouter,
        discovery: Discovery,
        workers: list[Worker],
        config: WorkerConfig,
    ) -> None:
        self.config = config  # of both workers
        self._router = router
        self._discovery = discovery
        self._workers = workers
        self.ids = [worker.instance_id for worker in workers]
        self._numbers = itertools.count()

    async def share(self, shares: Sequence[Shares]) -> None:
        changes = dict(zip(self.ids, shares, strict=True))
        assert await change_shares(
            self._discovery,
            self.config.namespace,
            changes,
            registered=dict.fromkeys(self.ids, ALL_WORK),
        )
        while self.shares != changes:
            await self.changed()

    async def latest_change(self) -> ShareChange:
        """Return the latest change of shares, as etcd has it."""
        stored = await self._discovery.read_shares(self.config.namespace)
        assert stored.table is not None
        return stored.table.history[-1]

    async def health(self, instance_id: int) -> dict[str, Any]:
        """Return what /health of a worker says. It needs `system_port`."""
        (worker,) = [one for one in self._workers if one.instance_id == instance_id]
        async with httpx.AsyncClient(**PLAIN) as client:
            said: dict[str, Any] = (await client.get(f"{worker.url}/health")).json()
        return said

    @property
    def shares(self) -> Mapping[int, Shares]:
        """The shares that the router uses."""
        return self._router.view.model("tiny").shares

    async def changed(self) -> None:
        """Wait until a worker or the shares change."""
        await self._router.view.changed.wait()

    async def ask(self, seed: int) -> tuple[list[int], ChoiceTimeline]:
        """Return the tokens of a greedy request."""
        request = GenerateRequest(
            request_id=f"r{next(self._numbers)}",
            model="tiny",
            token_ids=prompt_of_seed(seed),
            sampling=Sampling(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True),
            deadline=time.time() + SOON_S,
        )
        timeline = ChoiceTimeline()
        async with aclosing(routed_stream(self._router, request, timeline)) as stream:
            return [token async for chunk in stream for token in chunk.token_ids], timeline


@asynccontextmanager
async def elastic(
    folder: Path,
    engine: str,
    *,
    nats_server: str | None = None,
    etcd_endpoints: str | None = None,
    **settings: Any,
) -> AsyncIterator[Elastic]:
    """Run two elastic workers. Without servers, they are connected within this process."""
    name = secrets.token_hex(4)
    config = WorkerConfig(
        model_path=str(folder),
        served_model_name="tiny",
        engine=engine,
        disaggregation_mode=Role.ELASTIC,
        nats_server=nats_server or f"inproc://{name}",
        etcd_endpoints=etcd_endpoints or f"memory://{name}",
        warm_up_budget_s=0,
        namespace=name,
        **settings,
    )
    tasks = BackgroundTasks()
    async with AsyncExitStack() as stack:
        workers = [Worker(config) for _ in range(2)]
        for worker in workers:
            await stack.enter_async_context(worker)
            await worker.ready()
        plane = await connect_plane(config, PlaneLimits(), tasks, lambda: None)
        stack.push_async_callback(plane.aclose)
        discovery = open_discovery(config, tasks)
        stack.push_async_callback(discovery.aclose)
        view = ClusterView()
        models = ModelRegistry(view, discovery, plane, name)
        stack.push_async_callback(models.aclose)
        watch = tasks.start(models.watch(), "watch")
        stack.push_async_callback(tasks.cancel, watch)
        router = RequestRouter(view, plane, RouterOptions())
        stack.push_async_callback(router.aclose)
        async with asyncio.timeout(SOON_S):
            while len(view.instances()) < 2:  # noqa: ASYNC110  # the view has no event for this
                await asyncio.sleep(0.01)
        yield Elastic(router, discovery, workers, config)
