"""A worker's own HTTP port: where it listens, and what it says about a start."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from dynamo_trtllm.access.access_control import AccessControl
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.background import BackgroundTasks
from dynamo_trtllm.support.http_server import server
from dynamo_trtllm.support.http_server.connection import HttpConnection
from dynamo_trtllm.worker import health
from dynamo_trtllm.worker.health import Health, health_app, health_server
from tests.kit.cases import each_case
from tests.kit.certificates import client_context, shared_server_certificate
from tests.kit.memory_http import asgi
from tests.kit.waiting import SOON_S

KEY = "sk-key-of-the-settings"


def metrics() -> bytes:
    return b""


@pytest.mark.parametrize(
    ("state", "status", "said"),
    [
        (Health(instance_id="ab"), 503, {"status": "starting", "reason": ""}),
        (
            Health("loading", "reading weights", "ab"),
            503,
            {"status": "loading", "reason": "reading weights"},
        ),
        (Health("serving", "", "ab"), 200, {"status": "serving", "reason": ""}),
        (
            Health("serving", "the engine died", "ab"),
            503,
            {"status": "serving", "reason": "the engine died"},
        ),
        (Health("draining", "", "ab"), 503, {"status": "draining", "reason": ""}),
    ],
)
async def test_ready_is_200_only_while_serving(
    state: Health, status: int, said: dict[str, str]
) -> None:
    transport = httpx.ASGITransport(app=asgi(health_app(state, metrics)))
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
        ready = await client.get("/ready")
        report = await client.get("/health")
    assert (ready.status_code, ready.json()) == (status, said | {"instance_id": "ab"})
    assert (report.status_code, report.json()["instance_id"]) == (status, "ab")


@each_case(
    ("state", "said"),
    [(Health("serving"), {}), (Health("serving", is_leader=False), {"is_leader": False})],
)
async def test_health_of_a_planner_says_whether_it_leads(
    state: Health, said: dict[str, bool]
) -> None:
    transport = httpx.ASGITransport(app=asgi(health_app(state, metrics)))
    async with httpx.AsyncClient(transport=transport, base_url="http://planner") as client:
        report = (await client.get("/health")).json()
    expected = {"status": "ready", "phase": "serving", "reason": "", "instance_id": ""}
    assert report == expected | said


@each_case(
    ("settings", "key", "statuses"),
    [
        ({}, "", (401, 401, 401)),
        ({"api_key": (KEY,)}, "", (401, 401, 401)),
        ({"api_key": (KEY,)}, "another-key-of-ours", (401, 401, 401)),
        ({"api_key": (KEY,)}, KEY, (200, 200, 202)),
        ({"allow_anonymous": True}, "", (200, 200, 403)),
    ],
)
@each_case("client", ["10.0.0.7", "::ffff:10.0.0.7", "127.0.0.1", "::1"])
async def test_other_machines_need_a_key_except_for_probes(
    settings: dict[str, Any], key: str, statuses: tuple[int, int, int], client: str
) -> None:
    access = AccessControl(WorkerConfig(model_path="m", **settings))
    app = health_app(Health("serving"), metrics, {"/sleep": lambda: ""}, access.check_status)
    transport = httpx.ASGITransport(app=asgi(app), client=(client, 9))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://worker", headers=headers
    ) as http:
        for path in ("/live", "/ready"):
            assert (await http.get(path)).status_code == 200
        answers = [await http.get("/health"), await http.get("/metrics"), await http.post("/sleep")]
    is_local = client in ("127.0.0.1", "::1")
    assert tuple(answer.status_code for answer in answers) == (
        (200, 200, 202) if is_local else statuses
    )
    if not settings and not is_local:
        # A worker without keys asks for no key: none would be right.
        assert "start it with --api-keys-file" in answers[0].text


@each_case(
    ("host", "key", "status"),
    [
        ("evil.example", "", 403),
        ("localhost.evil.example:9", "", 403),
        ("evil.example", "another-key-of-ours", 401),
        ("node.example", KEY, 200),
        ("localhost:9", "", 200),
        ("127.0.0.1:9", "another-key-of-ours", 200),
        ("[::1]:9", "", 200),
    ],
)
@each_case("path", ["/health", "/metrics"])
async def test_web_page_that_rebinds_its_name_needs_a_key(
    host: str, key: str, status: int, path: str
) -> None:
    access = AccessControl(WorkerConfig(model_path="m", api_key=(KEY,)))
    app = health_app(Health("serving"), metrics, guard=access.check_status)
    transport = httpx.ASGITransport(app=asgi(app), client=("127.0.0.1", 9))
    headers = {"Host": host}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as http:
        assert (await http.get(path, headers=headers)).status_code == status


@each_case("key", ["", KEY])
async def test_local_client_is_not_asked_for_a_key_that_nothing_checks(key: str) -> None:
    access = AccessControl(WorkerConfig(model_path="m"))
    app = health_app(Health("serving"), metrics, guard=access.check_status)
    transport = httpx.ASGITransport(app=asgi(app), client=("127.0.0.1", 9))
    headers = {"Host": "node.example", "Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as http:
        answer = await http.get("/health", headers=headers)
    assert answer.status_code == 403
    assert "as localhost" in answer.text
    assert "API key" not in answer.text


async def test_server_listens_only_on_the_given_host(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with (
        health_server("127.0.0.1", 0, health_app(Health(), metrics), BackgroundTasks()),
        httpx.AsyncClient() as client,
    ):
        found = re.search(r"health at http://localhost:(\d+)", caplog.text)
        assert found is not None
        assert (await client.get(f"http://127.0.0.1:{found[1]}/live")).status_code == 200
        with pytest.raises(httpx.ConnectError):
            await client.get(f"http://127.0.0.2:{found[1]}/live")


async def test_server_with_a_certificate_serves_https(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    app = health_app(Health(), metrics)
    certificate = shared_server_certificate()
    async with (
        health_server("127.0.0.1", 0, app, BackgroundTasks(), certificate) as port,
        httpx.AsyncClient(verify=client_context()) as client,
    ):
        assert f"health at https://localhost:{port}" in caplog.text
        assert (await client.get(f"https://127.0.0.1:{port}/live")).status_code == 200


async def test_server_on_taken_port_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"--system-port {port} can't be opened on --system-host 127.0.0.1"
        ):
            await health_server(
                "127.0.0.1", port, health_app(Health(), metrics), BackgroundTasks()
            ).__aenter__()


@asynccontextmanager
async def served(
    monkeypatch: pytest.MonkeyPatch, render: Callable[[], bytes] = metrics, **limits: Any
) -> AsyncIterator[int]:
    """Yield the port of a server with other limits. No task of it may fail."""
    monkeypatch.setattr(health, "LIMITS", dataclasses.replace(health.LIMITS, **limits))
    tasks = BackgroundTasks()
    async with health_server("127.0.0.1", 0, health_app(Health(), render), tasks) as opened:
        assert opened is not None
        yield opened
    assert tasks.failure is None


async def test_server_full_of_idle_connections_admits_a_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with AsyncExitStack() as stack, asyncio.timeout(SOON_S):
        port = await stack.enter_async_context(served(monkeypatch, max_connections=8))
        idle = []
        for number in range(8):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(
                b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"[: None if number in (0, 5) else 20]
            )
            if number in (0, 5):
                assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            idle.append((reader, writer))
        # it is the one heard last now
        idle[0][1].write(b"\r\nGET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in await idle[0][0].readuntil(b'live"}HTTP/1.1 200 OK')
        async with httpx.AsyncClient() as client:
            for _ in range(3):  # each on a connection of its own
                assert (
                    await client.get(
                        f"http://127.0.0.1:{port}/live", headers={"Connection": "close"}
                    )
                ).is_success
        await idle[1][0].read()  # to its end
        assert not any(idle[number][0].at_eof() for number in (0, 5, 7))


@pytest.mark.parametrize("sent", [b"", b"GET /live HT", b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_server_closes_a_silent_connection(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        asyncio.timeout(SOON_S),
        served(monkeypatch, receive_timeout_s=0.1, keep_alive_timeout_s=0.1) as port,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        await reader.read()  # to its end
        writer.close()


async def test_server_closes_a_connection_that_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    large = b"# " + bytes(32 << 20)  # more than the sockets' buffers hold
    ended = asyncio.Event()

    class Observed(HttpConnection):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            ended.set()

    monkeypatch.setattr(server, "HttpConnection", Observed)
    async with (
        asyncio.timeout(SOON_S),
        served(monkeypatch, lambda: large, answer_timeout_s=0.1) as port,
    ):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        await ended.wait()
        writer.transport.abort()
