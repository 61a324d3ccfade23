"""Elastic workers of one process: role changes under load, and KV pools that are almost too small."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

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
from dynamo_trtllm.protocol.shares import Shares
from dynamo_trtllm.support.background import BackgroundTasks
from tests.kit.generator_streams import routed_stream
from tests.kit.tiny_models import save_tiny_gpt_oss
from tests.kit.waiting import SOON_S

PROMPT_TOKENS = 100  # 4 blocks of 32
OUTPUT_TOKENS = 8
SPLIT = Shares(1.0, 0.0), Shares(0.0, 1.0)
EVEN = Shares(1.0, 1.0), Shares(1.0, 1.0)


class Elastic:
    """Elastic workers, and a router as a frontend has it, without limits of its own."""

    def __init__(self, router: RequestRouter, discovery: Discovery, workers: list[Worker]) -> None:
        self._router = router
        self._discovery = discovery
        self.ids = [worker.instance_id for worker in workers]
        self._numbers = itertools.count()

    async def share(self, shares: Sequence[Shares]) -> None:
        changes = dict(zip(self.ids, shares, strict=True))
        assert await change_shares(self._discovery, "dynamo", changes, present=self.ids)
        while self._router.view.model("tiny").shares != changes:
            await self._router.view.changed.wait()

    async def ask(self, seed: int) -> tuple[list[int], ChoiceTimeline]:
        """Return the tokens of a greedy request."""
        request = GenerateRequest(
            request_id=f"r{next(self._numbers)}",
            model="tiny",
            token_ids=token_ids(
                20 + (seed * 31 + index * 7) % 200 for index in range(PROMPT_TOKENS)
            ),
            sampling=Sampling(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True),
            deadline=time.time() + SOON_S,
        )
        timeline = ChoiceTimeline()
        async with aclosing(routed_stream(self._router, request, timeline)) as stream:
            return [token async for chunk in stream for token in chunk.token_ids], timeline


@asynccontextmanager
async def elastic(folder: Path, engine: str, **settings: Any) -> AsyncIterator[Elastic]:
    name = secrets.token_hex(4)
    config = WorkerConfig(
        model_path=str(folder),
        served_model_name="tiny",
        engine=engine,
        disaggregation_mode=Role.ELASTIC,
        nats_server=f"inproc://{name}",
        etcd_endpoints=f"memory://{name}",
        warm_up_budget_s=0,
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
        models = ModelRegistry(view, discovery, plane, "dynamo")
        stack.push_async_callback(models.aclose)
        watch = tasks.start(models.watch(), "watch")
        stack.push_async_callback(tasks.cancel, watch)
        router = RequestRouter(view, plane, RouterOptions())
        stack.push_async_callback(router.aclose)
        async with asyncio.timeout(SOON_S):
            while len(view.instances()) < 2:  # noqa: ASYNC110  # the view has no event for this
                await asyncio.sleep(0.01)
        yield Elastic(router, discovery, workers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gpt_oss(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("engine", ["mock", "torch"])
async def test_workers_with_tiny_pools_do_not_wait_for_each_other(
    folder: Path, engine: str
) -> None:
    """Without a limit, each worker holds KV for the other one, and has no blocks for its own decode
    calls: they wait until the KV expires.
    """
    args: dict[str, Any] = {"kv_cache_blocks": 12, "kv_block_size": 32, "max_batch_size": 8}
    if engine == "mock":
        # All prompts are there before the first one is computed.
        args["step_s"] = 0.02
    async with elastic(folder, engine, override_engine_args=args) as workers:
        async with asyncio.timeout(SOON_S):
            asking: list[asyncio.Task[tuple[list[int], ChoiceTimeline]]] = []
            for shares in (SPLIT, SPLIT[::-1]):
                await workers.share(shares)
                asking += [asyncio.create_task(workers.ask(seed)) for seed in range(8)]
                await asyncio.sleep(0)
            answers = await asyncio.gather(*asking)
        assert [len(tokens) for tokens, _ in answers] == [OUTPUT_TOKENS] * 16
        # Some requests went in both directions, and the others were whole requests.
        prefills = {timeline.prefill_instance for _, timeline in answers}
        assert prefills == {None, *workers.ids}


@pytest.mark.parametrize("engine", ["mock", "torch"])
async def test_answers_are_equal_while_shares_change(folder: Path, engine: str) -> None:
    async with elastic(folder, engine) as workers, asyncio.timeout(4 * SOON_S):
        expected = [(await workers.ask(seed))[0] for seed in range(4)]
        has_ended = False

        async def change() -> None:
            for shares in itertools.cycle((SPLIT, EVEN, SPLIT[::-1])):
                if has_ended:
                    return
                await workers.share(shares)
                await asyncio.sleep(0.005)

        changing = asyncio.create_task(change())
        answers = await asyncio.gather(*(workers.ask(seed % 4) for seed in range(40)))
        has_ended = True
        await changing
        assert [tokens for tokens, _ in answers] == expected * 10


async def test_worker_whose_share_is_0_gets_no_calls(folder: Path) -> None:
    async with elastic(folder, "mock") as workers, asyncio.timeout(SOON_S):
        for shares, order in ((SPLIT, workers.ids), (SPLIT[::-1], workers.ids[::-1])):
            await workers.share(shares)
            for seed in range(5):
                _, timeline = await workers.ask(seed)
                assert [timeline.prefill_instance, timeline.decode_instance] == order
