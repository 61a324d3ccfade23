"""`cached_tokens` of answers over prefill and decode workers: what the prefill worker's prefix
cache had.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from tests.kit.cluster import PLAIN
from tests.kit.waiting import SOON_S
from tests.kit.workers import RunningWorkers, config, start_frontend, start_pairs

CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Count the words of this line. " * 20}],
    "max_tokens": 6,
}
STREAMED = CHAT | {"stream": True, "stream_options": {"include_usage": True}}


async def usage(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[int, int]:
    """Return the tokens of the prompt, and those that were cached."""
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()["usage"]
    if path == "/v1/responses":
        return found["input_tokens"], found["input_tokens_details"]["cached_tokens"]
    return found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"]


async def check_caches(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> int:
    """Ask twice.

    The second time all full blocks are cached but for the last token. Return how many tokens that
    is.
    """
    prompt_tokens, first = await usage(client, path, body)
    again = await usage(client, path, body)
    most = (prompt_tokens - 1) // 32 * 32
    assert first < most
    assert again == (prompt_tokens, most)
    return most


async def test_cached_tokens_are_reported_by_each_api(
    etcd_server: str, nats_server: str, running_workers: RunningWorkers
) -> None:
    chosen = config(
        etcd_server, nats_server, override_engine_args={"step_s": 0, "enable_prefix_caching": True}
    )
    start_pairs(chosen, running_workers)
    serving, url = start_frontend(etcd_server, nats_server, chosen.namespace)
    async with (
        asyncio.timeout(4 * SOON_S),
        httpx.AsyncClient(base_url=url, timeout=None, **PLAIN) as client,
    ):
        while (await client.get("/v1/models/tiny/ready")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        cached = await check_caches(client, "/v1/chat/completions", CHAT)
        lines = (await client.post("/v1/chat/completions", json=STREAMED)).text.splitlines()
        events = [
            json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
        ]
        assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        for salt in ("one tenant", "another tenant"):
            assert (
                await check_caches(client, "/v1/chat/completions", CHAT | {"cache_salt": salt})
                == cached
            )
        await check_caches(
            client, "/v1/completions", {"model": "tiny", "prompt": [7] * 90, "max_tokens": 6}
        )
        text = {"model": "tiny", "input": "Say these words again. " * 20, "max_output_tokens": 6}
        await check_caches(client, "/v1/responses", text)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
