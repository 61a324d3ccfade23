"""Connections to addresses and names, on uvloop as in workers."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest
import uvloop

from dynamo_trtllm.support.network.connecting import connect
from tests.kit.waiting import SOON_S

LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


def connected(
    host: str, family: socket.AddressFamily, find_port: Callable[[socket.socket], int]
) -> bytes:
    """Return what a server received over a connection of `connect`."""

    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        with (
            socket.create_server((LOOPBACK[family], 0), family=family) as server,
            socket.socket(family, socket.SOCK_STREAM) as sock,
        ):
            sock.setblocking(False)
            async with asyncio.timeout(SOON_S):
                await connect(sock, host, find_port(server))
                await loop.sock_sendall(sock, b"sent")
            accepted, _ = server.accept()
            with accepted:
                return accepted.recv(10)

    return uvloop.run(run())


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


def closed_port(server: socket.socket) -> int:
    with socket.create_server(
        (LOOPBACK[socket.AddressFamily(server.family)], 0), family=server.family
    ) as other:
        return port_of(other)


@pytest.mark.parametrize(
    ("host", "family"),
    [
        ("127.0.0.1", socket.AF_INET),
        ("localhost", socket.AF_INET),
        ("::1", socket.AF_INET6),
    ],
)
def test_connection_is_open_or_its_error_is_raised(host: str, family: socket.AddressFamily) -> None:
    assert connected(host, family, port_of) == b"sent"
    with pytest.raises(ConnectionRefusedError):
        connected(host, family, closed_port)


def test_connection_to_a_name_without_address_is_an_os_error() -> None:
    with pytest.raises(socket.gaierror):
        connected("no-such-host.invalid", socket.AF_INET, port_of)


def test_connection_to_an_address_starts_no_threads_for_names() -> None:
    # libuv joins these threads when a process exits, also in a forked process without them.
    program = """
import os, socket, sys, uvloop
from dynamo_trtllm.support.network.connecting import connect
async def run():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as sock:
        sock.setblocking(False)
        await connect(sock, *server.getsockname())
uvloop.run(run())
child = os.fork()
if not child:
    sys.exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=3 * SOON_S)
    assert done.returncode == 7
