"""A planner of elastic workers, with real etcd and NATS."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_trtllm.config.planner import PlannerConfig
from dynamo_trtllm.planner.process import PlannerProcess
from dynamo_trtllm.protocol.shares import ALL_WORK, Shares
from tests.integration.elastic_workers import OUTPUT_TOKENS, Elastic, elastic
from tests.kit.cluster import PLAIN
from tests.kit.servers import TestServer
from tests.kit.tiny_models import write_tiny_llama
from tests.kit.waiting import SOON_S

SPLIT = {Shares(1.0, 0.0), Shares(0.0, 1.0)}
# A prompt takes 100 ms, in which other requests of the worker would get no token. One worker is
# enough for the prompts of all senders.
ARGS = {"step_s": 0.02, "prefill_token_s": 0.0008, "max_batch_size": 8}
NUM_SENDERS = 3
PAUSE_S = 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def planner_of(workers: Elastic, **settings: Any) -> PlannerProcess:
    config = workers.config
    return PlannerProcess(
        PlannerConfig(
            namespace=config.namespace,
            nats_server=config.nats_server,
            etcd_endpoints=config.etcd_endpoints,
            slo_ttft_ms=2000.0,
            slo_itl_ms=50.0,
            **settings,
        )
    )


@asynccontextmanager
async def loaded(workers: Elastic) -> AsyncIterator[list[int]]:
    """Send requests all the time, and check each answer. Yield the list of their seeds."""
    asked: list[int] = []

    async def send() -> None:
        while True:
            seed = len(asked)
            asked.append(seed)
            tokens, _ = await workers.ask(seed)
            assert len(tokens) == OUTPUT_TOKENS
            await asyncio.sleep(PAUSE_S)

    async with asyncio.TaskGroup() as group:
        senders = [group.create_task(send()) for _ in range(NUM_SENDERS)]
        yield asked
        for sender in senders:
            sender.cancel()


async def until_split(workers: Elastic) -> None:
    async with asyncio.timeout(2 * SOON_S):
        while set(workers.shares.values()) != SPLIT:
            await workers.changed()


async def test_planner_splits_workers_whose_streams_wait_for_prompts(
    folder: Path, etcd_server: str, nats_server: str
) -> None:
    """When the planner has ended, the shares stay, and requests go on."""
    async with elastic(
        folder,
        "mock",
        system_port=0,
        nats_server=nats_server,
        etcd_endpoints=etcd_server,
        override_engine_args=ARGS,
    ) as workers:
        assert set(workers.shares.values()) == {ALL_WORK}
        async with loaded(workers) as asked:
            async with planner_of(workers, system_port=0) as planner:
                await until_split(workers)
                assert planner.is_leader
                assert planner.url is not None
                async with httpx.AsyncClient(base_url=planner.url, **PLAIN) as client:
                    page = (await client.get("/metrics")).text
                    assert (await client.get("/ready")).status_code == 200
                assert "dynamo_trtllm_planner_is_leader 1.0" in page
            shares = dict(workers.shares)
            change = await workers.latest_change()
            assert change.writer.startswith("planner ")
            assert "first tokens after" in change.reason
            assert change.before == dict.fromkeys(change.after, ALL_WORK)
            for instance_id, one in shares.items():
                said = await workers.health(instance_id)
                assert (said["prefill_share"], said["decode_share"]) == (one.prefill, one.decode)
                assert said["shares_since"]
            num_asked = len(asked)
            async with asyncio.timeout(SOON_S):
                while len(asked) < num_asked + 5:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert workers.shares == shares


async def test_advising_planner_changes_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with elastic(folder, "mock", override_engine_args=ARGS) as workers:
        async with loaded(workers), planner_of(workers, advise=True):
            async with asyncio.timeout(2 * SOON_S):
                while "would change" not in caplog.text:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        assert set(workers.shares.values()) == {ALL_WORK}


async def test_second_planner_leads_when_the_first_one_ends(folder: Path) -> None:
    async with elastic(folder, "mock", override_engine_args=ARGS) as workers:
        first = planner_of(workers)
        second = planner_of(workers)
        async with second:
            async with first:
                async with asyncio.timeout(SOON_S):
                    while not (first.is_leader or second.is_leader):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                assert first.is_leader != second.is_leader
            async with asyncio.timeout(SOON_S):
                while not second.is_leader:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            async with loaded(workers):
                await until_split(workers)


async def test_planner_goes_on_when_etcd_is_back(
    folder: Path, own_etcd: Callable[[], TestServer], nats_server: str
) -> None:
    etcd = own_etcd()
    async with (
        elastic(
            folder,
            "mock",
            nats_server=nats_server,
            etcd_endpoints=etcd.address,
            override_engine_args=ARGS,
        ) as workers,
        planner_of(workers) as planner,
        asyncio.timeout(6 * SOON_S),
    ):
        while not planner.is_leader:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        etcd.stop()
        async with loaded(workers) as asked:
            while len(asked) < 20:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert set(workers.shares.values()) == {ALL_WORK}
            etcd.start()
            await until_split(workers)
