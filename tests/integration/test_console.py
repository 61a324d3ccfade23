"""The console of two frontends of one namespace: it shows the requests and workers of both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx
import orjson
import pytest

from dynamo_trtllm import Frontend, FrontendConfig, Role, Worker, WorkerConfig
from tests.kit.cluster import PLAIN
from tests.kit.waiting import SOON_S

MODEL = "tiny-gpt-oss"
BODY = {"model": MODEL, "prompt": "Hi", "max_tokens": 5, "ignore_eos": True}


@pytest.fixture
def cluster(nats_server: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the settings of a cluster whose messages a real NATS carries."""
    name = f"console-{abs(hash(request.node.name))}"
    return {"nats_server": nats_server, "etcd_endpoints": "memory://", "namespace": name}


def make_worker(role: Role, cluster: dict[str, Any]) -> Worker:
    return Worker(
        WorkerConfig(model_path=MODEL, engine="mock", disaggregation_mode=role, **cluster)
    )


def make_frontend(cluster: dict[str, Any]) -> Frontend:
    return Frontend(FrontendConfig(http_host="127.0.0.1", http_port=0, **cluster))


async def events(client: httpx.AsyncClient, url: str) -> AsyncIterator[tuple[str, Any]]:
    async with client.stream("GET", f"{url}/console/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        name = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, orjson.loads(line.removeprefix("data: "))


async def test_console_shows_requests_of_another_frontend(cluster: dict[str, Any]) -> None:
    own, other = make_frontend(cluster), make_frontend(cluster)
    workers = [make_worker(role, cluster) for role in (Role.PREFILL, Role.DECODE)]
    async with (
        workers[0],
        workers[1],
        own,
        other,
        httpx.AsyncClient(timeout=SOON_S, **PLAIN) as client,
    ):
        row: dict[str, Any] | None = None
        has_asked = False
        async with asyncio.timeout(3 * SOON_S), aclosing(events(client, own.url)) as stream:
            async for name, data in stream:
                if name == "hello":
                    roles = [worker["role"] for worker in data["snapshot"]["workers"]]
                    assert roles == ["prefill", "decode"]
                elif len(data["frontends"]) == 2 and not has_asked:
                    has_asked = True
                    answer = await client.post(f"{other.url}/v1/completions", json=BODY)
                    assert answer.status_code == 200
                elif has_asked and data["requests"]:
                    row = data["requests"][0]
                    break
        assert row is not None
        assert (row["code"], row["output_tokens"]) == ("ok", 5)
        timeline = await client.get(f"{own.url}/console/requests/{row['id']}")
        found = timeline.json()
    assert "finished" in found["outcome"]
    # The recording of this process has the events of its workers and frontends.
    texts = [event for _, _, event in found["rows"]]
    assert "received" in texts
    assert any(text.startswith("kv fetch started") for text in texts)


async def test_timeline_of_an_unknown_request_says_why(cluster: dict[str, Any]) -> None:
    async with (
        make_frontend(cluster) as frontend,
        httpx.AsyncClient(timeout=SOON_S, **PLAIN) as client,
    ):
        found = (await client.get(f"{frontend.url}/console/requests/0123456789abcdef")).json()
    assert found["rows"] == []
    assert found["notes"][0].startswith("No running process has recorded this request")


async def test_frontend_with_a_console_open_still_stops(cluster: dict[str, Any]) -> None:
    async with httpx.AsyncClient(timeout=SOON_S, **PLAIN) as client:
        async with make_frontend(cluster) as frontend:
            stream = events(client, frontend.url)
            name, _ = await anext(stream)
            assert name == "hello"
        async with asyncio.timeout(SOON_S):
            names = [name async for name, _ in stream]
    assert names[-1:] == ["shutdown"]
