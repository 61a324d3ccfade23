"""Sends requests to `/v1/responses` of an app, and checks responses against the SDK's types."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pydantic
from openai.types.responses import ResponseStreamEvent
from openai.types.responses.response_item import ResponseItem

from tests.kit.frontend_app import MODEL, FakeFrontend
from tests.kit.memory_http import asgi

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "get_system_health",
    "parameters": {"type": "object", "properties": {}},
}
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
ITEM: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseItem)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi"} | fields


async def ask(served: FakeFrontend, method: str, path: str, **kwargs: Any) -> httpx.Response:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=asgi(served.app)), base_url="http://frontend"
    ) as client:
        return await client.request(method, path, **kwargs)


async def made(served: FakeFrontend, **fields: Any) -> dict[str, Any]:
    response = await ask(served, "POST", PATH, json=body(**fields))
    assert response.status_code == 200, response.text
    return dict(response.json())


async def events(served: FakeFrontend, **fields: Any) -> list[dict[str, Any]]:
    response = await ask(served, "POST", PATH, json=body(stream=True, **fields))
    assert response.headers["content-type"].startswith("text/event-stream")
    return parsed(response.text)


def parsed(text: str) -> list[dict[str, Any]]:
    """Parse the events of a stream, and check their names and sequence numbers."""
    found = []
    for block in text.rstrip("\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def check_error(response: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    return str(error["message"])


def check_unknown(value: Any) -> None:
    """Check that the SDK's types have all fields except `store`, which the API has, and
    `dynamo_trtllm`.
    """
    if isinstance(value, pydantic.BaseModel):
        assert set(value.model_extra or ()) <= {"store", "dynamo_trtllm"}
        for name in type(value).model_fields:
            check_unknown(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            check_unknown(item)
