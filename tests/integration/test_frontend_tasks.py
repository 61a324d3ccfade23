"""A frontend's background tasks on real etcd and NATS, in this process: none dies unnoticed."""

from __future__ import annotations

import asyncio
import uuid

import httpx
import pytest

from dynamo_trtllm.protocol.errors import InternalError
from tests.kit.cluster import PLAIN
from tests.kit.waiting import SOON_S
from tests.kit.workers import RunningWorkers, config, start_frontend, start_pairs

BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 120,
    "stream": True,
}


async def end(name: str) -> None:
    """End the background task of this name, as soon as there is one."""
    while not (found := [task for task in asyncio.all_tasks() if task.get_name() == name]):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    found[0].cancel()


@pytest.mark.parametrize("name", ["discovery-watch", "pair-probes"])
async def test_dead_background_task_ends_the_frontend(
    etcd_server: str, nats_server: str, name: str
) -> None:
    serving, url = start_frontend(etcd_server, nats_server, f"t{uuid.uuid4().hex}")
    async with asyncio.timeout(2 * SOON_S), httpx.AsyncClient(**PLAIN) as client:
        while (await client.get(f"{url}/ready")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await end(name)
        await asyncio.sleep(0)
        answer = await client.get(f"{url}/ready")
        assert answer.status_code == 503
        assert f"background task {name} failed" in answer.json()["reason"]
        with pytest.raises(InternalError, match=f"background task {name} failed"):
            await serving


async def test_dead_background_task_lets_streams_finish(
    etcd_server: str, nats_server: str, running_workers: RunningWorkers
) -> None:
    chosen = config(etcd_server, nats_server, override_engine_args={"step_s": 0.02})
    start_pairs(chosen, running_workers)
    serving, url = start_frontend(etcd_server, nats_server, chosen.namespace)
    async with asyncio.timeout(4 * SOON_S), httpx.AsyncClient(timeout=None, **PLAIN) as client:
        while (await client.get(f"{url}/v1/models/tiny/ready")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        lines = []
        async with client.stream("POST", f"{url}/v1/chat/completions", json=BODY) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
                if len(lines) == 10:
                    await end("pairs")
        assert lines[-2:] == ["data: [DONE]", ""]
        assert sum('"content":' in line for line in lines) > 100
        with pytest.raises(InternalError, match="background task pairs failed"):
            await serving
