"""`/v1/messages` of the demo model through real processes: a tool, streams, counted tokens."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.kit.cluster import TINY
from tests.kit.messages_client import COUNT, PATH, accumulated, parsed

pytestmark = pytest.mark.timeout(240)  # the first test also starts the cluster

QUESTION = {"role": "user", "content": "Hey, quick check: is everything up and running?"}
TOOL = {
    "name": "get_system_health",
    "description": (
        "Returns the current health status of the LLM runtime—use before critical operations"
        " to verify the service is live."
    ),
    "input_schema": {"type": "object", "properties": {}},
}
HEALTH = '{"status":"ok","uptime_seconds":372045}'
ASKED: dict[str, Any] = {
    "model": TINY,
    "max_tokens": 32_000,
    "temperature": 0,
    "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "low"},
}


def ask(client: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    response = client.post(path, json=ASKED | fields)
    assert response.status_code == 200, response.text
    return response


def test_round_with_a_tool_then_reasoning_call_and_result_go_on(tiny: httpx.Client) -> None:
    first = ask(tiny, PATH, messages=[QUESTION]).json()
    thought, call = first["content"]
    assert (thought["type"], call["name"], call["input"]) == ("thinking", "get_system_health", {})
    assert first["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": HEALTH}
    messages = [
        QUESTION,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    second = ask(tiny, PATH, messages=messages).json()
    assert [block["type"] for block in second["content"]] == ["thinking", "text"]
    assert "system" in second["content"][-1]["text"]
    assert second["stop_reason"] == "end_turn"
    counted = ask(tiny, COUNT, messages=messages).json()["input_tokens"]
    usage = second["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted


def test_stream_then_the_same_message_as_whole(tiny: httpx.Client) -> None:
    whole = ask(tiny, PATH, messages=[QUESTION])
    assert whole.headers["x-dynamo-ignored-fields"] == "tools.web_search_20250305"
    message = whole.json()
    streamed = accumulated(parsed(ask(tiny, PATH, messages=[QUESTION], stream=True).text))
    assert [block["type"] for block in streamed["content"]] == ["thinking", "tool_use"]
    for block in (*message["content"], *streamed["content"]):
        block.pop("id", None)
    assert streamed["content"] == message["content"]
    assert streamed["usage"]["output_tokens"] == message["usage"]["output_tokens"]
