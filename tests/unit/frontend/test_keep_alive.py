"""Silent streams with --sse-keep-alive-s: headers and comments, and how errors and disconnects end
them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from dynamo_trtllm.frontend.messages_api.message_builder import PING
from dynamo_trtllm.frontend.requests.send_answer import COMMENT
from dynamo_trtllm.protocol import errors
from tests.kit.frontend_app import MODEL, FakeFrontend, chunk, front, stop
from tests.kit.memory_http import MemoryClient
from tests.kit.waiting import SOON_S

SILENCE_S = 0.02
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
DONE = b"data: [DONE]\n\n"


def send(served: FakeFrontend, path: str = CHAT, **fields: Any) -> MemoryClient:
    client = MemoryClient(served.app)
    asked = BODIES.get(path, BODIES[CHAT] | {"max_tokens": 9})
    body = json.dumps({"model": MODEL, "stream": True, **asked, **fields}).encode()
    client.send(
        b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
    )
    return client


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110  # a write has no event
            await asyncio.sleep(SILENCE_S / 10)


async def until_commented(client: MemoryClient, times: int = 2) -> None:
    before = client.received.count(COMMENT)
    await until(lambda: client.received.count(COMMENT) >= before + times)


@pytest.mark.parametrize("path", BODIES)
async def test_silence_sends_headers_and_comments(path: str) -> None:
    first = asyncio.Event()
    second = asyncio.Event()
    client = send(front(first, chunk("one"), second, stop("two"), sse_keep_alive_s=SILENCE_S), path)
    await until_commented(client)
    assert client.received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"data:" not in client.received
    first.set()
    await until(lambda: b"one" in client.received)
    await until_commented(client)
    assert b"two" not in client.received
    second.set()
    await client.until_answered()
    assert client.received.count(b"HTTP/1.1") == 1
    assert (
        client.received.index(COMMENT)
        < client.received.index(b"one")
        < client.received.rindex(COMMENT)
    )
    assert b"two" in client.received
    assert client.received.endswith(b"0\r\n\r\n")


async def test_silence_of_a_message_then_pings() -> None:
    waits = asyncio.Event()
    client = send(front(chunk("one"), waits, stop("two"), sse_keep_alive_s=SILENCE_S), MESSAGES)
    await until(lambda: client.received.count(PING) > 1)
    waits.set()
    await client.until_answered()
    assert COMMENT not in client.received
    assert b"message_stop" in client.received


async def test_silence_in_the_queue_then_headers_and_comments() -> None:
    running = asyncio.Event()
    served = front(running, stop("x"), sse_keep_alive_s=SILENCE_S, max_inflight=1)
    first = send(served)
    await served.router.begun.wait()
    second = send(served)
    await until_commented(second)
    running.set()
    await asyncio.gather(first.until_answered(), second.until_answered())
    assert DONE in second.received


async def test_queue_deadline_after_headers_is_an_error_event() -> None:
    running = asyncio.Event()
    served = front(running, stop("x"), sse_keep_alive_s=SILENCE_S, max_inflight=1)
    first = send(served)
    await served.router.begun.wait()
    second = send(served, timeout=5 * SILENCE_S)
    await second.until_answered()
    assert b'"code":"deadline"' in second.received
    assert DONE in second.received
    running.set()
    await first.until_answered()


async def test_stream_when_no_gap_is_silent_then_no_comment() -> None:
    client = send(front(chunk("one"), stop("two"), sse_keep_alive_s=SOON_S))
    await client.until_answered()
    assert DONE in client.received
    assert COMMENT not in client.received


@pytest.mark.parametrize(
    ("fields", "config"), [({}, {}), ({"stream": False}, {"sse_keep_alive_s": SILENCE_S})]
)
async def test_silence_when_off_or_not_streamed_then_nothing_is_sent(
    fields: dict[str, Any], config: dict[str, Any]
) -> None:
    running = asyncio.Event()
    client = send(front(running, stop("x"), **config), **fields)
    await asyncio.sleep(5 * SILENCE_S)
    assert client.received == b""
    running.set()
    await client.until_answered()
    assert COMMENT not in client.received


@pytest.mark.parametrize("path", BODIES)
async def test_error_before_the_silence_has_passed_then_its_own_status(path: str) -> None:
    client = send(front(errors.NoInstances("no decode worker"), sse_keep_alive_s=SOON_S), path)
    await client.until_answered()
    assert client.received.startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_error_after_the_headers_then_an_error_event(path: str) -> None:
    failing = asyncio.Event()
    served = front(failing, errors.NoInstances("no decode worker"), sse_keep_alive_s=SILENCE_S)
    client = send(served, path)
    await until_commented(client)
    failing.set()
    await client.until_answered()
    assert b'data: {"error":{"message":"no decode worker"' in client.received
    assert client.received.endswith(DONE + b"\r\n0\r\n\r\n")
    assert 'code="no_instances"' in served.metrics.render().decode()


async def test_response_error_after_headers_has_start_and_end() -> None:
    failing = asyncio.Event()
    client = send(
        front(failing, errors.NoInstances("gone"), sse_keep_alive_s=SILENCE_S), "/v1/responses"
    )
    await until_commented(client)
    failing.set()
    await client.until_answered()
    lines = client.received.decode().splitlines()
    events = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")
    ]
    names = [event["type"] for event in events]
    assert names == ["response.created", "response.in_progress", "error", "response.failed"]
    assert [event["sequence_number"] for event in events] == [0, 1, 2, 3]
    assert events[2]["code"] == "no_instances"


async def test_client_leaving_in_silence_cancels_the_request() -> None:
    served = front(asyncio.Event(), sse_keep_alive_s=SILENCE_S)
    client = send(served)
    await until_commented(client)
    client.leave()
    await client.until_answered()
    received = client.received
    await asyncio.sleep(5 * SILENCE_S)
    assert client.received == received
    assert served.router.running == 0
    assert 'code="cancelled"' in served.metrics.render().decode()


async def test_client_reading_nothing_gets_no_pile_of_comments() -> None:
    running = asyncio.Event()
    client = send(front(running, stop("x"), sse_keep_alive_s=SILENCE_S))
    await until_commented(client)
    client.connection.pause_writing()
    await asyncio.sleep(0)
    received = client.received
    await asyncio.sleep(5 * SILENCE_S)
    assert client.received == received
    client.connection.resume_writing()
    running.set()
    await client.until_answered()
    assert DONE in client.received


async def test_tokens_then_the_timer_is_not_set_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    armed = []
    call_later = loop.call_later

    def counted(
        delay: float, callback: Callable[..., object], *args: object, **named: Any
    ) -> asyncio.TimerHandle:
        if "KeepAlive" in callback.__qualname__:
            armed.append(delay)
        return call_later(delay, callback, *args, **named)

    monkeypatch.setattr(loop, "call_later", counted)
    client = send(front(*[chunk("x")] * 50, stop(), sse_keep_alive_s=SOON_S))
    await client.until_answered()
    assert len(armed) == 1


async def test_hidden_tokens_then_they_do_not_count_as_sent() -> None:
    """The client hides the reasoning, so tokens arrive and nothing is written."""
    first = asyncio.Event()
    second = asyncio.Event()
    served = front(first, chunk("why", ids=[1]), second, stop("x"), sse_keep_alive_s=SILENCE_S)
    client = send(served, include_reasoning=False)
    first.set()
    await until_commented(client, 3)
    assert b"why" not in client.received
    second.set()
    await client.until_answered()
