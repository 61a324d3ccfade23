"""A worker that is asked to stop, over real etcd and NATS: what it waits for, and that no request
is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing

import msgspec
import pytest

from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.generation_events import RouterOptions
from dynamo_trtllm.protocol.messages import KvTransferParams, Phase, Role
from dynamo_trtllm.testing.engine_requests import tokens
from tests.kit.generator_streams import call_stream, routed_stream
from tests.kit.servers import TestServer
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

STEP = {"step_s": 0.01}


async def transfer_params_of(
    side: FrontendSide, running_workers: RunningWorkers
) -> KvTransferParams:
    """Of the one prefill worker, for `request(max_tokens=8)`."""
    prefill, *_ = [i for i in side.view.instances() if i.role is Role.PREFILL]
    async with aclosing(
        call_stream(side.plane, prefill.subject, request(max_tokens=8, phase=Phase.PREFILL))
    ) as stream:
        kv_params = [chunk async for chunk in stream][-1].kv_params
    assert kv_params is not None
    return kv_params


async def test_draining_prefill_worker_still_serves_a_transfer(
    etcd_server: str,
    nats_server: str,
    running_workers: RunningWorkers,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    chosen = config(etcd_server, nats_server, drain_timeout_s=20.0, override_engine_args=STEP)
    start_pairs(chosen, running_workers)
    async with frontend_side(chosen) as side:
        await side.until_instances(2)
        (decode,) = side.view.model("tiny").decode
        kv_params = await transfer_params_of(side, running_workers)
        running_workers.workers[0].stop()
        await side.until_instances(1)
        await until(lambda: "running requests: 0, pending KV transfers: 1" in caplog.text, SOON_S)
        call = msgspec.structs.replace(
            request(max_tokens=8), phase=Phase.DECODE, kv_params=kv_params
        )
        async with aclosing(call_stream(side.plane, decode.subject, call)) as stream:
            chunks = [chunk async for chunk in stream]
        assert len(tokens(chunks)) == 8
        # its backend reports that the KV was read; with one that can't, the router's release does
        await asyncio.wait_for(asyncio.shield(running_workers.tasks[0]), SOON_S)


async def test_draining_prefill_worker_waits_until_transfer_expires(
    etcd_server: str, nats_server: str, running_workers: RunningWorkers
) -> None:
    chosen = config(
        etcd_server,
        nats_server,
        drain_timeout_s=20.0,
        kv_transfer_ttl_s=1.5,
        override_engine_args=STEP,
    )
    start_pairs(chosen, running_workers)
    async with frontend_side(chosen) as side:
        await side.until_instances(2)
        begun_s = time.monotonic()
        await transfer_params_of(side, running_workers)
        running_workers.workers[0].stop()
        await asyncio.wait_for(asyncio.shield(running_workers.tasks[0]), SOON_S)
        assert 1.4 < time.monotonic() - begun_s < SOON_S


async def test_draining_decode_worker_moves_fetch_to_another(
    etcd_server: str, nats_server: str, running_workers: RunningWorkers
) -> None:
    """The prompt takes a second; the decode worker that was chosen leaves meanwhile."""
    chosen = config(etcd_server, nats_server)
    slow = {"step_s": 0.1, "prefill_tokens_per_step": 10}
    running_workers.start(
        chosen.model_copy(
            update={"disaggregation_mode": Role.PREFILL, "override_engine_args": slow}
        )
    )
    for _ in range(2):
        running_workers.start(chosen.model_copy(update={"disaggregation_mode": Role.DECODE}))
    async with frontend_side(chosen, RouterOptions(hold_s=5)) as side:
        await side.until_instances(3)
        traces = [ChoiceTimeline() for _ in range(4)]  # two for each decode worker

        async def run(trace: ChoiceTimeline) -> int:
            async with aclosing(routed_stream(side.router, request(max_tokens=8), trace)) as chunks:
                return len(tokens([chunk async for chunk in chunks]))

        running = [asyncio.create_task(run(trace)) for trace in traces]
        stats = running_workers.engine_of(Role.PREFILL).stats
        await until(lambda: stats().running + stats().waiting == 4, SOON_S)
        running_workers.workers[1].stop()
        assert await asyncio.gather(*running) == [8] * 4
        assert {trace.decode_instance for trace in traces} == {
            running_workers.workers[2].instance_id
        }
        assert [trace.retries for trace in traces] == [0] * 4
        await running_workers.wait_idle()


async def test_worker_stopping_without_etcd_fails_no_request(
    own_etcd: Callable[[], TestServer], nats_server: str, running_workers: RunningWorkers
) -> None:
    """No frontend learns that it leaves: they still send requests to it, which are retried on other
    workers.
    """
    etcd = own_etcd()
    chosen = config(etcd.address, nats_server, lease_ttl_s=1.0, override_engine_args=STEP)
    start_pairs(chosen, running_workers, count=2)
    async with frontend_side(chosen, RouterOptions(hold_s=5)) as side:
        await side.until_instances(4)
        # Decode workers have learned the addresses of both prefill workers once they fetched KV.
        for _ in range(8):
            assert len(tokens(await side.ask(6))) == 6
        await asyncio.to_thread(etcd.stop)
        for leaving in (0, 1):  # a prefill and a decode worker
            running_workers.workers[leaving].stop()
        while not all(running_workers.tasks[leaving].done() for leaving in (0, 1)):
            assert len(tokens(await side.ask(6))) == 6
        for _ in range(6):
            assert len(tokens(await side.ask(6))) == 6
        assert len(side.view.instances()) == 4  # as it was when etcd was last heard
        etcd.start()
        await side.until_instances(2)


@pytest.mark.parametrize("hurt", ["stop", "pause"])
async def test_worker_stopping_without_nats_ends_in_time(
    etcd_server: str, own_nats: Callable[[], TestServer], running_workers: RunningWorkers, hurt: str
) -> None:
    nats = own_nats()
    chosen = config(etcd_server, nats.address, drain_timeout_s=2.0, override_engine_args=STEP)
    start_pairs(chosen, running_workers)
    async with frontend_side(chosen) as side:
        await side.until_instances(2)
        await transfer_params_of(side, running_workers)
        await asyncio.to_thread(getattr(nats, hurt))
        begun_s = time.monotonic()
        for worker in running_workers.workers:
            worker.stop()
        await asyncio.gather(*running_workers.tasks)
        assert time.monotonic() - begun_s < 2 * SOON_S
        await side.until_instances(0)
