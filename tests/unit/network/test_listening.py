"""The frontend's port while many connect at once. On uvloop, whose way of accepting is what is at stake."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import ExitStack

import pytest
import uvloop

from dynamo_trtllm.network.listening import ACCEPTS_PER_TURN, Acceptor, listening
from tests.waiting import SOON_S

CLIENTS = 4 * ACCEPTS_PER_TURN
HOST = "127.0.0.1"


class Counted(asyncio.Protocol):
    made = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        type(self).made += 1
        transport.close()


async def turns_to_accept_all(sock: socket.socket) -> int:
    """How often the loop turns until every client that has connected before is accepted."""
    Counted.made = turns = 0
    acceptor = Acceptor(sock, Counted)
    while Counted.made < CLIENTS:
        await asyncio.sleep(0)
        turns += 1
        assert turns < 20 * CLIENTS
    acceptor.close()
    return turns


def test_acceptor_when_many_clients_wait_then_a_turn_accepts_several() -> None:
    with ExitStack() as stack, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sock = stack.enter_context(listening(HOST, 0))
        for _ in range(CLIENTS):
            stack.enter_context(socket.create_connection(sock.getsockname()))
        assert runner.run(turns_to_accept_all(sock)) < CLIENTS / 2


class NoDelay(asyncio.Protocol):
    value: asyncio.Future[int]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        sock = transport.get_extra_info("socket")
        self.value.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        transport.close()


def test_acceptor_when_a_client_is_accepted_then_small_writes_are_not_held_back() -> None:
    async def accept(sock: socket.socket) -> int:
        NoDelay.value = asyncio.get_running_loop().create_future()
        acceptor = Acceptor(sock, NoDelay)
        try:
            return await asyncio.wait_for(NoDelay.value, SOON_S)
        finally:
            acceptor.close()

    with listening(HOST, 0) as sock, socket.create_connection(sock.getsockname()):
        assert asyncio.run(accept(sock))


def test_acceptor_when_there_are_no_file_descriptors_then_it_accepts_once_there_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Short:
        """A socket whose first accepts fail as the system's do."""

        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock
            self.failures = 2

        def fileno(self) -> int:
            return self._sock.fileno()

        def setblocking(self, flag: bool) -> None:
            self._sock.setblocking(flag)

        def accept(self) -> tuple[socket.socket, object]:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return self._sock.accept()

    async def accept(short: Short) -> None:
        Counted.made = 0
        acceptor = Acceptor(short, Counted)  # type: ignore[arg-type]
        async with asyncio.timeout(SOON_S):
            while not Counted.made:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        acceptor.close()

    with listening(HOST, 0) as sock, socket.create_connection(sock.getsockname()):
        asyncio.run(accept(Short(sock)))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
