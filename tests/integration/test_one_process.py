"""Workers and a frontend of one process, without servers: answers, failures, and what is left."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_trtllm import (
    ConfigError,
    Frontend,
    FrontendConfig,
    FrontendRequest,
    Role,
    Worker,
    WorkerConfig,
    serve,
)
from dynamo_trtllm.cluster.connect import open_discovery
from dynamo_trtllm.cluster.discovery.discovery_interface import Added, Synced
from dynamo_trtllm.protocol.errors import Draining, EngineFailed
from dynamo_trtllm.protocol.messages import Instance
from dynamo_trtllm.support.background import BackgroundTasks
from tests.kit.cluster import PLAIN
from tests.kit.transfer_keys import FIRST_KEY, write_keys
from tests.kit.waiting import SOON_S

CLUSTER: dict[str, Any] = {"nats_server": "inproc://", "etcd_endpoints": "memory://"}
MODEL = "tiny-gpt-oss"


def make_worker(role: Role, **settings: Any) -> Worker:
    config = WorkerConfig(
        model_path=MODEL, engine="mock", disaggregation_mode=role, **CLUSTER, **settings
    )
    return Worker(config)


def make_frontend(**settings: Any) -> Frontend:
    return Frontend(FrontendConfig(http_host="127.0.0.1", http_port=0, **CLUSTER, **settings))


async def ask(url: str) -> int:
    """Return the number of tokens of an answer."""
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 5, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=SOON_S, **PLAIN) as client:
        response = await client.post(f"{url}/v1/completions", json=body)
    return int(response.raise_for_status().json()["usage"]["completion_tokens"])


async def serve_and_ask() -> None:
    frontend = make_frontend()
    health = {"system_host": "127.0.0.1", "system_port": 0}
    async with make_worker(Role.PREFILL, **health), make_worker(Role.DECODE) as decode, frontend:
        assert decode.url is None
        assert await ask(frontend.url) == 5


def serve_in_a_thread_and_ask() -> None:
    with serve(MODEL, engine="mock") as deployment:
        assert asyncio.run(ask(deployment.url)) == 5


async def test_slo_router_chooses_paths_by_what_workers_have_measured() -> None:
    frontend = make_frontend(router_mode="slo", slo_ttft_ms=60_000, slo_itl_ms=60_000)
    async with make_worker(Role.PREFILL), make_worker(Role.DECODE), frontend:
        chosen: set[tuple[str, str]] = set()
        async with asyncio.timeout(SOON_S), httpx.AsyncClient(**PLAIN) as client:
            # Until the workers have reported times, requests are placed by cost.
            while not any(slo == "met" for _, slo in chosen):
                assert await ask(frontend.url) == 5
                text = (await client.get(f"{frontend.url}/metrics")).text
                lines = re.findall(
                    r'paths_total{model="[^"]*",path="(\w*)",slo="(\w+)"} [1-9]', text
                )
                chosen = set(lines)
    paths = {path for path, slo in chosen if slo == "met"}
    assert paths <= {"prefill_decode", "aggregated_on_decode", "aggregated_on_prefill"}
    assert "missed" not in {slo for _, slo in chosen}


async def test_workers_with_a_key_transfer_kv_and_register_addresses(tmp_path: Path) -> None:
    settings = {"kv_transfer_key_file": write_keys(tmp_path / "keys", FIRST_KEY)}
    frontend = make_frontend()
    workers = [make_worker(role, **settings) for role in (Role.PREFILL, Role.DECODE)]
    async with workers[0], workers[1], frontend:
        assert await ask(frontend.url) == 5
        found: dict[Role, Instance] = {}
        discovery = open_discovery(WorkerConfig(model_path=MODEL, **CLUSTER), BackgroundTasks())
        async with aclosing(discovery.watch("dynamo")) as events:
            async for event in events:
                if isinstance(event, Synced):
                    break
                if isinstance(event, Added):
                    found[event.instance.role] = event.instance
    assert all(instance.signs_kv_transfers for instance in found.values())
    (address,) = found[Role.PREFILL].kv_addresses
    assert address.startswith("127.0.0.1:")


async def serve_with_threads() -> None:
    await asyncio.to_thread(serve_in_a_thread_and_ask)


def left_behind() -> dict[str, Any]:
    """Return what a cluster of this process may leave, but for threads that asyncio reuses."""
    gc.collect()
    names = {thread.name for thread in threading.enumerate()}
    recordings = Path(os.environ["XDG_RUNTIME_DIR"]).glob(f"**/*-{os.getpid()}-*")
    return {
        "tasks": sorted(task.get_name() for task in asyncio.all_tasks()),
        "threads": sorted(name for name in names if not name.startswith(("asyncio_", "in-thread"))),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "recordings": len(list(recordings)),
        "handler": signal.getsignal(signal.SIGTERM),
    }


@pytest.mark.parametrize("use", [serve_and_ask, serve_with_threads])
@pytest.mark.parametrize(
    "count", [2, pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
async def test_cluster_restarted_repeatedly_leaves_nothing(
    count: int, use: Callable[[], Awaitable[None]]
) -> None:
    await use()
    after_first = left_behind()
    for _ in range(count - 1):
        await use()
    assert left_behind() == after_first


def test_cluster_when_run_in_a_thread_then_it_answers() -> None:
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(asyncio.run, serve_and_ask())
        running.result(SOON_S)


async def test_worker_in_another_thread_than_the_frontend_answers() -> None:
    """`stop` may be called from any thread."""
    worker = make_worker(Role.AGGREGATED)
    serving = asyncio.create_task(asyncio.to_thread(asyncio.run, worker.serve()))
    async with asyncio.timeout(SOON_S), make_frontend() as frontend:
        while True:
            try:
                assert await ask(frontend.url) == 5
                break
            except httpx.HTTPStatusError:
                await asyncio.sleep(0.05)
        worker.stop()
        await serving


async def test_serve_without_a_block_has_ready_and_stop() -> None:
    worker = make_worker(Role.AGGREGATED)
    serving = asyncio.create_task(worker.serve())
    await worker.ready()
    worker.stop()
    await serving
    with pytest.raises(Draining, match="the worker was stopped"):
        await worker.ready()
    with pytest.raises(RuntimeError, match="a Worker serves once"):
        await worker.serve()


async def test_middleware_of_a_frontend_reads_any_header() -> None:
    async def echo(request: FrontendRequest) -> None:
        request.response_headers["X-Own"] = request.headers["x-own"]

    config = FrontendConfig(http_host="127.0.0.1", http_port=0, **CLUSTER)
    async with (
        Frontend(config, middleware=[echo]) as frontend,
        httpx.AsyncClient(**PLAIN) as client,
    ):
        response = await client.get(f"{frontend.url}/live", headers={"X-Own": "1"})
    assert response.headers["x-own"] == "1"


async def test_block_ends_with_the_error_of_a_failed_server() -> None:
    async def run() -> None:
        async with make_worker(Role.AGGREGATED) as worker:
            worker._tasks.start(fail(), "planted")
            await asyncio.Event().wait()

    with pytest.raises(EngineFailed, match="planted"):
        await run()
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0


async def fail() -> None:
    raise EngineFailed("planted")


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_worker(Role.AGGREGATED, override_engine_args={"no_such": 1}),
        lambda: Frontend(FrontendConfig(http_host="no.such.host.invalid", **CLUSTER)),
        lambda: Frontend(FrontendConfig(workers=2)),
    ],
    ids=["worker", "frontend", "several processes"],
)
async def test_block_when_the_start_fails_then_it_is_not_entered(
    make: Callable[[], Worker | Frontend],
) -> None:
    is_entered = False

    async def run() -> None:
        nonlocal is_entered
        async with make():
            is_entered = True

    with pytest.raises(ConfigError):
        await run()
    assert not is_entered


async def test_block_when_cancelled_then_it_ends_at_once() -> None:
    is_entered = asyncio.Event()

    async def run() -> None:
        async with make_worker(Role.AGGREGATED):
            is_entered.set()
            await asyncio.Event().wait()

    running = asyncio.create_task(run())
    async with asyncio.timeout(SOON_S):
        await is_entered.wait()
        running.cancel()
        await asyncio.wait([running])
    assert running.cancelled()
