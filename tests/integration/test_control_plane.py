"""Requests while etcd or NATS is away, frozen, restarted or emptied: real servers, real workers, in
one process.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from dynamo_trtllm.cluster.discovery import etcd as etcd_module
from dynamo_trtllm.cluster.discovery.etcd import EtcdDiscovery
from dynamo_trtllm.cluster.request_plane.client import PlaneLimits
from dynamo_trtllm.cluster.request_plane.nats import NatsPlane
from dynamo_trtllm.frontend.routing.generation_events import RouterOptions
from dynamo_trtllm.protocol.errors import Disconnected, DynamoError, Unreachable
from dynamo_trtllm.protocol.messages import Chunk
from dynamo_trtllm.testing.engine_requests import tokens
from tests.kit.etcd_client import EtcdClient
from tests.kit.servers import TestServer
from tests.kit.waiting import SOON_S
from tests.kit.workers import (
    FrontendSide,
    RunningWorkers,
    config,
    frontend_side,
    start_pairs,
    until,
)

Make = Callable[[], TestServer]
HOLD = RouterOptions(hold_s=SOON_S)
QUICK = PlaneLimits(ack_timeout_s=2.0, ping_interval_s=0.5)
STEP = {"step_s": 0.005}


async def registered(server: TestServer) -> list[int]:
    """Instance ids of all keys."""
    reply = await EtcdClient(server.address).get_all()
    return sorted(int(kv.key.decode().rpartition("/")[2], 16) for kv in reply.kvs)


async def until_registered(server: TestServer, ids: list[int]) -> None:
    async with asyncio.timeout(2 * SOON_S):
        while await registered(server) != ids:  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.05)


@asynccontextmanager
async def asking(side: FrontendSide) -> AsyncIterator[list[int]]:
    """One short request after the other meanwhile; the tokens of each."""
    answered: list[int] = []
    over = False

    async def ask() -> None:
        while not over:
            answered.append(len(tokens(await side.ask(4))))
            await asyncio.sleep(0.02)

    task = asyncio.create_task(ask())
    yield answered
    over = True
    await asyncio.wait_for(task, 2 * SOON_S)


async def away(server: TestServer) -> None:
    await asyncio.to_thread(server.stop)
    await asyncio.sleep(2.5)  # more than two leases
    server.start()


async def emptied(server: TestServer) -> None:
    await asyncio.to_thread(server.stop)
    server.lose_data()
    server.start()


async def frozen(server: TestServer) -> None:
    server.pause()
    await asyncio.sleep(2.5)
    server.resume()


async def restarted(server: TestServer) -> None:
    await asyncio.to_thread(server.restart)


@pytest.mark.parametrize("trouble", [away, emptied, frozen, restarted])
async def test_etcd_trouble_keeps_requests_and_registrations(
    own_etcd: Make,
    nats_server: str,
    running_workers: RunningWorkers,
    trouble: Callable[[TestServer], object],
) -> None:
    etcd = own_etcd()
    chosen = config(etcd.address, nats_server, lease_ttl_s=1.0, override_engine_args=STEP)
    start_pairs(chosen, running_workers)
    async with frontend_side(chosen, HOLD) as side:
        await side.until_instances(2)
        # The decode worker has learned of the prefill worker, too.
        assert len(await side.ask(4)) == 4
        async with asking(side) as answered:
            await trouble(etcd)  # type: ignore[misc]
            await asyncio.sleep(1.5)  # more than a lease, and what renewing takes
        assert set(answered) == {4}
        assert len(answered) >= 5
        assert running_workers.alive()
        await until_registered(etcd, running_workers.ids())
        await side.until_instances(2)
        assert running_workers.ids() == [instance.id for instance in side.view.instances()]


async def test_worker_waits_for_etcd_at_start(
    own_etcd: Make,
    nats_server: str,
    running_workers: RunningWorkers,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # it may start slowly
    monkeypatch.setattr(etcd_module, "EtcdDiscovery", partial(EtcdDiscovery, start_timeout_s=30.0))
    etcd = own_etcd()
    chosen = config(etcd.address, nats_server, lease_ttl_s=1.0)
    await asyncio.to_thread(etcd.stop)
    running_workers.start(chosen)
    await until(
        lambda: re.search(r"waiting for etcd for \d s \(up to 30 s\)", caplog.text) is not None,
        SOON_S,
    )
    etcd.start()
    async with frontend_side(chosen) as side:
        await side.until_instances(1)
        assert len(await side.ask(4)) == 4


async def test_worker_waits_for_nats_at_start(
    etcd_server: str,
    own_nats: Make,
    running_workers: RunningWorkers,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # it may start slowly
    monkeypatch.setitem(NatsPlane.connect.__func__.__kwdefaults__, "connect_timeout_s", 30.0)
    nats = own_nats()
    chosen = config(etcd_server, nats.address)
    await asyncio.to_thread(nats.stop)
    running_workers.start(chosen)
    await until(lambda: f"waiting for NATS at {nats.address}" in caplog.text, SOON_S)
    nats.start()
    async with frontend_side(chosen) as side:
        await side.until_instances(1)


# --- NATS -----------------------------------------------------------------------------------------


async def gone_for_a_second(server: TestServer) -> None:
    await asyncio.to_thread(server.stop)
    await asyncio.sleep(1.0)
    server.start()


async def frozen_for_seconds(server: TestServer) -> None:
    server.pause()
    await asyncio.sleep(3.0)
    server.resume()


@pytest.mark.parametrize("trouble", [restarted, gone_for_a_second, frozen_for_seconds])
async def test_nats_trouble_ends_streams_right_or_named(
    etcd_server: str,
    own_nats: Make,
    running_workers: RunningWorkers,
    trouble: Callable[[TestServer], object],
) -> None:
    nats = own_nats()
    chosen = config(etcd_server, nats.address, override_engine_args={"step_s": 0.02})
    start_pairs(chosen, running_workers, count=2)
    async with frontend_side(chosen, HOLD, QUICK) as side:
        await side.until_instances(4)
        right = tokens(await side.ask(60))
        streams = [asyncio.create_task(side.ask(60)) for _ in range(8)]
        await asyncio.sleep(0.3)
        await trouble(nats)  # type: ignore[misc]
        answers = await asyncio.wait_for(
            asyncio.gather(*streams, return_exceptions=True), 3 * SOON_S
        )
        for answer in answers:
            assert isinstance(answer, DynamoError) or (
                isinstance(answer, list) and tokens(answer) == right
            ), answer
        # it was back soon enough
        assert sum(isinstance(answer, list) for answer in answers) == 8, answers
        assert tokens(await side.ask(60)) == right
        assert running_workers.alive()
        await running_workers.wait_idle()


async def test_request_waits_for_nats_within_its_deadline(
    etcd_server: str, own_nats: Make, running_workers: RunningWorkers
) -> None:
    nats = own_nats()
    chosen = config(etcd_server, nats.address, override_engine_args=STEP)
    start_pairs(chosen, running_workers)
    async with (
        frontend_side(chosen, HOLD, QUICK) as patient,
        frontend_side(chosen, RouterOptions(hold_s=1), QUICK) as side,
    ):
        await patient.until_instances(2)
        await side.until_instances(2)
        await asyncio.to_thread(nats.stop)
        waiting = asyncio.create_task(patient.ask(4))
        await asyncio.sleep(1.5)
        assert not waiting.done()
        nats.start()
        assert len(tokens(await asyncio.wait_for(waiting, 2 * SOON_S))) == 4
        await asyncio.to_thread(nats.stop)
        begun_s = time.monotonic()
        with pytest.raises((Disconnected, Unreachable)):
            await side.ask(4)
        assert time.monotonic() - begun_s < 2 * SOON_S
        nats.start()
        await until_served(side)


async def test_worker_leaves_when_nats_client_gives_up(
    etcd_server: str, nats_server: str, running_workers: RunningWorkers
) -> None:
    """Otherwise it would stay registered and look healthy, and no request would reach it."""
    chosen = config(etcd_server, nats_server)
    running_workers.start(chosen)
    async with frontend_side(chosen) as side:
        await side.until_instances(1)
        # as nats-py does by itself after a protocol error
        await running_workers.planes[0]._transport._client.close()
        (serving,) = running_workers.tasks
        with pytest.raises(Disconnected, match="restart this process"):
            await asyncio.wait_for(asyncio.shield(serving), SOON_S)
        running_workers.tasks.clear()
        await side.until_instances(0)


async def until_served(side: FrontendSide) -> list[Chunk]:
    async with asyncio.timeout(2 * SOON_S):
        while True:
            try:
                return await side.ask(4)
            except DynamoError:
                await asyncio.sleep(0.05)
