"""The frontend's port while many connect at once. On uvloop, whose way of accepting is what is at stake."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

import pytest
import uvloop

from dynamo_trtllm.frontend.listening import ACCEPTS_PER_TURN, listening, repeated

CLIENTS = 4 * ACCEPTS_PER_TURN
HOST = "127.0.0.1"


class Counted(asyncio.Protocol):
    made = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        type(self).made += 1
        transport.close()


async def turns_to_accept_all(sockets: list[socket.socket]) -> int:
    """How often the loop turns until every client that has connected before is accepted."""
    Counted.made = turns = 0
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Counted, sock=sock) for sock in sockets]
    while Counted.made < CLIENTS:
        await asyncio.sleep(0)
        turns += 1
        assert turns < 20 * CLIENTS
    for server in servers:
        server.close()
        await server.wait_closed()
    return turns


def test_repeated_when_many_clients_wait_then_a_turn_accepts_several() -> None:
    with ExitStack() as stack, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sock = stack.enter_context(listening(HOST, 0))
        sockets = stack.enter_context(repeated(sock))
        for _ in range(CLIENTS):
            stack.enter_context(socket.create_connection(sock.getsockname()))
        assert runner.run(turns_to_accept_all(sockets)) < CLIENTS / 2


def test_repeated_when_left_then_connections_are_refused() -> None:
    with listening(HOST, 0) as sock:
        address = sock.getsockname()
        with repeated(sock) as sockets:
            assert len({each.fileno() for each in sockets}) == ACCEPTS_PER_TURN
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
