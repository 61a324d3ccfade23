"""What two frontends know of the prefix caches of mock workers, over real NATS, and where they send
prompts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from dynamo_trtllm.cluster.request_plane.client import PlaneLimits
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.cost_placement import Placement
from dynamo_trtllm.frontend.routing.prefix_feed import PrefixFeed
from dynamo_trtllm.frontend.routing.prefix_index import ClusterPrefixes, PromptHashes
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.protocol.kv_events import KvCacheUpdate
from dynamo_trtllm.protocol.messages import Role
from tests.kit.generator_streams import routed_stream
from tests.kit.waiting import SOON_S
from tests.kit.workers import (
    FrontendSide,
    RunningWorkers,
    config,
    frontend_side,
    request,
    start_pairs,
    until,
)

BLOCK = 32  # tokens, of the mock engine


class LossyPrefixes(ClusterPrefixes):
    """A prefix index that loses the next update with blocks if `loses` is set."""

    loses = False

    def on_update(self, update: KvCacheUpdate) -> None:
        if self.loses and update.stored:
            self.loses = False
        else:
            super().on_update(update)


class Follower:
    """A frontend that follows the prefix caches."""

    def __init__(self, side: FrontendSide) -> None:
        self.side = side
        self.known = LossyPrefixes()
        self.metrics = FrontendMetrics()
        self._router = RequestRouter(side.view, side.plane, placement=Placement("kv", self.known))

    async def ask(self, prompt: int) -> tuple[int | None, int | None]:
        """Send a request and return its prefill and its decode worker."""
        trace = ChoiceTimeline()
        async for _ in routed_stream(self._router, request(max_tokens=3, prompt=prompt), trace):
            pass
        return trace.prefill_instance, trace.decode_instance

    def overlaps(self, prompt: int) -> dict[Role, list[int]]:
        """Return the overlaps of the workers by role, without those that have none."""
        found = self.known.overlaps(
            PromptHashes(request(max_tokens=3, prompt=prompt)), time.monotonic()
        )
        return {role: found.of(ids) for role in Role if (ids := found.deepest(role, 9))}

    async def until_overlaps(self, prompt: int, tokens: int) -> None:
        expected = {Role.PREFILL: [tokens], Role.DECODE: [tokens]}
        await until(
            lambda: self.overlaps(prompt) == expected, SOON_S, lambda: self.overlaps(prompt)
        )


@asynccontextmanager
async def follower(chosen: WorkerConfig) -> AsyncIterator[Follower]:
    # a retry would bring the prompt to others
    patient = PlaneLimits(ack_timeout_s=SOON_S, ping_interval_s=SOON_S)
    async with frontend_side(chosen, limits=patient) as side:
        made = Follower(side)
        await side.until_instances(4)
        task = asyncio.create_task(
            PrefixFeed(made.known, side.view, side.plane, chosen.namespace, made.metrics).run()
        )
        try:
            yield made
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_kv_routing_recovers_after_missed_updates(
    etcd_server: str, nats_server: str, running_workers: RunningWorkers
) -> None:
    caching = {"enable_prefix_caching": True, "kv_block_size": BLOCK}
    chosen = config(
        etcd_server,
        nats_server,
        publish_kv_events=True,
        stall_timeout_s=SOON_S,
        override_engine_args=caching,
    )
    start_pairs(chosen, running_workers, 2)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(follower(chosen))
        workers = await first.ask(100)
        await first.until_overlaps(400, 96)
        late = await stack.enter_async_context(follower(chosen))
        await late.until_overlaps(400, 96)
        first.known.loses = True
        assert await late.ask(200) == workers
        await late.until_overlaps(400, 192)
        await first.until_overlaps(400, 192)
        assert not first.known.loses
        assert b'kv_updates_total{outcome="gap"} 1.0' in first.metrics.render()
        assert first.known.num_blocks() == late.known.num_blocks()
        assert {await reader.ask(prompt) for reader in (first, late) for prompt in (210, 220)} == {
            workers
        }
