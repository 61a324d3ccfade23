"""More requests than fit, over real processes: which wait, which are rejected with Retry-After;
nothing is left.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.kit.cluster import PLAIN, START_TIMEOUT_S, Cluster, Process, gauges, until
from tests.kit.waiting import SOON_S

pytestmark = pytest.mark.timeout(180)

CHAT = "/v1/chat/completions"
FILES = 128
FRONTEND = ("--max-inflight", "8", "--max-queued", "8")


def asked(**fields: Any) -> dict[str, Any]:
    return {
        "model": "mock",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 100,
    } | fields


@pytest.fixture(scope="module")
def few_files(mock_cluster: Cluster) -> Iterator[Process]:
    """Start another frontend of the cluster, which may open few files."""
    frontend = f"ulimit -n {FILES}; exec {sys.executable} -m dynamo_trtllm.frontend --http-port 0"
    process = Process("frontend", [], mock_cluster.env, command=["sh", "-c", frontend])
    try:
        with mock_cluster.client(frontend=process) as client:
            until(lambda: client.get("/v1/models/mock/ready").status_code == 200, START_TIMEOUT_S)
        yield process
    finally:
        process.stop()


async def burst(cluster: Cluster, count: int, **fields: Any) -> list[httpx.Response]:
    """All at once, each over its own connection."""
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(
        base_url=cluster.frontend.url(), **PLAIN, limits=limits, timeout=START_TIMEOUT_S
    ) as client:
        headers = {"x-dynamo-stats": "1"}
        return await asyncio.gather(
            *(client.post(CHAT, json=asked(**fields), headers=headers) for _ in range(count))
        )


def check_empty(cluster: Cluster, *workers: Process) -> None:
    def empty() -> bool:
        front = gauges(cluster.frontend)
        held = [front["inflight"], front["choices"], front["queued"]]
        for worker in workers:
            now = gauges(worker)
            held += [
                now[name]
                for name in (
                    "active_calls",
                    "reserved",
                    "running",
                    "waiting",
                    "kv_blocks_used",
                    "pending_kv_transfers",
                )
            ]
        return not any(held)

    until(empty, SOON_S)


# tests/unit/frontend/test_queueing.py and test_concurrency_limiter.py cover it without processes, and
# a test of the demo model (test_full_frontend_rate_limits_and_retry_succeeds) with them
@pytest.mark.long
def test_burst_over_capacity_gets_retry_after(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(flags=FRONTEND)
    workers = [cluster.mock(role, "mock") for role in ("prefill", "decode")]
    cluster.until_ready("mock")
    responses = asyncio.run(burst(cluster, 80))
    answered = [response for response in responses if response.status_code == 200]
    refused = [response for response in responses if response.status_code == 429]
    assert len(answered) + len(refused) == 80
    assert len(answered) >= 16  # a place that became free meanwhile was taken
    assert refused
    assert {response.json()["error"]["code"] for response in refused} == {"overloaded"}
    assert all(1 <= int(response.headers["retry-after"]) <= 60 for response in refused)
    waits = sorted(response.json()["dynamo_trtllm"]["queued_s"] for response in answered)
    assert waits[0] < waits[-1]
    assert waits[-1] > 0.2  # an answer takes 0.5 s
    check_empty(cluster, *workers)


@pytest.mark.parametrize(
    "sent", [b"", b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["silent", "kept alive"]
)
def test_connections_of_one_client_do_not_block_others(
    mock_cluster: Cluster, few_files: Process, sent: bytes
) -> None:
    port = int(few_files.url().rpartition(":")[2])
    with ExitStack() as stack, mock_cluster.client(SOON_S, few_files) as client:
        for number in range(1, 2 * FILES + 1):
            attacker = socket.create_connection(("127.0.0.1", port), SOON_S, ("127.0.0.2", 0))
            stack.enter_context(attacker).sendall(sent)
            if number % FILES == 0:
                assert client.get("/live", headers={"Connection": "close"}).status_code == 200
                assert client.post(CHAT, json=asked(max_tokens=4)).status_code == 200


def test_timeout_during_decode_gives_504_and_frees_all(mock_cluster: Cluster) -> None:
    with mock_cluster.client() as client:
        response = client.post(CHAT, json=asked(max_tokens=1000, timeout=0.6))
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline")
        assert 0.5 < response.elapsed.total_seconds() < SOON_S  # all tokens take 5 s
        with client.stream(
            "POST", CHAT, json=asked(max_tokens=1000, timeout=0.6, stream=True)
        ) as stream:
            assert '"code":"deadline"' in "".join(stream.iter_lines())
    check_empty(mock_cluster, *mock_cluster.workers())
