"""Sends requests to `/v1/messages` of an app, and reads its events as Anthropic's SDK does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx

from tests.kit.frontend_app import MODEL, FakeFrontend
from tests.kit.memory_http import asgi

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
TOOL = {"name": "get_system_health", "input_schema": {"type": "object", "properties": {}}}
HI = [{"role": "user", "content": "hi"}]
DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 50, "messages": HI} | fields


async def post(served: FakeFrontend, path: str = PATH, **fields: Any) -> httpx.Response:
    return await ask(served, "POST", path, json=body(**fields))


async def ask(served: FakeFrontend, method: str, path: str, **kwargs: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=asgi(served.app))
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        return await client.request(method, path, **kwargs)


async def made(served: FakeFrontend, **fields: Any) -> dict[str, Any]:
    response = await post(served, **fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def events(served: FakeFrontend, **fields: Any) -> list[dict[str, Any]]:
    response = await post(served, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    return parsed(response.text)


def parsed(text: str) -> list[dict[str, Any]]:
    """Parse the events of a stream, and check their names."""
    found = []
    for block in text.rstrip("\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def check_order(found: Sequence[dict[str, Any]]) -> None:
    """Check that the events of a message come in Anthropic's order."""
    kinds = [event["type"] for event in found]
    assert (kinds[0], *kinds[-2:]) == ("message_start", "message_delta", "message_stop")
    opened = 0
    is_open = False
    for event in found[1:-2]:
        begins = event["type"] == "content_block_start"
        assert is_open != begins
        opened += begins
        assert event["index"] == opened - 1
        is_open = event["type"] != "content_block_stop"
    assert not is_open


def accumulated(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a stream."""
    check_order(found)
    message: dict[str, Any] = found[0]["message"]
    arguments = ""
    for event in found[1:-2]:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
            arguments = ""
            continue
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            if block["type"] == "tool_use":
                block["input"] = json.loads(arguments)
        elif event["delta"]["type"] == "input_json_delta":
            arguments += event["delta"]["partial_json"]
        else:
            field = DELTAS[event["delta"]["type"]]
            block[field] += event["delta"][field]
    last = found[-2]
    extra = {name: value for name, value in last.items() if name not in ("type", "delta")}
    return message | last["delta"] | extra


def check_error(response: httpx.Response, status: int, kind: str, code: str) -> str:
    assert response.status_code == status, response.text
    found = response.json()
    assert set(found) == {"type", "error", "request_id"}
    assert found["type"] == "error"
    assert found["request_id"] == response.headers["request-id"]
    assert (found["error"]["type"], found["error"]["code"]) == (kind, code)
    return str(found["error"]["message"])
