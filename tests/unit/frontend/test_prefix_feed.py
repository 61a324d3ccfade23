"""The feed of KV events into the router's knowledge of prefix caches, in one process with real
publishers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from dynamo_trtllm.cluster.request_plane.inproc import InprocPlane
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.prefix_feed import PrefixFeed
from dynamo_trtllm.frontend.routing.prefix_index import ClusterPrefixes, PromptHashes
from dynamo_trtllm.observability.metrics import FrontendMetrics, WorkerMetrics
from dynamo_trtllm.protocol.kv_events import (
    BlocksStored,
    KvBlock,
    KvCacheUpdate,
    KvEventLimits,
    KvEventPublisher,
    kv_events_subject,
)
from dynamo_trtllm.protocol.messages import GenerateRequest, Sampling, decode, token_ids
from dynamo_trtllm.worker.service import WorkerService
from dynamo_trtllm.worker.worker_admission import WorkerAdmission
from tests.kit.instances import make_instance
from tests.kit.model_registry import NoEngine, until

TOKENS = token_ids(range(32))
FIRST = BlocksStored(blocks=(KvBlock(1, TOKENS[:16]),))
SECOND = BlocksStored(blocks=(KvBlock(2, TOKENS[16:]),), parent=1)


QUICK = KvEventLimits(interval_s=0.005, resync_interval_s=0.005, idle_s=0.005)


class Publisher(KvEventPublisher):
    """A publisher that ignores requests for snapshots while `is_deaf`."""

    is_deaf = False

    def resync(self) -> None:
        if not self.is_deaf:
            super().resync()


class Frontend:
    """A feed, and workers without engines that publish events on its plane."""

    def __init__(self, plane: RequestPlane, pause_s: float) -> None:
        self.plane = plane
        self.view = ClusterView()
        self.known = ClusterPrefixes()
        self.feed = PrefixFeed(
            self.known, self.view, self.plane, "dynamo", FrontendMetrics(), pause_s=pause_s
        )
        self.num_lost = 0  # of the next messages with blocks

    async def worker(self, instance_id: int) -> Publisher:
        instance = msgspec.structs.replace(make_instance(instance_id), publishes_kv_events=True)
        publisher = Publisher(instance_id, self._publish, QUICK)
        metrics = WorkerMetrics()
        service = WorkerService(
            NoEngine(), instance, WorkerAdmission(), files={}, metrics=metrics, kv_events=publisher
        )
        await self.plane.serve(instance.subject, service)
        self.view.add(instance)
        return publisher

    def _publish(self, data: bytes) -> bool:
        # An idle worker sends messages without blocks, at any time.
        if self.num_lost and decode(data, KvCacheUpdate).stored:
            self.num_lost -= 1
            return True
        return self.plane.try_publish(kv_events_subject("dynamo"), data)

    def overlap(self, instance_id: int) -> int:
        request = GenerateRequest(
            request_id="r",
            model="tiny",
            token_ids=TOKENS + TOKENS,
            sampling=Sampling(max_tokens=1),
            deadline=0.0,
        )
        return self.known.overlaps(PromptHashes(request), 0.0).of([instance_id])[0]


@asynccontextmanager
async def running(pause_s: float = 0.05) -> AsyncIterator[Frontend]:
    plane = InprocPlane()
    frontend = Frontend(plane, pause_s)
    task = asyncio.create_task(frontend.feed.run())
    yield frontend
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await plane.aclose()


async def test_feed_requests_earlier_blocks_and_follows_changes() -> None:
    async with running() as frontend:
        publisher = await frontend.worker(1)
        frontend.num_lost = 1
        publisher.on_events([FIRST])
        await until(lambda: frontend.overlap(1) == 16)
        publisher.on_events([SECOND])
        await until(lambda: frontend.overlap(1) == 32)
        frontend.view.remove(1)
        await until(lambda: frontend.overlap(1) == 0)
        publisher.close()


async def test_feed_finds_a_lost_message_by_the_next_number() -> None:
    async with running() as frontend:
        publisher = await frontend.worker(1)
        await until(lambda: not frontend.known.unsynced)
        frontend.num_lost = 1
        publisher.on_events([FIRST, SECOND])
        await until(lambda: frontend.overlap(1) == 32)
        publisher.close()


async def test_feed_when_a_message_is_malformed_then_it_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as frontend:
        publisher = await frontend.worker(1)
        publisher.on_events([FIRST])
        await until(lambda: frontend.overlap(1) == 16)
        frontend.plane.try_publish(kv_events_subject("dynamo"), b"?")
        publisher.on_events([SECOND])
        await until(lambda: frontend.overlap(1) == 32)
        publisher.close()
    assert "unreadable KV events dropped (1 so far)" in caplog.text


async def test_feed_of_silent_worker_forgets_and_asks_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(pause_s=0.01) as frontend:
        publisher = await frontend.worker(1)
        await until(lambda: not frontend.known.unsynced)
        publisher.on_events([FIRST])
        await until(lambda: frontend.overlap(1) == 16)
        publisher.is_deaf = True
        frontend.num_lost = 1
        publisher.on_events([SECOND])  # lost: the number of the next message shows it
        await until(lambda: frontend.overlap(1) == 0)
        publisher.is_deaf = False
        await until(lambda: frontend.overlap(1) == 32)
        publisher.close()
    assert (
        "worker 1 did not send its prefix cache, asked 3 times: it accepts requests but publishes"
        " nothing" in caplog.text
    )
