"""Two frontends that share their responses through a real JetStream, and one that loses it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.http.app import build_app
from dynamo_trtllm.frontend.responses_api.jetstream import JetStreamStore
from dynamo_trtllm.frontend.responses_api.key_value_store import StoreLimits
from dynamo_trtllm.protocol.errors import Unreachable
from tests.kit.frontend_app import CALL, MODEL, REASONING, FakeFrontend, chunk, front, stop
from tests.kit.memory_http import asgi
from tests.kit.servers import TestServer

LIMITS = StoreLimits(max_entries=100, max_bytes=64 << 20, max_value_bytes=1 << 20, ttl_s=60.0)
TOOL = {
    "type": "function",
    "name": "get_system_health",
    "parameters": {"type": "object", "properties": {}},
}


@dataclass(frozen=True, slots=True)
class Frontend:
    front: FakeFrontend
    client: httpx.AsyncClient
    store: JetStreamStore

    async def written(self) -> None:
        """All that was made is in the store, or is not going to be."""
        await self.front.built.response_store.aclose()

    async def made(self, **fields: Any) -> dict[str, Any]:
        response = await self.client.post(
            "/v1/responses", json={"model": MODEL, "input": "hi"} | fields
        )
        assert response.status_code == 200, response.text
        return dict(response.json())


async def opened(nats: str, namespace: str) -> Frontend:
    served = front(chunk("why", ids=[REASONING]), chunk("{}", ids=[CALL]), stop())
    store = await JetStreamStore.connect(nats, namespace, LIMITS)
    config = FrontendConfig(response_store="jetstream")
    served.built = build_app(config, served.catalog, served.router, served.metrics, store)
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(app=asgi(served.app)), base_url="http://frontend"
    )
    return Frontend(served, client, store)


@pytest.fixture
async def frontends(nats_server: str) -> AsyncIterator[tuple[Frontend, Frontend]]:
    namespace = f"n{secrets.token_hex(4)}"
    both = (await opened(nats_server, namespace), await opened(nats_server, namespace))
    yield both
    for frontend in both:
        await frontend.written()
        await frontend.client.aclose()
        await frontend.store.aclose()


async def test_conversation_continues_at_another_frontend(
    frontends: tuple[Frontend, Frontend],
) -> None:
    here, there = frontends
    first = await here.made(input="Is it up?", tools=[TOOL])
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
    second = await there.made(input=[result], previous_response_id=first["id"])
    shown = there.front.catalog.renderer.conversations[0].messages
    assert [message.role for message in shown] == ["user", "assistant", "tool"]
    assert (shown[1].reasoning, shown[1].tool_calls[0].id) == ("why", call["call_id"])
    for response in (first, second):
        path = f"/v1/responses/{response['id']}"
        for frontend in frontends:
            assert (await frontend.client.get(path)).json() == response
    listed = (await here.client.get(f"/v1/responses/{second['id']}/input_items?order=asc")).json()[
        "data"
    ]
    assert [item["type"] for item in listed] == [
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
    ]


async def test_deleted_at_another_frontend_then_gone_here(
    frontends: tuple[Frontend, Frontend],
) -> None:
    here, there = frontends
    path = f"/v1/responses/{(await here.made())['id']}"
    assert (await there.client.delete(path)).status_code == 200
    gone = await here.client.get(path)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "response_not_found")
    at_another = await there.client.get(path)
    assert "in progress at another frontend" in at_another.json()["error"]["message"]


async def test_unavailable_store_gives_retry_after_on_lookup(
    own_nats: Callable[[], TestServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = own_nats()
    here = await opened(server.address, "n")
    first = await here.made()
    await here.written()
    server.kill()
    response = await here.made()
    assert response["status"] == "completed"
    await here.written()
    assert f"{response['id']} was not stored" in caplog.text
    looked_up = await here.client.get(f"/v1/responses/{first['id']}")
    assert looked_up.status_code == 503
    assert looked_up.headers["retry-after"]
    going_on = await here.client.post(
        "/v1/responses", json={"model": MODEL, "input": "x", "previous_response_id": first["id"]}
    )
    assert going_on.status_code == 503
    await here.client.aclose()
    await here.store.aclose()


async def test_bucket_that_storage_has_no_space_for_says_what_to_do(nats_server: str) -> None:
    """The launcher's nats-server on a full disk says the same."""
    limits = replace(LIMITS, max_bytes=1 << 60)
    with pytest.raises(Unreachable, match=r"insufficient storage .* lower --response-store-bytes$"):
        await JetStreamStore.connect(nats_server, secrets.token_hex(4), limits)
