"""A worker's own HTTP port: where it listens, and what it says about a start."""

from __future__ import annotations

import logging
import re
import socket

import httpx
import pytest

from dynamo_trtllm.background import BackgroundTasks
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.worker.health import Health, HealthServer, health_app


def metrics() -> bytes:
    return b""


@pytest.mark.parametrize(
    ("health", "status", "said"),
    [
        (Health(instance_id="ab"), 503, {"status": "starting", "reason": ""}),
        (Health("loading", "reading weights", "ab"), 503, {"status": "loading", "reason": "reading weights"}),
        (Health("serving", "", "ab"), 200, {"status": "serving", "reason": ""}),
        (Health("serving", "the engine died", "ab"), 503, {"status": "serving", "reason": "the engine died"}),
        (Health("draining", "", "ab"), 503, {"status": "draining", "reason": ""}),
    ],
)
async def test_ready_then_200_only_while_it_serves_and_the_instance_is_named(
    health: Health, status: int, said: dict[str, str]
) -> None:
    transport = httpx.ASGITransport(app=health_app(health, metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
        ready, report = await client.get("/ready"), await client.get("/health")
    assert (ready.status_code, ready.json()) == (status, said | {"instance_id": "ab"})
    assert (report.status_code, report.json()["instance_id"]) == (status, "ab")


async def test_server_when_a_host_is_given_then_it_listens_nowhere_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with HealthServer("127.0.0.1", 0, Health(), metrics, BackgroundTasks()), httpx.AsyncClient() as client:
        found = re.search(r"health at http://localhost:(\d+)", caplog.text)
        assert found is not None
        assert (await client.get(f"http://127.0.0.1:{found[1]}/live")).status_code == 200
        with pytest.raises(httpx.ConnectError):
            await client.get(f"http://127.0.0.2:{found[1]}/live")


async def test_server_when_the_port_is_taken_then_the_error_names_it_and_where() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--system-port {port} can't be opened on --system-host 127.0.0.1"):
            await HealthServer("127.0.0.1", port, Health(), metrics, BackgroundTasks()).__aenter__()
