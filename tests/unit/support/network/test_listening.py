"""A listening port while many connect at once.

On uvloop, whose way of accepting is what is at stake.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import pytest
import uvloop

from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.network.listening import (
    ACCEPTS_PER_TURN,
    Acceptor,
    allow_files,
    listen,
    warn_if_exposed,
)
from tests.kit.waiting import SOON_S

CLIENTS = 4 * ACCEPTS_PER_TURN
HOST = "127.0.0.1"


class Counted(asyncio.Protocol):
    made = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        type(self).made += 1
        transport.close()


def acceptor_of(
    sock: socket.socket,
    protocol: Callable[[], asyncio.Protocol],
    idle: int = 0,
    accepts_per_turn: int = ACCEPTS_PER_TURN,
) -> Acceptor:
    """`idle`: how often there is a connection to close when there are no file descriptors."""
    left = iter(range(idle))

    async def serve(connection: socket.socket) -> None:
        await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)

    return Acceptor(sock, serve, lambda: next(left, None) is not None, accepts_per_turn)


async def turns_to_accept_all(sock: socket.socket, accepts_per_turn: int) -> int:
    """How often the loop turns until every client that has connected before is accepted."""
    Counted.made = turns = 0
    acceptor = acceptor_of(sock, Counted, accepts_per_turn=accepts_per_turn)
    while Counted.made < CLIENTS:
        await asyncio.sleep(0)
        turns += 1
        assert turns < 20 * CLIENTS
    acceptor.close()
    return turns


@pytest.mark.parametrize("host", ["nope.invalid", "192.0.2.7", 70 * "a", "::zz"])
def test_listen_on_foreign_host_blames_the_host(host: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^--http-host {host} is not an address of this machine "
    ) as caught:
        listen(host, 0)
    assert caught.value.field == "http_host"


@pytest.mark.parametrize("accepts_per_turn", [ACCEPTS_PER_TURN, 1])
def test_acceptor_accepts_several_per_turn(accepts_per_turn: int) -> None:
    with ExitStack() as stack, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sock = stack.enter_context(listen(HOST, 0))
        for _ in range(CLIENTS):
            stack.enter_context(socket.create_connection(sock.getsockname()))
        turns = runner.run(turns_to_accept_all(sock, accepts_per_turn))
        assert (turns < CLIENTS / 2) == (accepts_per_turn > 1)


class NoDelay(asyncio.Protocol):
    value: asyncio.Future[int]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        sock = transport.get_extra_info("socket")
        self.value.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        transport.close()


def test_acceptor_sends_small_writes_at_once() -> None:
    async def accept(sock: socket.socket) -> int:
        NoDelay.value = asyncio.get_running_loop().create_future()
        acceptor = acceptor_of(sock, NoDelay)
        try:
            return await asyncio.wait_for(NoDelay.value, SOON_S)
        finally:
            acceptor.close()

    with listen(HOST, 0) as sock, socket.create_connection(sock.getsockname()):
        assert asyncio.run(accept(sock))


class Failing:
    """A socket whose first accepts fail as the system's do."""

    def __init__(self, sock: socket.socket, number: int, failures: int) -> None:
        self._sock = sock
        self._number = number
        self.failures = failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            self.failures -= 1
            raise OSError(self._number, os.strerror(self._number))
        return self._sock.accept()


@pytest.mark.parametrize("idle", [0, 30])
def test_acceptor_without_file_descriptors_logs_once(
    idle: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def accept(failing: Failing) -> None:
        Counted.made = 0
        acceptor = acceptor_of(cast("socket.socket", failing), Counted, idle)
        async with asyncio.timeout(SOON_S):
            while not Counted.made:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert acceptor.broken is None
        acceptor.close()

    with listen(HOST, 0) as sock, socket.create_connection(sock.getsockname()):
        asyncio.run(accept(Failing(sock, errno.EMFILE, failures=max(2, idle))))
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_acceptor_with_unusable_socket_gives_up(caplog: pytest.LogCaptureFixture) -> None:
    async def accept(sock: socket.socket) -> OSError | None:
        acceptor = acceptor_of(sock, Counted)
        sock.shutdown(socket.SHUT_RDWR)
        async with asyncio.timeout(SOON_S):
            while acceptor.broken is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        acceptor.close()
        return acceptor.broken

    with listen(HOST, 0) as sock:
        broken = asyncio.run(accept(sock))
    assert broken is not None
    assert broken.errno == errno.EINVAL
    assert "accepts no more connections" in caplog.text


@pytest.mark.parametrize(
    ("wanted", "hard", "files"),
    [(728, 4096, 728), (728, resource.RLIM_INFINITY, 728), (2128, 1000, 1000)],
)
def test_too_few_files_are_raised_or_warned_of(
    wanted: int,
    hard: int,
    files: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = []  # this process's own can't be lowered and raised again everywhere
    monkeypatch.setattr(resource, "getrlimit", lambda which: (512, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: limits.append((which, both)))
    allow_files(wanted, ", or do less")
    assert limits == [(resource.RLIMIT_NOFILE, (files, hard))]
    assert ("raise the limit to 2128 (ulimit -n), or do less" in caplog.text) == (files < wanted)


@pytest.mark.parametrize(
    ("host", "is_exposed"),
    [
        ("127.0.0.1", False),
        ("127.0.0.9", False),
        ("::1", False),
        ("localhost", False),
        ("0.0.0.0", True),
        ("::", True),
        ("", True),
        ("10.0.0.1", True),
        ("gpu-host", True),
    ],
)
def test_warn_if_exposed_warns_once(
    caplog: pytest.LogCaptureFixture, host: str, is_exposed: bool
) -> None:
    warn_if_exposed(host, 81, "use the API", "--http-host")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == is_exposed
    if is_exposed:
        assert "port 81" in said[0]
        assert "every client can use the API" in said[0]
        assert "--http-host 127.0.0.1" in said[0]
