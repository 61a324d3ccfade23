"""A worker's life on real etcd and NATS, in one process."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import threading
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from benchmarks import chaos
from dynamo_trtllm.cluster.discovery import records
from dynamo_trtllm.cluster.discovery.discovery_interface import Added, Removed
from dynamo_trtllm.cluster.discovery.etcd import EtcdDiscovery
from dynamo_trtllm.cluster.request_plane.client import PlaneLimits
from dynamo_trtllm.cluster.request_plane.nats import NatsPlane
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.capabilities import Sleeps
from dynamo_trtllm.engines.engine_interface import EngineStats
from dynamo_trtllm.engines.mock import engine as mock_engine
from dynamo_trtllm.engines.mock.engine import MockEngine
from dynamo_trtllm.engines.mock.scheduler import MockScheduler
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.protocol.errors import EngineFailed, InternalError, Unreachable
from dynamo_trtllm.protocol.kv_events import BlocksCleared, KvCacheUpdate, kv_events_subject
from dynamo_trtllm.protocol.messages import FinishReason, Phase, ResyncKvEvents, Role, decode
from dynamo_trtllm.testing.engine_requests import tokens
from dynamo_trtllm.worker import Worker
from dynamo_trtllm.worker.timing import WorkerTiming
from dynamo_trtllm.worker.worker import endpoint_of
from tests.kit.cluster import PLAIN, Process
from tests.kit.generator_streams import call_stream, routed_stream
from tests.kit.waiting import SOON_S
from tests.kit.workers import config, frontend_side, request


async def test_serve_when_stopped_then_it_appeared_and_left(
    etcd_server: str, nats_server: str
) -> None:
    chosen = config(etcd_server, nats_server)
    worker = Worker(chosen)
    discovery = EtcdDiscovery(ConnectionConfig(etcd_endpoints=etcd_server))
    async with asyncio.timeout(3 * SOON_S), asyncio.TaskGroup() as group:
        serving = group.create_task(worker.serve())
        async with aclosing(discovery.watch(chosen.namespace)) as events:
            seen = []
            async for event in events:
                if isinstance(event, Added):
                    seen.append(event.instance.id)
                    worker.stop()
                if isinstance(event, Removed):
                    break
        await serving
    await discovery.aclose()
    assert seen == [worker.instance_id]


async def test_serve_when_stopped_while_loading_then_it_ends_at_once(
    etcd_server: str, nats_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = asyncio.Event()

    async def load(_: MockEngine) -> None:
        loading.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(MockEngine, "start", load)
    worker = Worker(config(etcd_server, nats_server))
    async with asyncio.timeout(SOON_S), asyncio.TaskGroup() as group:
        group.create_task(worker.serve())
        await loading.wait()
        worker.stop()


async def test_serve_when_nats_is_not_there_then_unreachable_names_it(etcd_server: str) -> None:
    with pytest.raises(Unreachable, match="localhost:1"):
        await Worker(config(etcd_server, "nats://localhost:1")).serve()


def test_run_when_not_on_the_main_thread_then_says_so() -> None:
    said: list[str] = []

    def run() -> None:
        try:
            Worker(WorkerConfig(model_path="tiny", engine="mock")).run()
        except RuntimeError as exc:
            said.append(str(exc))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert said == [
        "Worker.run handles signals and needs the main thread; in other threads, await serve()"
    ]


async def test_router_tokens_equal_an_aggregated_worker(etcd_server: str, nats_server: str) -> None:
    answers = []
    for roles in ([Role.AGGREGATED], [Role.PREFILL, Role.DECODE]):
        shared = config(etcd_server, nats_server)
        workers = [
            Worker(shared.model_copy(update={"disaggregation_mode": role})) for role in roles
        ]
        async with (
            asyncio.timeout(3 * SOON_S),
            frontend_side(shared) as side,
            asyncio.TaskGroup() as group,
        ):
            for worker in workers:
                group.create_task(worker.serve())
            await side.until_instances(len(workers))
            answers.append(tokens(await side.ask(20)))
            for worker in workers:
                worker.stop()
    assert len(answers[0]) == 20
    assert answers[1] == answers[0]


async def test_stop_deregisters_before_requests_finish(
    etcd_server: str, nats_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = asyncio.Event()
    step = MockScheduler._step
    go.set()
    monkeypatch.setattr(
        MockScheduler,
        "_step",
        lambda scheduler, *args: step(scheduler, *args) if go.is_set() else None,
    )
    chosen = config(
        etcd_server, nats_server, drain_timeout_s=30.0, override_engine_args={"step_s": 0.02}
    )
    worker = Worker(chosen)
    async with asyncio.timeout(3 * SOON_S), frontend_side(chosen) as side:
        serving = asyncio.create_task(worker.serve())
        await side.until_instances(1)
        async with aclosing(
            routed_stream(side.router, request(max_tokens=60), ChoiceTimeline())
        ) as stream:
            chunks = [await anext(stream)]
            go.clear()  # the request does not end by itself
            worker.stop()
            await side.until_instances(0)
            assert not serving.done()
            go.set()
            chunks += [chunk async for chunk in stream]
        await serving
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    assert len(tokens(chunks)) == 60


async def test_stop_when_a_transfer_is_held_then_the_drain_is_bounded(
    etcd_server: str, nats_server: str
) -> None:
    chosen = config(etcd_server, nats_server, drain_timeout_s=0.5, disaggregation_mode=Role.PREFILL)
    worker = Worker(chosen)
    async with asyncio.timeout(3 * SOON_S), frontend_side(chosen) as side:
        serving = asyncio.create_task(worker.serve())
        await side.until_instances(1)
        (instance,) = side.view.instances()
        call = request(max_tokens=8, phase=Phase.PREFILL)
        async with aclosing(call_stream(side.plane, instance.subject, call)) as stream:
            last = [chunk async for chunk in stream][-1]
        assert last.kv_params is not None
        begun_s = time.monotonic()
        worker.stop()
        await serving
        assert 0.5 <= time.monotonic() - begun_s < SOON_S  # and not until the transfer expires


async def test_ready_turns_from_503_to_200_when_engine_loads(
    etcd_server: str,
    nats_server: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loading = asyncio.Event()
    loaded = asyncio.Event()
    start = MockEngine.start

    async def load(engine: MockEngine) -> Any:
        loading.set()
        await loaded.wait()
        return await start(engine)

    monkeypatch.setattr(MockEngine, "start", load)
    caplog.set_level(logging.INFO)
    chosen = config(etcd_server, nats_server, system_port=0)
    worker = Worker(chosen)
    async with (
        asyncio.timeout(3 * SOON_S),
        frontend_side(chosen) as side,
        httpx.AsyncClient(**PLAIN) as client,
    ):
        serving = asyncio.create_task(worker.serve())
        await loading.wait()
        found = re.search(r"health at (http://localhost:\d+)", caplog.text)
        assert found is not None
        assert (await client.get(f"{found[1]}/live")).status_code == 200
        before = await client.get(f"{found[1]}/ready")
        same = {"reason": "", "instance_id": f"{worker.instance_id:x}"}
        assert (before.status_code, before.json()) == (503, {"status": "loading"} | same)
        loaded.set()
        await side.until_instances(1)
        # frontends may know it before its own registration returns
        while (after := await client.get(f"{found[1]}/ready")).status_code == 503:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (after.status_code, after.json()) == (200, {"status": "serving"} | same)
        worker.stop()
        await serving


async def test_serve_when_etcd_is_not_there_then_unreachable_names_it(nats_server: str) -> None:
    with pytest.raises(Unreachable, match="localhost:1"):
        await Worker(config("localhost:1", nats_server)).serve()


async def test_serve_when_engine_dies_then_deregisters(
    etcd_server: str, nats_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = config(etcd_server, nats_server)

    def die(_: MockScheduler) -> None:
        raise RuntimeError("a broken step")

    async with asyncio.timeout(3 * SOON_S), frontend_side(chosen) as side:
        serving = asyncio.create_task(Worker(chosen).serve())
        await side.until_instances(1)
        monkeypatch.setattr(MockScheduler, "_step", die)
        with pytest.raises(EngineFailed):
            await side.ask(8)
        with pytest.raises(EngineFailed):
            await serving
        await side.until_instances(0)


async def test_serve_when_kv_leaked_then_drains_and_fails(
    etcd_server: str, nats_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = config(etcd_server, nats_server)
    stats = MockEngine.stats
    leaked_kv_blocks = 1

    def leaking(engine: MockEngine) -> EngineStats:
        return replace(stats(engine), kv_blocks_total=8, leaked_kv_blocks=leaked_kv_blocks)

    monkeypatch.setattr(MockEngine, "stats", leaking)
    async with asyncio.timeout(3 * SOON_S), frontend_side(chosen) as side:
        worker = Worker(chosen, timing=WorkerTiming(engine_check_s=0.01))
        serving = asyncio.create_task(worker.serve())
        await side.until_instances(1)
        leaked_kv_blocks = 4  # half: not above the limit
        async with aclosing(
            routed_stream(side.router, request(max_tokens=50), ChoiceTimeline())
        ) as running:
            chunks = [await anext(running)]
            leaked_kv_blocks = 5
            chunks += [chunk async for chunk in running]
        assert len(tokens(chunks)) == 50
        with pytest.raises(EngineFailed, match=r"5 of 8 KV blocks .* can't be freed"):
            await serving
        await side.until_instances(0)


@pytest.mark.parametrize("part", ["lease of ", "plane-heartbeat", "worker-health"])
async def test_serve_when_background_task_dies_then_names_it(
    etcd_server: str, nats_server: str, part: str
) -> None:
    chosen = config(
        etcd_server,
        nats_server,
        drain_timeout_s=0.5,
        system_port=0,
        override_engine_args={"step_s": 0.01},
    )
    worker = Worker(chosen)
    async with asyncio.timeout(3 * SOON_S):
        serving = asyncio.create_task(worker.serve())
        while not worker._health.is_ready:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        plane = await NatsPlane.connect(nats_server)
        subject = records.subject(endpoint_of(chosen, str(chosen.engine)), worker.instance_id)
        async with aclosing(call_stream(plane, subject, request(max_tokens=1000))) as chunks:
            await anext(chunks)  # the worker asks its callers whether they live
            (victim,) = [task for task in worker._tasks._tasks if part in task.get_name()]
            victim.cancel()
            with pytest.raises(
                InternalError, match=f"background task {part}.* failed: CancelledError"
            ):
                await serving
        await plane.aclose()
    assert not worker._health.is_ready
    assert part in worker._health.failure


async def test_serve_when_task_dies_during_load_then_never_registers(
    etcd_server: str, nats_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = asyncio.Event()

    async def load(_: MockEngine) -> None:
        loading.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(MockEngine, "start", load)
    worker = Worker(config(etcd_server, nats_server))
    async with asyncio.timeout(SOON_S):
        serving = asyncio.create_task(worker.serve())
        await loading.wait()
        worker._tasks.start(asyncio.sleep(SOON_S), "some-task").cancel()
        with pytest.raises(InternalError, match="background task some-task failed"):
            await serving
    assert "some-task" in worker._health.failure


async def test_serve_publishes_kv_updates_and_snapshots(
    etcd_server: str, nats_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: asyncio.Queue[KvCacheUpdate] = asyncio.Queue()
    monkeypatch.setattr(
        MockEngine, "start_kv_events", lambda _, on_events: on_events([BlocksCleared()])
    )
    caching = {"publish_kv_events": True, "override_engine_args": {"enable_prefix_caching": True}}
    chosen = config(etcd_server, nats_server).model_copy(update=caching)
    worker = Worker(chosen)
    plane = await NatsPlane.connect(nats_server, PlaneLimits())
    discovery = EtcdDiscovery(ConnectionConfig(etcd_endpoints=etcd_server))
    endpoint = endpoint_of(chosen, str(chosen.engine))
    await plane.subscribe(
        kv_events_subject(endpoint.namespace),
        lambda data, _: found.put_nowait(decode(data, KvCacheUpdate)),
    )
    async with asyncio.timeout(3 * SOON_S), asyncio.TaskGroup() as group:
        serving = group.create_task(worker.serve())
        updates = [await found.get()]
        async with aclosing(discovery.watch(chosen.namespace)) as events:
            while not isinstance(await anext(events), Added):
                pass
        await plane.client.control(records.subject(endpoint, worker.instance_id), ResyncKvEvents())
        while not updates[-1].snapshot:
            updates.append(await found.get())
        worker.stop()
        await serving
    await plane.aclose()
    await discovery.aclose()
    assert updates[0] == KvCacheUpdate(instance_id=worker.instance_id, number=0, cleared=True)
    last = KvCacheUpdate(
        instance_id=worker.instance_id, number=len(updates) - 1, cleared=True, snapshot=1
    )
    assert updates[-1] == last


class SleepingMock(MockEngine, Sleeps):
    """A mock engine that has no memory to release."""

    sleep_obstacle = ""

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


async def test_serve_asleep_is_deregistered_until_wake(
    etcd_server: str, nats_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mock_engine, "MockEngine", SleepingMock)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    chosen = config(
        etcd_server,
        nats_server,
        system_host="127.0.0.1",
        system_port=port,
        disaggregation_mode=Role.AGGREGATED,
    )
    worker = Worker(chosen)
    url = f"http://127.0.0.1:{port}"
    stable = ("asleep", "serving")
    async with (
        asyncio.timeout(3 * SOON_S),
        frontend_side(chosen) as frontend,
        httpx.AsyncClient(**PLAIN) as client,
        asyncio.TaskGroup() as group,
    ):
        serving = group.create_task(worker.serve())
        await frontend.until_instances(1)
        for path, count in (("/sleep", 0), ("/wake", 1), ("/sleep", 0)):
            # A worker is registered a moment before it says that it serves.
            while (await client.get(f"{url}/ready")).json()["status"] not in stable:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert (await client.post(url + path)).status_code == 202
            await frontend.until_instances(count)
            if count:
                assert len(tokens(await frontend.ask(3))) == 3
        worker.stop()  # while it is asleep
        await serving


async def test_event_loop_that_a_request_stops_is_no_drain(
    etcd_server: str, nats_server: str
) -> None:
    """The request raises SystemExit in the worker. After a drain, it would go to the next one."""
    chosen = config(etcd_server, nats_server)
    stand_in = str(Path(chaos.__file__).with_name("stand_in"))
    environ = {
        **os.environ,
        "ETCD_ENDPOINTS": etcd_server,
        "NATS_SERVER": nats_server,
        "PYTHONPATH": os.pathsep.join([stand_in, os.environ.get("PYTHONPATH", "")]),
    }
    flags = ["--engine", "mock", "--model", "tiny", "--system-port", "0"]
    worker = Process("dynamo_trtllm", [*flags, "--namespace", chosen.namespace], environ)
    try:
        await asyncio.to_thread(worker.instance)
        async with frontend_side(chosen) as side:
            await side.until_instances(1)
            (instance,) = side.view.instances()
            call = structs.replace(
                request(max_tokens=8), conversation_id="stand-in-query-of-death:system-exit:any:0"
            )
            async with aclosing(call_stream(side.plane, instance.subject, call)) as chunks:
                with pytest.raises(EngineFailed, match="its event loop was stopped"):
                    await anext(chunks)
    finally:
        await asyncio.to_thread(worker.stop)
