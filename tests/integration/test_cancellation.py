"""A request that ends early, at every phase, over real etcd and NATS: all that it took is freed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from dynamo_trtllm.cluster.request_plane.frames import Frame
from dynamo_trtllm.cluster.request_plane.server import PlaneServer
from dynamo_trtllm.engines.mock.engine import MockEngine
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.protocol.errors import DeadlineExceeded, DynamoError, KvTransferError
from dynamo_trtllm.protocol.messages import Chunk, GenerateRequest, Role
from dynamo_trtllm.testing.engine_requests import tokens
from tests.kit.generator_streams import routed_stream
from tests.kit.waiting import SOON_S
from tests.kit.workers import (
    FrontendSide,
    RunningWorkers,
    config,
    frontend_side,
    request,
    until,
)


class Scene:
    """A prefill and a decode worker, and one request that is in some phase."""

    def __init__(self, side: FrontendSide, running_workers: RunningWorkers) -> None:
        self.side = side
        self.running_workers = running_workers
        self.fetching = asyncio.Event()
        self.may_fetch = asyncio.Event()
        self.may_fetch.set()
        self._hang_fetches()

    @property
    def prefill(self) -> MockEngine:
        return self.running_workers.engine_of(Role.PREFILL)

    @property
    def decode(self) -> MockEngine:
        return self.running_workers.engine_of(Role.DECODE)

    def _hang_fetches(self) -> None:
        backend = self.decode._backend
        fetch = backend.read

        async def slow_fetch(*args: Any, **named: Any) -> None:
            self.fetching.set()
            await self.may_fetch.wait()
            await fetch(*args, **named)

        backend.read = slow_fetch  # type: ignore[method-assign]

    async def run(self, asked: GenerateRequest) -> list[Chunk]:
        async with aclosing(routed_stream(self.side.router, asked, ChoiceTimeline())) as chunks:
            return [chunk async for chunk in chunks]

    def left(self) -> dict[str, object]:
        """What requests may leave behind."""
        servings = [serving for plane in self.running_workers.planes for serving in plane._servers]
        clients = [
            plane._transport._client for plane in (*self.running_workers.planes, self.side.plane)
        ]
        return {
            "held": self.running_workers.held(),
            "streams of workers": [serving.num_running for serving in servings],
            "ended streams that hold KV": [held(serving) for serving in servings],
            "admitted": [serving.service.admission.active() for serving in servings],
            "watched": [sorted(serving._callers) for serving in servings]
            + [[*self.side.plane.client._running]],
            "streams": len(self.side.plane.client._inbox),
            "subscriptions": [len(client._subs) for client in clients],
            "tasks": sorted(
                task.get_name()
                for task in asyncio.all_tasks()
                if not task.get_name().startswith("Task-")
            ),
            "unnamed tasks": sum(
                task.get_name().startswith("Task-") for task in asyncio.all_tasks()
            ),
        }


@asynccontextmanager
async def scene(
    etcd: str, nats: str, running_workers: RunningWorkers, **prefill_args: Any
) -> AsyncIterator[Scene]:
    chosen = config(etcd, nats, kv_transfer_ttl_s=60.0)
    args = {Role.PREFILL: {"step_s": 0.005} | prefill_args, Role.DECODE: {"step_s": 0.02}}
    for role, own in args.items():
        running_workers.start(
            chosen.model_copy(update={"disaggregation_mode": role, "override_engine_args": own})
        )
    async with frontend_side(chosen) as side:
        await side.until_instances(2)
        await side.models.wait_until_loaded()
        yield Scene(side, running_workers)


async def queued(made: Scene) -> None:
    await until(lambda: made.prefill.stats().waiting == 1, SOON_S)


async def prefilling(made: Scene) -> None:
    await until(lambda: made.prefill.stats().running == 1, SOON_S)


async def transferring(made: Scene) -> None:
    await asyncio.wait_for(made.fetching.wait(), SOON_S)
    assert made.prefill.stats().pending_kv_transfers == 1


async def decoding(made: Scene) -> None:
    await until(
        lambda: made.decode.stats().running == 1 and made.prefill.stats().pending_kv_transfers == 0,
        SOON_S,
    )


@pytest.mark.parametrize("end", ["client gone", "deadline"])
@pytest.mark.parametrize("phase", [queued, prefilling, transferring, decoding])
async def test_request_that_ends_early_leaves_nothing(
    etcd_server: str,
    nats_server: str,
    running_workers: RunningWorkers,
    phase: Callable[[Scene], Any],
    end: str,
) -> None:
    slow = (
        {"step_s": 0.6, "prefill_tokens_per_step": 15, "max_batch_size": 1}
        if phase in (queued, prefilling)
        else {}
    )
    async with scene(etcd_server, nats_server, running_workers, **slow) as made:
        await made.run(request(max_tokens=2, prompt=4))  # what is made once is there
        await settled(made)
        before = made.left()
        made.fetching.clear()
        if phase is transferring:
            made.may_fetch.clear()
        first = asyncio.create_task(made.run(request(max_tokens=200))) if phase is queued else None
        if first is not None:
            await prefilling(made)
        seconds = 30 if end == "client gone" else 2.5  # less than it prefills
        running = asyncio.create_task(made.run(request(max_tokens=200, seconds=seconds)))
        await phase(made)
        if end == "client gone":
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        else:
            with pytest.raises((DeadlineExceeded, KvTransferError)):
                await asyncio.wait_for(running, SOON_S)
        if first is not None:
            await until(lambda: made.prefill.stats().waiting == 0, SOON_S)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        await until(lambda: made.left() == before, SOON_S, made.left)
        made.may_fetch.set()
        assert len(tokens(await made.run(request(max_tokens=5, prompt=4)))) == 5


async def test_request_cancelled_during_transfer_frees_kv_at_once(
    etcd_server: str, nats_server: str, running_workers: RunningWorkers
) -> None:
    async with scene(etcd_server, nats_server, running_workers) as made:
        await made.run(request(max_tokens=2, prompt=4))
        await settled(made)
        before = made.left()
        inbox = made.side.plane.client._inbox
        feed = inbox._feed
        seen = []

        def cancelling(frames: list[Frame]) -> None:
            if any(
                isinstance(frame.chunk, Chunk) and frame.chunk.kv_params is not None
                for frame in frames
            ):
                seen.append(made.prefill.stats().pending_kv_transfers)
                running.cancel()
            feed(frames)

        inbox._feed = cancelling  # type: ignore[method-assign]
        running = asyncio.create_task(made.run(request(max_tokens=200)))
        with pytest.raises(asyncio.CancelledError):
            await running
        assert seen == [1]
        await until(lambda: made.left() == before, SOON_S, made.left)


async def test_transfer_of_dead_frontend_frees_kv_soon(
    etcd_server: str, nats_server: str, running_workers: RunningWorkers
) -> None:
    """Long before it expires: the worker asks whether its holder is there."""
    async with scene(etcd_server, nats_server, running_workers) as made:
        made.may_fetch.clear()
        asking = asyncio.create_task(made.run(request(max_tokens=200)))
        await transferring(made)
        # as a process that is killed: nothing is said any more
        await made.side.plane._transport._client.close()
        await running_workers.wait_idle()
        with pytest.raises(DynamoError):
            await asyncio.wait_for(asking, 30)


def held(serving: PlaneServer) -> int:
    return sum(stream.has_ended for stream in serving._streams())


async def settled(made: Scene) -> None:
    await until(
        lambda: not any(any(held) for held in made.running_workers.held()),
        SOON_S,
        made.running_workers.held,
    )
    servings = [serving for plane in made.running_workers.planes for serving in plane._servers]
    await until(lambda: not any(map(held, servings)), SOON_S)  # looked at with each heartbeat
    await asyncio.sleep(0.1)
