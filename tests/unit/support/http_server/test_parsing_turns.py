"""Turns in which what clients send is parsed, and the limit on the chunks of a body."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from dynamo_trtllm.frontend.api.error_bodies import openai_error
from dynamo_trtllm.support.http_server.exchange import HttpRequest, HttpResponse
from dynamo_trtllm.support.http_server.parsing_turns import HANDLER_S, PARSING_S, ParsingTurns
from dynamo_trtllm.support.http_server.server import HttpServer
from tests.kit.memory_http import LIMITS, MemoryClient

CHUNKED = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


class TickingClock:
    """A clock that goes on by some seconds at each reading."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.tick_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


class WaitingConnection:
    """A connection that has several parts to parse. Each takes half of the time of an iteration."""

    def __init__(
        self, name: str, num_parts: int, turns: ParsingTurns, clock: TickingClock, log: list[str]
    ) -> None:
        self.network = name[0]
        self._name = name
        self._num_parts = num_parts
        self._turns = turns
        self._clock = clock
        self._log = log

    def take_turn(self) -> None:
        self._log.append(self._name)
        self._clock.now_s += PARSING_S / 2
        self._num_parts -= 1
        if self._num_parts:
            self._turns.wait(self, has_rest=True)  # type: ignore[arg-type]


async def test_turns_of_waiting_clients_alternate() -> None:
    clock = TickingClock()
    log = list[str]()
    turns = ParsingTurns(clock)
    for name, num_parts in (("a1", 3), ("a2", 3), ("a3", 1), ("b1", 1)):
        connection: Any = WaitingConnection(name, num_parts, turns, clock, log)
        turns.wait(connection, has_rest=num_parts > 1)
    for _ in range(4):
        log.append("|")
        await asyncio.sleep(0)
    assert " ".join(log) == "| a1 a3 | b1 a2 | a1 a2 | a1 a2"


class Answered:
    """A handler that records which bodies were received."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}

    async def __call__(self, request: HttpRequest, response: HttpResponse) -> None:
        body = b""
        while part := await request.receive():
            body += part
        self.bodies[request.path] = body
        response.send(200, b"")


async def test_slow_chunks_let_other_clients_be_served() -> None:
    handler = Answered()
    clock = TickingClock()
    server = HttpServer(handler, LIMITS, error_form=openai_error, shutdown_s=0.0)
    server.parsing_turns = ParsingTurns(clock)
    slow = MemoryClient(handler, ("192.0.2.1", 1), server)
    other = MemoryClient(handler, ("192.0.2.2", 1), server)
    clock.tick_s = PARSING_S
    slow.send(CHUNKED + b"10\r\n0123456789abcdef\r\n" * 1_000 + b"0\r\n\r\n")
    assert not slow.transport.is_reading
    other.send(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
    for _ in range(4):
        await asyncio.sleep(0)
    assert handler.bodies == {"/live": b""}
    for _ in range(40):
        await asyncio.sleep(0)
    assert handler.bodies["/x"] == b"0123456789abcdef" * 1_000
    assert slow.transport.is_reading


async def test_request_does_not_wait_for_bodies_of_many_clients() -> None:
    handler = Answered()
    clock = TickingClock()
    limits = replace(LIMITS, max_connections=101)
    server = HttpServer(handler, limits, error_form=openai_error, shutdown_s=0.0)
    server.parsing_turns = ParsingTurns(clock)
    senders = [MemoryClient(handler, (f"192.0.2.{at}", 1), server) for at in range(100)]
    for sender in senders:
        sender.send(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n\r\n")
        await asyncio.sleep(0)
    clock.tick_s = PARSING_S  # one turn in each iteration
    for sender in senders:
        sender.send(b"x" * 10_000)
    MemoryClient(handler, ("192.0.2.200", 1), server).send(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
    for _ in range(5):
        await asyncio.sleep(0)
    assert handler.bodies == {"/live": b""}
    clock.tick_s = 0.0
    for sender in senders:
        await sender.until_answered()


async def test_handlers_of_many_requests_begin_few_at_a_time() -> None:
    handler = Answered()
    server = HttpServer(
        handler, replace(LIMITS, max_connections=400), error_form=openai_error, shutdown_s=0.0
    )
    server.parsing_turns = ParsingTurns(TickingClock())
    clients = [MemoryClient(handler, server=server) for _ in range(400)]
    for client in clients:
        client.send(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
    most = 0
    for _ in range(60):
        num_answered = sum(client.received.count(b"HTTP/1.1 200") for client in clients)
        await asyncio.sleep(0)
        most = max(
            most, sum(client.received.count(b"HTTP/1.1 200") for client in clients) - num_answered
        )
    assert 0 < most <= PARSING_S / HANDLER_S + 1
    assert all(client.received.count(b"HTTP/1.1 200") == 2 for client in clients)


@pytest.mark.parametrize(
    "body",
    [
        b"1\r\n \r\n" * 9_000,
        b"4\r\n    \r\n" * 30_000,
        b"10;a=bbbbbbbbbbbbbbbbbbbb\r\n0123456789abcdef\r\n" * 3_000,
        b"1;" + b"x" * 40_000 + b"\r\n ",
        b"1\r\n \r\n0\r\n" + b"a: " + b"x" * 40_000,
    ],
)
async def test_chunks_larger_than_their_data_are_400(body: bytes) -> None:
    client = MemoryClient(Answered())
    client.send(CHUNKED + body)
    for _ in range(300):
        await asyncio.sleep(0)
    assert client.received.startswith(b"HTTP/1.1 400 ")
    assert (
        b"take more bytes than its body, and more than 16384 bytes; send larger chunks"
        in client.received
    )


@pytest.mark.parametrize(
    "body",
    [
        b"1\r\n \r\n" * 3_000 + b"0\r\n\r\n",
        b"8\r\n        \r\n" * 30_000 + b"0\r\n\r\n",
        b"1\r\n \r\n0\r\n" + b"a: b\r\n" * 90 + b"\r\n",
    ],
)
async def test_few_or_large_chunks_are_received(body: bytes) -> None:
    client = MemoryClient(Answered())
    client.send(CHUNKED + body)
    for _ in range(300):
        await asyncio.sleep(0)
    assert client.received.startswith(b"HTTP/1.1 200 ")
