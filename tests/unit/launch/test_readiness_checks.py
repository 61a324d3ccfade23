"""What counts as an answer that a process serves, of servers that answer as the test says."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from dynamo_trtllm.launch.readiness import (
    NotYet,
    ReadyAnswer,
    check_etcd,
    check_nats,
    check_ready,
    is_taken,
    poll,
)
from tests.kit.cases import each_case
from tests.kit.fake_children import HOST, answering, http
from tests.kit.waiting import SOON_S

LONG = "x" * 70_000
Ask = Callable[[str, int], Awaitable[None]]


async def test_ready_when_200_then_the_instance_is_known() -> None:
    body = '{"status": "serving", "reason": "", "instance_id": "ab", "more": 1}'
    with answering(http(200, body)) as port:
        assert await check_ready(HOST, port) == ReadyAnswer("serving", "", "ab")
        # where it listens, not where to ask
        assert await check_ready("0.0.0.0", port) == ReadyAnswer("serving", "", "ab")


async def test_ready_when_the_answer_is_chunked_then_it_is_read_whole() -> None:
    body = b'{"status": ', b'"ready"}'
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in body) + b"0\r\n\r\n"
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
    with answering(answer) as port:
        assert await check_ready(HOST, port) == ReadyAnswer("ready")


@each_case(
    ("answer", "why"),
    [
        (
            http(503, '{"status": "loading", "reason": "reading weights"}'),
            "^loading: reading weights$",
        ),
        (http(503, '{"status": "starting", "reason": ""}'), "^starting$"),
        (
            http(404, "{}"),
            (
                "the response to GET /ready at port .* can't be parsed: .*missing required field"
                " `status`"
            ),
        ),
        (http(200, "fine"), "can't be parsed"),
        (http(200, "[]"), "can't be parsed: Expected `object`"),
        (b"serving as instance ab\r\n\r\n", "can't be parsed: .*HTTP"),
        (f"HTTP/1.1 200 OK\r\n\r\n{LONG}".encode(), "is longer than 65536 bytes"),
    ],
)
async def test_ready_reports_reason_of_another_answer(answer: bytes, why: str) -> None:
    with answering(answer) as port:
        async with asyncio.timeout(SOON_S):
            with pytest.raises((NotYet, ConnectionError), match=why):
                await check_ready(HOST, port)


async def test_until_reports_last_reason_after_its_time() -> None:
    answers = [
        http(503, f'{{"status": "{status}", "reason": ""}}') for status in ("starting", "loading")
    ]
    with answering(*answers) as port, pytest.raises(NotYet, match=r"^loading$"):
        await poll(partial(check_ready, HOST, port), 2.0)


async def test_until_when_it_serves_later_then_its_answer_comes() -> None:
    not_yet = http(503, '{"status": "loading", "reason": ""}')
    now = http(200, '{"status": "ready"}')
    with answering(not_yet, not_yet, now) as port:
        assert await poll(partial(check_ready, HOST, port), SOON_S) == ReadyAnswer("ready")


async def test_until_when_nothing_listens_then_it_ends_in_time() -> None:
    with socket.socket() as held:
        # and not listening: connections are refused, and no other process gets the port
        held.bind((HOST, 0))
        async with asyncio.timeout(SOON_S):
            with pytest.raises(NotYet, match="Connect call failed"):
                await poll(partial(check_ready, HOST, held.getsockname()[1]), 1.0)


async def test_until_with_silent_server_ends_in_time() -> None:
    with answering(b"") as port:
        with pytest.raises(NotYet, match="no response"):
            await poll(partial(check_ready, HOST, port), 0.2)


async def test_until_asks_again_without_an_answer() -> None:
    with answering(b"", http(200, '{"status": "ready"}')) as port:
        answer = await poll(partial(check_ready, HOST, port), SOON_S, one_answer_s=0.1)
    assert answer == ReadyAnswer("ready")


@pytest.mark.parametrize(
    ("status", "body", "serves"),
    [
        (200, '{"health":"true","reason":""}', True),
        (200, '{"health":"false"}', False),
        (503, '{"health":"false","reason":"RAFT NO LEADER"}', False),
    ],
)
async def test_etcd_serves_only_when_healthy(status: int, body: str, serves: bool) -> None:
    await check(check_etcd, serves, http(status, body))


@pytest.mark.parametrize(
    ("greeting", "answer", "serves"),
    [
        (b"INFO {}\r\n", b"PONG\r\n", True),
        (b"INFO {}\r\n", b"-ERR 'Authorization Violation'\r\n", True),
        (b"INFO {}\r\n", b"-ERR 'maximum connections exceeded'\r\n", False),
        (b"HTTP/1.1 400 Bad Request\r\n", b"PONG\r\n", False),
    ],
)
async def test_nats_serves_when_it_answers_or_asks_for_a_user(
    greeting: bytes, answer: bytes, serves: bool
) -> None:
    await check(check_nats, serves, answer, greeting=greeting)


async def check(ask: Ask, serves: bool, answer: bytes, greeting: bytes = b"") -> None:
    with answering(answer, greeting=greeting) as port:
        async with asyncio.timeout(SOON_S):
            if serves:
                await ask(HOST, port)
            else:
                with pytest.raises(NotYet):
                    await ask(HOST, port)


async def test_is_taken_then_only_while_something_listens() -> None:
    with answering(b"") as port:
        assert await is_taken("0.0.0.0", port)
    assert not await is_taken(HOST, port)
