"""What a frontend answers before it is loaded, and what waits."""

from __future__ import annotations

import asyncio

import httpx

from dynamo_trtllm.frontend.process.frontend import StartupGate
from dynamo_trtllm.support.http_server.exchange import HttpRequest, HttpResponse
from tests.kit.frontend_app import front
from tests.kit.memory_http import MemoryClient, asgi


async def loaded(request: HttpRequest, response: HttpResponse) -> None:
    response.send_json(200, {"path": request.path})


def client(gate: StartupGate) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=asgi(gate)), base_url="http://frontend"
    )


async def test_live_and_health_answer_before_loading() -> None:
    async with client(StartupGate()) as asking:
        live = await asking.get("/live", headers={"X-Request-Id": "mine"})
        health = await asking.get("/health")
    assert (live.status_code, live.json()) == (200, {"status": "live"})
    assert live.headers["x-request-id"] == "mine"
    assert health.status_code == 200
    assert health.json()["status"] == "loading"
    assert health.json()["instances"] == health.json()["rejected_records"] == []


async def test_ready_before_loading_is_503_with_reason() -> None:
    gate = StartupGate()
    async with client(gate) as asking:
        before = await asking.get("/ready")
        gate.open(front().app)
        after = await asking.get("/ready")
    assert (before.status_code, before.headers["retry-after"]) == (503, "1")
    assert before.json() == {"status": "loading", "reason": "this frontend is starting"}
    assert (after.status_code, after.json()) == (200, {"status": "ready", "reason": ""})


async def test_other_paths_wait_for_the_app() -> None:
    gate = StartupGate()
    async with client(gate) as asking, asyncio.timeout(10):
        waiting = asyncio.create_task(asking.get("/v1/models"))
        await asking.get("/live")  # has turned the loop
        assert not waiting.done()
        gate.open(loaded)
        assert (await waiting).json() == {"path": "/v1/models"}


async def test_live_when_the_door_is_open_then_the_app_answers() -> None:
    gate = StartupGate()
    gate.open(loaded)
    async with client(gate) as asking:
        assert (await asking.get("/live")).json() == {"path": "/live"}


async def test_waiting_request_when_the_start_fails_then_503() -> None:
    gate = StartupGate()
    async with client(gate) as asking, asyncio.timeout(10):
        waiting = asyncio.create_task(asking.get("/v1/models"))
        await asking.get("/live")
        gate.close()
        answer = await waiting
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "draining"


async def test_close_when_the_door_was_opened_then_the_app_answers_on() -> None:
    gate = StartupGate()
    gate.open(loaded)
    gate.close()
    async with client(gate) as asking:
        assert (await asking.get("/v1/models")).status_code == 200


async def test_waiting_request_of_gone_client_ends() -> None:
    waiting = MemoryClient(StartupGate())
    waiting.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    await asyncio.sleep(0)
    waiting.leave()
    async with asyncio.timeout(10):
        await waiting.until_answered()
    await asyncio.sleep(0)
    assert not waiting.server.tasks
