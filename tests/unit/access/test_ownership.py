"""What clients store, run and name belongs to the API key that made it."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_trtllm.access.api_keys import ApiKey, digest_of
from dynamo_trtllm.access.keys_file import add_key, remove_key
from tests.kit.frontend_app import MODEL, FakeFrontend, chunk, front, stop
from tests.kit.memory_http import MemoryClient
from tests.unit.frontend.responses_client import ask, check_error

ALICE = "sk-key-of-alice"
BOB = "sk-key-of-bob"
INPUT = {"model": MODEL, "input": "hi"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.jsonl"
    add_key(path, ApiKey(name="alice", sha256=digest_of(ALICE).hex()))
    add_key(path, ApiKey(name="bob", sha256=digest_of(BOB).hex()))
    return path


async def send(
    served: FakeFrontend, key: str, method: str, path: str, **body: Any
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return await ask(served, method, f"/v1{path}", json=body or None, headers=headers)


async def test_stored_response_is_not_found_with_another_key(path: Path) -> None:
    served = front(chunk("a"), stop(), api_keys_file=path)
    made = (await send(served, ALICE, "POST", "/responses", **INPUT)).json()
    own = f"/responses/{made['id']}"
    item = {"type": "item_reference", "id": made["output"][0]["id"]}
    requests: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", own, {}),
        ("GET", f"{own}/input_items", {}),
        ("POST", f"{own}/cancel", {}),
        ("POST", "/responses", INPUT | {"previous_response_id": made["id"]}),
        ("POST", "/responses", INPUT | {"input": [item]}),
        ("POST", "/responses/input_tokens", INPUT | {"previous_response_id": made["id"]}),
        ("DELETE", own, {}),
    ]
    for method, place, body in requests:
        response = await send(served, BOB, method, place, **body)
        assert response.status_code == 404, (method, place)
        assert response.json()["error"]["code"] == "response_not_found"
    # The owner still has it.
    for method, place, body in requests:
        response = await send(served, ALICE, method, place, **body)
        assert response.status_code == 200, (method, place, response.text)


@pytest.mark.parametrize("is_stored", [True, False])
async def test_running_response_is_cancelled_by_its_key_only(path: Path, is_stored: bool) -> None:
    served = front(chunk("a"), asyncio.Event(), stop(), api_keys_file=path)
    client = MemoryClient(served.app)
    arrived = asyncio.Event()
    client.transport.on_write = lambda data: arrived.set() if b"delta" in data else None
    body = json.dumps(INPUT | {"store": is_stored, "stream": True}).encode()
    head = (
        "POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {ALICE}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    client.send(head.encode() + body)
    await arrived.wait()
    found = re.search(rb"resp_[0-9a-f]{40}", client.received)
    assert found is not None
    own = f"/responses/{found[0].decode()}"
    for method, place in (("POST", f"{own}/cancel"), ("GET", own), ("DELETE", own)):
        check_error(await send(served, BOB, method, place), 404, "response_not_found")
    assert served.router.running == 1
    response = await send(served, ALICE, "POST", f"{own}/cancel")
    assert response.json()["status"] == "cancelled"
    await client.until_answered()
    client.leave()


async def test_new_key_with_the_same_name_has_the_responses(path: Path) -> None:
    served = front(chunk("a"), stop(), api_keys_file=path)
    made = (await send(served, ALICE, "POST", "/responses", **INPUT)).json()
    remove_key(path, "alice")
    add_key(path, ApiKey(name="alice", sha256=digest_of("sk-new-key-of-alice").hex()))
    await served.built.access.reload()
    response = await send(served, "sk-new-key-of-alice", "GET", f"/responses/{made['id']}")
    assert response.status_code == 200


async def test_salts_and_conversations_of_keys_differ(path: Path) -> None:
    served = front(chunk("a"), stop(), api_keys_file=path)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    named = chat | {"cache_salt": "s", "conversation_params": {"conversation_id": "c"}}
    for key in (ALICE, BOB):
        for body in (chat, named):
            for _ in range(2):
                response = await send(served, key, "POST", "/chat/completions", **body)
                assert response.status_code == 200, response.text
    salts = [request.cache_salt for request in served.router.requests]
    assert all(salts)
    assert salts[::2] == salts[1::2]  # a client reuses its own prefixes
    assert len(set(salts)) == 4
    conversations = [request.conversation_id for request in served.router.requests]
    assert len(set(conversations) - {None}) == 2
    assert "c" not in conversations


async def test_without_keys_names_of_clients_are_passed_on() -> None:
    served = front(chunk("a"), stop())
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "cache_salt": "s"}
    headers = {"X-Session-ID": "c"}
    await ask(served, "POST", "/v1/chat/completions", json=chat, headers=headers)
    (request,) = served.router.requests
    assert (request.cache_salt, request.conversation_id) == ("s", "c")
