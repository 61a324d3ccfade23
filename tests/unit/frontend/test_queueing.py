"""Requests that wait in the queue, over HTTP with a scripted router: their order, clients that
leave, answers.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from dynamo_trtllm.frontend.requests import admission
from dynamo_trtllm.observability.metrics import PREFIX
from dynamo_trtllm.protocol.errors import NoInstances
from tests.kit.cases import each_case
from tests.kit.frontend_app import MODEL, FakeFrontend, chunk, front, stop
from tests.kit.memory_http import MemoryClient, asgi
from tests.kit.waiting import SOON_S

CHAT = "/v1/chat/completions"
PATHS = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}


async def post(
    served: FakeFrontend, path: str = CHAT, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    transport = httpx.ASGITransport(app=asgi(served.app))
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        return await client.post(
            path, json={"model": MODEL} | PATHS[path] | fields, headers=headers
        )


def gauge(served: FakeFrontend, name: str) -> float:
    lines = served.metrics.render().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{PREFIX}{name} "))


async def until(served: FakeFrontend, name: str, value: float) -> None:
    async with asyncio.timeout(SOON_S):
        while gauge(served, name) != value:  # noqa: ASYNC110  # a gauge has no event
            await asyncio.sleep(0)


def check_nothing_left(served: FakeFrontend) -> None:
    assert [gauge(served, name) for name in ("inflight", "choices", "queued")] == [0, 0, 0]
    assert served.router.running == 0


async def test_request_without_permit_waits_and_reports_the_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = asyncio.Event()
    served = front(chunk("a"), held, stop(), max_inflight=1, max_queued=1)
    with caplog.at_level("INFO"):
        first = asyncio.create_task(post(served))
        await served.router.begun.wait()
        second = asyncio.create_task(post(served, headers={"x-dynamo-stats": "1"}))
        await until(served, "queued", 1)
        assert (gauge(served, "choices"), len(served.router.requests)) == (1, 1)
        await asyncio.sleep(0.02)
        held.set()
        responses = [await first, await second]
    assert [response.status_code for response in responses] == [200, 200]
    stats = responses[1].json()["dynamo_trtllm"]
    assert stats["ttft_s"] >= stats["queued_s"] >= 0.02
    lines = [record.getMessage() for record in caplog.records if "queued=" in record.getMessage()]
    assert f"queued={stats['queued_s']:.4f}s" in lines[-1]
    assert gauge(served, "queue_seconds_count") == 2
    check_nothing_left(served)


async def test_request_with_full_queue_is_429_before_its_body() -> None:
    held = asyncio.Event()
    served = front(chunk("a"), held, stop(), max_inflight=1, max_queued=1)
    first = asyncio.create_task(post(served))
    await served.router.begun.wait()
    second = asyncio.create_task(post(served))
    await until(served, "queued", 1)
    client = MemoryClient(served.app)
    client.send(
        b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n" % CHAT.encode()
    )
    await client.until_answered()
    head, body = client.received.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429 ")
    assert b"Retry-After: 1" in head.split(b"\r\n")
    assert json.loads(body)["error"]["code"] == "overloaded"
    held.set()
    assert [(await first).status_code, (await second).status_code] == [200, 200]
    check_nothing_left(served)


@pytest.mark.parametrize("path", PATHS)
async def test_request_timeout_in_queue_is_504(path: str) -> None:
    held = asyncio.Event()
    served = front(chunk("a"), held, stop(), max_inflight=1, max_queued=1)
    first = asyncio.create_task(post(served))
    await served.router.begun.wait()
    response = await post(served, path, timeout=0.05)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline")
    assert len(served.router.requests) == 1
    assert gauge(served, "queued") == 0
    held.set()
    assert (await first).status_code == 200
    check_nothing_left(served)


async def test_client_leaving_the_queue_frees_its_place() -> None:
    served = front(chunk("a"), asyncio.Event(), max_inflight=1, max_queued=1)
    first = asyncio.create_task(post(served))
    await served.router.begun.wait()
    leaves = asyncio.Event()
    body = json.dumps({"model": MODEL} | PATHS[CHAT]).encode()
    parts = [{"type": "http.request", "body": body}]

    async def receive() -> Any:
        if parts:
            return parts.pop()
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        raise AssertionError("no client waits for an answer")

    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
        "root_path": "",
    }
    waiting = asyncio.create_task(asgi(served.app)(scope, receive, send))  # type: ignore[arg-type]
    await until(served, "queued", 1)
    leaves.set()
    await waiting
    assert gauge(served, "queued") == 0
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    check_nothing_left(served)


@each_case("path", PATHS)
@each_case(("timeout", "expected_s"), [(2, 2.0), (0.5, 0.5), (10_000, 60.0), (None, 60.0)])
async def test_timeout_when_sent_then_the_deadline_is_the_nearer_one(
    path: str, timeout: float | None, expected_s: float
) -> None:
    served = front(stop("a"), request_timeout_s=60.0)
    begun = time.time()
    assert (await post(served, path, timeout=timeout)).status_code == 200
    assert begun + expected_s <= served.router.requests[0].deadline <= time.time() + expected_s


@each_case("path", PATHS)
@each_case("timeout", [0, -1, "5", True])
async def test_timeout_when_it_is_none_then_400_by_name(path: str, timeout: Any) -> None:
    response = await post(front(stop("a")), path, timeout=timeout)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "timeout")


async def test_retry_after_follows_the_recent_rate() -> None:
    served = front(stop("a"), max_inflight=1, max_queued=0)
    await post(served)
    held = asyncio.Event()
    served.router.script = [held, stop("a")]
    served.router.begun.clear()
    first = asyncio.create_task(post(served))
    await asyncio.wait_for(served.router.begun.wait(), SOON_S)
    response = await post(served)
    assert response.status_code == 429
    assert 1 <= int(response.headers["retry-after"]) <= 2  # one ended within the first second
    held.set()
    await first


async def test_failed_requests_free_their_bodies_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "WORK_S", 1e-9)  # one request takes all the time of an iteration
    served = front()
    clients = [MemoryClient(served.app) for _ in range(20)]
    for client in clients:
        client.send(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 8\r\n\r\nno JSON!" % CHAT.encode()
        )
    await until(served, "inflight", len(clients) - 1)  # the first one has had its turn
    assert gauge(served, "body_bytes") == 0
    await asyncio.gather(*(client.until_answered() for client in clients))
    check_nothing_left(served)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fails", [False, True])
async def test_requests_ending_together_are_answered_in_parts(
    stream: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "WORK_S", 1e-9)  # one request takes all the time of an iteration
    held = asyncio.Event()
    served = front(held, NoInstances("none") if fails else stop("a"))
    body = json.dumps({"model": MODEL, "stream": stream} | PATHS[CHAT]).encode()
    clients = [MemoryClient(served.app) for _ in range(20)]
    for client in clients:
        client.send(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body)
        )
    async with asyncio.timeout(SOON_S):
        while served.router.running < len(clients):  # noqa: ASYNC110  # it has no event
            await asyncio.sleep(0)
    held.set()
    num_running = len(clients)
    most = 0
    async with asyncio.timeout(SOON_S):
        while num_running:
            await asyncio.sleep(0)
            before = num_running
            num_running = int(gauge(served, "inflight"))
            most = max(most, before - num_running)
    assert most == 1
    await asyncio.gather(*(client.until_answered() for client in clients))
    check_nothing_left(served)
