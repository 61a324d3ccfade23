"""What frontends and planners do when their terminal is closed (SIGHUP), or a stop is announced.

tests/e2e/mock_cluster/test_worker_process.py has the worker.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Callable, Iterator

import httpx
import pytest

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.config.planner import PlannerConfig
from dynamo_trtllm.frontend.process import frontend as frontend_module
from dynamo_trtllm.frontend.process.frontend import Frontend
from dynamo_trtllm.planner.process import PlannerProcess
from tests.kit.cluster import PLAIN
from tests.kit.waiting import SOON_S


def memory_cluster() -> dict[str, str]:
    name = secrets.token_hex(4)
    return {"etcd_endpoints": f"memory://{name}", "nats_server": f"inproc://{name}"}


def frontend() -> Frontend:
    return Frontend(FrontendConfig(http_host="127.0.0.1", http_port=0, **memory_cluster()))


def planner() -> PlannerProcess:
    return PlannerProcess(PlannerConfig(slo_ttft_ms=2000, slo_itl_ms=100, **memory_cluster()))


@pytest.fixture(autouse=True)
def unchanged_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep settings of the test's own process."""
    monkeypatch.setattr(frontend_module, "_tune_malloc", lambda: None)
    monkeypatch.setattr(frontend_module, "tune_gc", lambda: None)
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("make", [frontend, planner])
async def test_closed_terminal_stops_the_process(
    make: Callable[[], Frontend | PlannerProcess],
) -> None:
    process = make()
    serving = asyncio.create_task(process.serve_with_signals())
    async with asyncio.timeout(SOON_S):
        await process.ready()
        # Without a handler, the signal would end the tests.
        assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
        signal.raise_signal(signal.SIGHUP)
        await serving


@pytest.mark.parametrize("make", [frontend, planner])
async def test_closed_terminal_is_ignored_under_nohup(
    make: Callable[[], Frontend | PlannerProcess],
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    process = make()
    serving = asyncio.create_task(process.serve_with_signals())
    async with asyncio.timeout(SOON_S):
        await process.ready()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        process.stop()
        await serving


async def test_frontend_whose_stop_is_announced_is_not_ready() -> None:
    process = frontend()
    serving = asyncio.create_task(process.serve_with_signals())
    async with asyncio.timeout(SOON_S), httpx.AsyncClient(**PLAIN) as client:
        await process.ready()
        assert (await client.get(f"{process.url}/ready")).status_code == 200
        # Without a handler, the signal would end the tests.
        assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
        signal.raise_signal(signal.SIGUSR1)
        ready = await client.get(f"{process.url}/ready")
        assert ready.status_code == 503
        assert ready.json() == {
            "status": "not_ready",
            "reason": "this frontend will be stopped; send new requests to another one",
        }
        assert (await client.get(f"{process.url}/v1/models")).status_code == 200
        process.stop()
        await serving
