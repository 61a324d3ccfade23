"""Elastic workers of one process: role changes under load, and KV pools that are almost too small."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.protocol.shares import Shares
from tests.integration.elastic_workers import OUTPUT_TOKENS, elastic
from tests.kit.tiny_models import save_tiny_gpt_oss
from tests.kit.waiting import SOON_S

SPLIT = Shares(1.0, 0.0), Shares(0.0, 1.0)
EVEN = Shares(1.0, 1.0), Shares(1.0, 1.0)


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
        answers = await asyncio.gather(*(workers.ask(seed % 4) for seed in range(20)))
        has_ended = True
        await changing
        assert [tokens for tokens, _ in answers] == expected * 5


async def test_worker_whose_share_is_0_gets_no_calls(folder: Path) -> None:
    async with elastic(folder, "mock") as workers, asyncio.timeout(SOON_S):
        for shares, order in ((SPLIT, workers.ids), (SPLIT[::-1], workers.ids[::-1])):
            await workers.share(shares)
            for seed in range(5):
                _, timeline = await workers.ask(seed)
                assert [timeline.prefill_instance, timeline.decode_instance] == order
