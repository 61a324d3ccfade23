"""`/v1/responses`: what is kept, looked up, deleted and cancelled."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.http.app import build_app
from dynamo_trtllm.frontend.responses_api.key_value_store import MemoryStore
from dynamo_trtllm.frontend.responses_api.response_store import store_limits
from dynamo_trtllm.protocol.errors import Disconnected
from tests.kit.frontend_app import (
    CALL,
    CONTENT,
    REASONING,
    FakeFrontend,
    chunk,
    front,
    stop,
)
from tests.kit.memory_http import asgi
from tests.kit.waiting import SOON_S
from tests.unit.frontend.responses_client import (
    EVENT,
    ITEM,
    PATH,
    TOOL,
    ask,
    body,
    check_error,
    check_unknown,
    events,
    made,
    parsed,
)


async def test_kept_response_then_got_listed_and_deleted() -> None:
    served = front(stop("Hello"))
    response = await made(
        served, input=[{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    )
    path = f"{PATH}/{response['id']}"
    assert (await ask(served, "GET", path)).json() == response
    listed = (await ask(served, "GET", f"{path}/input_items")).json()
    assert [item["content"][0]["text"] for item in listed["data"]] == ["two", "one"]
    assert (listed["first_id"], listed["has_more"]) == (listed["data"][0]["id"], False)
    for item in listed["data"]:
        check_unknown(ITEM.validate_json(json.dumps(item), strict=True))
    assert (await ask(served, "DELETE", path)).json() == {
        "id": response["id"],
        "object": "response",
        "deleted": True,
    }
    check_error(await ask(served, "GET", path), 404, "response_not_found")
    check_error(await ask(served, "DELETE", path), 404, "response_not_found")
    check_error(await ask(served, "GET", f"{path}/input_items"), 404, "response_not_found")


async def test_input_items_then_paged_as_asked() -> None:
    served = front(stop("Hello"))
    response = await made(
        served, input=[{"role": "user", "content": str(number)} for number in range(5)]
    )
    path = f"{PATH}/{response['id']}/input_items"
    first = (await ask(served, "GET", f"{path}?order=asc&limit=2")).json()
    assert [item["content"][0]["text"] for item in first["data"]] == ["0", "1"]
    assert first["has_more"]
    rest = (await ask(served, "GET", f"{path}?order=asc&after={first['last_id']}")).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "3", "4"]
    assert not rest["has_more"]
    huge = "limit=" + "1" * 5000  # more digits than Python reads
    for query, field in (
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        (huge, "limit"),
        ("order=up", "order"),
    ):
        check_error(await ask(served, "GET", f"{path}?{query}"), 400, "invalid_request", field)
    check_error(
        await ask(served, "GET", f"{path}?after=unknown"), 404, "response_not_found", "after"
    )
    check_error(
        await ask(served, "GET", f"{path}?before=x"), 400, "unsupported_parameter", "before"
    )


async def test_pages_of_items_with_equal_ids_have_an_end() -> None:
    """A client may send items again that the previous response has already."""
    served = front(chunk("why", ids=[REASONING]), chunk("so", ids=[CONTENT]), stop())
    first = await made(served)
    again = [*first["output"], {"role": "user", "content": "and?"}]
    response = await made(served, input=again, previous_response_id=first["id"])
    path = f"{PATH}/{response['id']}/input_items?limit=2"
    listed: list[dict[str, Any]] = []
    page = (await ask(served, "GET", path)).json()
    for _ in range(4):
        listed += page["data"]
        if not page["has_more"]:
            break
        page = (await ask(served, "GET", f"{path}&after={page['last_id']}")).json()
    assert not page["has_more"]
    kinds = ["message", "message", "reasoning", "message", "reasoning", "message"]
    assert [item["type"] for item in listed] == kinds
    assert len({item["id"] for item in listed}) == len(listed)
    # The ids of the first response stay those of its items.
    assert [item["id"] for item in listed[3:5]] == [item["id"] for item in first["output"]][::-1]


async def test_every_kind_of_item_then_listed_as_the_sdk_has_it() -> None:
    served = front(
        chunk("why", ids=[REASONING]), chunk("so", ids=[CONTENT]), chunk("{}", ids=[CALL]), stop()
    )
    first = await made(served, tools=[TOOL])
    result = {
        "type": "function_call_output",
        "call_id": first["output"][-1]["call_id"],
        "output": "ok",
    }
    second = await made(served, input=[result], previous_response_id=first["id"])
    listed = (await ask(served, "GET", f"{PATH}/{second['id']}/input_items?order=asc")).json()[
        "data"
    ]
    kinds = ["message", "reasoning", "message", "function_call", "function_call_output"]
    assert [item["type"] for item in listed] == kinds
    for item in listed:
        check_unknown(ITEM.validate_json(json.dumps(item), strict=True))
    assert len({item["id"] for item in listed}) == len(listed)


async def test_store_false_then_nothing_is_kept() -> None:
    served = front(stop("x"))
    response = await made(served, store=False)
    message = check_error(
        await ask(served, "GET", f"{PATH}/{response['id']}"), 404, "response_not_found"
    )
    assert "store=false" in message


@pytest.mark.parametrize(
    ("response_id", "words"),
    [
        ("resp_" + "0" * 40, "--response-store jetstream"),
        ("resp_1", "not a response id"),
        ("x", "not a response id"),
    ],
)
async def test_id_of_another_frontend_then_says_what_to_do(response_id: str, words: str) -> None:
    served = front(stop("x"))
    assert words in check_error(
        await ask(served, "GET", f"{PATH}/{response_id}"), 404, "response_not_found"
    )
    response = await ask(served, "POST", PATH, json=body(previous_response_id=response_id))
    assert words in check_error(response, 404, "response_not_found", "previous_response_id")


async def test_store_when_it_is_full_then_the_oldest_goes() -> None:
    served = front(stop("x"), response_store_entries=2)
    ids = [(await made(served))["id"] for _ in range(3)]
    statuses = [
        (await ask(served, "GET", f"{PATH}/{response_id}")).status_code for response_id in ids
    ]
    assert statuses == [404, 200, 200]


@pytest.mark.parametrize(
    "limits", [{"response_store_bytes": 64}, {"response_store_entry_bytes": 64}]
)
async def test_store_reports_a_response_too_large_to_store(limits: dict[str, int]) -> None:
    served = front(stop("x"), **limits)
    response = await made(served)
    assert (response["status"], response["store"]) == ("completed", False)
    assert (await ask(served, "GET", f"{PATH}/{response['id']}")).status_code == 404


async def test_store_rejects_too_long_conversation() -> None:
    served = front(stop("x"), response_store_entry_bytes=50)
    long = body(input="h" * 30, instructions="i" * 30)
    assert "set store" in check_error(
        await ask(served, "POST", PATH, json=long), 400, "invalid_request", "store"
    )
    assert (await ask(served, "POST", PATH, json=long | {"store": False})).status_code == 200


async def test_full_store_protects_other_clients() -> None:
    served = front(stop("x"), response_store_entries=3)
    first = await made(served)
    for _ in range(5):
        transport = httpx.ASGITransport(app=asgi(served.app), client=("192.0.2.7", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
            assert (await client.post(PATH, json=body())).status_code == 200
    assert (await ask(served, "GET", f"{PATH}/{first['id']}")).status_code == 200


@pytest.mark.parametrize("query", ["stream=true", "starting_after=3", "include=everything"])
async def test_retrieve_with_unsupported_field_is_rejected(query: str) -> None:
    served = front(stop("x"))
    response = await made(served)
    refused = await ask(served, "GET", f"{PATH}/{response['id']}?{query}")
    check_error(refused, 400, "unsupported_parameter", query.partition("=")[0])


async def test_retrieve_accepts_what_a_request_may_include() -> None:
    served = front(stop("x"))
    response = await made(served)
    for value in ("reasoning.encrypted_content", "web_search_call.action.sources"):
        found = await ask(served, "GET", f"{PATH}/{response['id']}?include={value}")
        assert found.json()["id"] == response["id"]


class Reader:
    """A client of a stream that says when text arrives."""

    def __init__(self, served: FakeFrontend, request: dict[str, Any]) -> None:
        self.text = ""
        self.arrived = asyncio.Event()
        self._served = served
        self._request = json.dumps(request).encode()
        self._sent = False

    async def run(self) -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": PATH,
            "headers": [(b"content-type", b"application/json")],
            "query_string": b"",
            "raw_path": b"",
        }
        await asgi(self._served.app)(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self._sent:
            await asyncio.Event().wait()
        self._sent = True
        return {"type": "http.request", "body": self._request, "more_body": False}

    async def _send(self, message: Any) -> None:
        self.text += message.get("body", b"").decode()
        if "delta" in self.text:
            self.arrived.set()


async def test_running_stream_then_seen_and_cancelled() -> None:
    served = front(chunk("Hel"), asyncio.Event(), stop("lo"))
    reader = Reader(served, body(stream=True))
    task = asyncio.create_task(reader.run())
    await reader.arrived.wait()
    response_id = parsed(reader.text)[0]["response"]["id"]
    path = f"{PATH}/{response_id}"
    running = (await ask(served, "GET", path)).json()
    assert (running["status"], running["output"][0]["content"][0]["text"]) == ("in_progress", "Hel")
    listed = (await ask(served, "GET", f"{path}/input_items")).json()
    assert listed["data"][0]["content"][0]["text"] == "hi"
    check_error(await ask(served, "DELETE", path), 400, "invalid_request")
    cancelled = (await ask(served, "POST", f"{path}/cancel")).json()
    await task
    Response.model_validate_json(json.dumps(cancelled), strict=True)
    assert cancelled["status"] == "cancelled"
    assert served.router.running == 0
    *_, done, last = parsed(reader.text)
    assert done["item"]["status"] == "incomplete"
    assert (last["type"], last["response"]) == ("response.incomplete", cancelled)
    EVENT.validate_json(json.dumps(last), strict=True)
    assert (await ask(served, "GET", path)).json() == cancelled
    assert (await ask(served, "POST", f"{path}/cancel")).json() == cancelled


async def test_cancel_of_unstored_response_forgets_it() -> None:
    served = front(chunk("Hel"), asyncio.Event(), stop("lo"))
    reader = Reader(served, body(stream=True, store=False))
    task = asyncio.create_task(reader.run())
    await reader.arrived.wait()
    path = f"{PATH}/{parsed(reader.text)[0]['response']['id']}"
    assert (await ask(served, "GET", path)).status_code == 404
    assert (await ask(served, "POST", f"{path}/cancel")).json()["status"] == "cancelled"
    await task
    assert served.router.running == 0
    assert (await ask(served, "GET", path)).status_code == 404


async def test_cancel_when_it_has_ended_then_the_response_as_it_is() -> None:
    served = front(stop("x"))
    response = await made(served)
    assert (await ask(served, "POST", f"{PATH}/{response['id']}/cancel")).json() == response
    check_error(await ask(served, "POST", f"{PATH}/resp_1/cancel"), 404, "response_not_found")


async def test_stream_of_gone_client_is_forgotten() -> None:
    served = front(chunk("Hel"), asyncio.Event(), stop("lo"))
    reader = Reader(served, body(stream=True))
    task = asyncio.create_task(reader.run())
    await reader.arrived.wait()
    path = f"{PATH}/{parsed(reader.text)[0]['response']['id']}"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert served.router.running == 0
    check_error(await ask(served, "GET", path), 404, "response_not_found")


class SlowStore(MemoryStore):
    """A store that writes nothing until `go`, and then fails with `error` if there is one."""

    def __init__(self) -> None:
        super().__init__(store_limits(FrontendConfig()))
        self.go = asyncio.Event()
        self.error: Exception | None = None
        self.puts = self.gets = 0
        self.owners: list[str] = []

    async def get(self, key: str) -> bytes | None:
        self.gets += 1
        return await super().get(key)

    async def put(self, key: str, value: bytes, owner: str = "") -> None:
        self.puts += 1
        self.owners.append(owner)
        await self.go.wait()
        if self.error is not None:
            raise self.error
        await super().put(key, value, owner)


def over(store: SlowStore, **config: Any) -> FakeFrontend:
    served = front(chunk("Hel"), stop("lo"))
    served.built = build_app(
        FrontendConfig.model_validate(config),
        served.catalog,
        served.router,
        served.metrics,
        store,
    )
    return served


async def test_stream_ends_and_is_found_despite_slow_store() -> None:
    store = SlowStore()
    served = over(store)
    final = (await events(served))[-1]["response"]
    path = f"{PATH}/{final['id']}"
    assert (final["status"], store.puts, store.used_bytes) == ("completed", 1, 0)
    assert (await ask(served, "GET", path)).json() == final
    following = await made(served, previous_response_id=final["id"])
    deleting = asyncio.create_task(ask(served, "DELETE", path))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not deleting.done()
    store.go.set()
    assert (await deleting).status_code == 200  # after the write, which would bring it back
    check_error(await ask(served, "GET", path), 404, "response_not_found")
    await served.built.response_store.aclose()
    assert (await ask(served, "GET", f"{PATH}/{following['id']}")).json() == following


async def test_responses_of_one_network_share_a_quota() -> None:
    store = SlowStore()
    store.go.set()
    served = over(store)
    for address in ("2001:db8::1", "2001:db8::2:3", "2001:db8:0:1::1"):
        transport = httpx.ASGITransport(app=asgi(served.app), client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
            assert (await client.post(PATH, json=body())).status_code == 200
    await served.built.response_store.aclose()
    assert store.owners == ["2001:db8::/64", "2001:db8::/64", "2001:db8:0:1::/64"]


@pytest.mark.parametrize(
    ("error", "code"),
    [(Disconnected("away"), "disconnected"), (RuntimeError("a fault of ours"), "internal")],
)
async def test_response_with_failed_write_is_logged_and_gone(
    caplog: pytest.LogCaptureFixture, error: Exception, code: str
) -> None:
    store = SlowStore()
    store.error = error
    served = over(store)
    response = await made(served)
    path = f"{PATH}/{response['id']}"
    assert (await ask(served, "GET", path)).status_code == 200
    store.go.set()
    await served.built.response_store.aclose()
    check_error(await ask(served, "GET", path), 404, "response_not_found")
    assert f"{response['id']} was not stored ({code})" in caplog.text
    assert f'responses_not_stored_total{{code="{code}"}} 1.0' in served.metrics.render().decode()


async def test_store_with_endless_write_closes_in_time() -> None:
    served = over(SlowStore())
    served.built.response_store.close_s = 0.01
    await made(served)
    await served.built.response_store.aclose()
    assert 'responses_not_stored_total{code="deadline"} 1.0' in served.metrics.render().decode()


async def test_answer_waits_for_its_own_write() -> None:
    store = SlowStore()
    served = over(store)
    served.built.response_store.max_pending_bytes = 1
    making = asyncio.create_task(made(served))
    while not store.puts:  # noqa: ASYNC110  # a store has no event for it
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not making.done()
    store.go.set()
    assert (await making)["status"] == "completed"


async def test_response_written_by_another_frontend_is_found() -> None:
    store = SlowStore()
    here = over(store, response_store="jetstream")
    there = over(store, response_store="jetstream")
    response = await made(here)
    looking = asyncio.create_task(ask(there, "GET", f"{PATH}/{response['id']}"))
    while not store.gets:  # noqa: ASYNC110  # a store has no event for it
        await asyncio.sleep(0)
    store.go.set()
    assert (await looking).json() == response
    assert store.gets > 1


async def test_long_body_is_planned_while_another_store_hangs() -> None:
    class HangingStore(SlowStore):
        async def get(self, key: str) -> bytes | None:
            self.gets += 1
            await self.go.wait()
            return None

    store = HangingStore()
    served = over(store)
    # so that long bodies take turns on the event loop
    served.catalog.renderer.inline_bytes = 1 << 20
    long = "word " * 5000
    other = {"input": long, "previous_response_id": "resp_" + "0" * 40}
    waiting = asyncio.create_task(ask(served, "POST", PATH, json=body(**other)))
    while not store.gets:  # noqa: ASYNC110  # a store has no event for it
        await asyncio.sleep(0)
    planned = await asyncio.wait_for(ask(served, "POST", PATH, json=body(input=long)), SOON_S)
    check_error(planned, 400, "context_length_exceeded", "input")
    assert not waiting.done()
    store.go.set()
    check_error(await waiting, 404, "response_not_found", "previous_response_id")
