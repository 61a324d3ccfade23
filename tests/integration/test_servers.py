"""The local servers come up, are at one address after a restart, and die with their parent."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from dynamo_trtllm.launch import local_servers
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.network import addresses
from dynamo_trtllm.support.network.addresses import free_ports
from tests.kit.servers import TestServer
from tests.kit.waiting import SOON_S

Start = Callable[[Path], Awaitable[local_servers.LocalServer]]


def answers(address: str) -> bool:
    host, _, port = address.rpartition("/")[2].rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("kind", ["etcd", "nats"])
def test_restarted_server_has_the_same_address(kind: str, request: pytest.FixtureRequest) -> None:
    make: Callable[[], TestServer] = request.getfixturevalue(f"own_{kind}")
    server = make()
    assert answers(server.address)
    before = server.address
    server.stop()
    assert not answers(before)
    server.start()
    assert server._server.address == before
    assert answers(before)


@pytest.mark.parametrize("start", ["start_etcd", "start_nats"])
def test_server_when_parent_is_killed_then_it_dies(start: str, tmp_path: Path) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; from dynamo_trtllm.launch import local_servers\n"
        "async def main():\n"
        f"    server = await local_servers.{start}(Path({str(tmp_path)!r}))\n"
        "    sys.stdout.write(f'{server.pid}\\n'); sys.stdout.flush()\n"
        "    await server.ended()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        pidfd = os.pidfd_open(pid)
        parent.kill()
    ready, _, _ = select.select([pidfd], [], [], 5)
    os.close(pidfd)
    if not ready:
        os.kill(pid, signal.SIGKILL)
    assert ready, "the server outlived its parent"


async def test_server_when_it_can_not_come_up_then_error_has_the_log(tmp_path: Path) -> None:
    (tmp_path / "etcd").write_text("not a folder")
    with pytest.raises(
        ConfigError,
        match=r"(?s)etcd exited with status \d+; its last log lines:\n.*not a directory",
    ):
        await local_servers.start_etcd(tmp_path)


async def test_server_when_port_is_taken_at_restart_then_named(tmp_path: Path) -> None:
    server = await local_servers.start_nats(tmp_path)
    await server.stop()
    port = int(server.address.rpartition(":")[2])
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ConfigError, match=f"nats-server: port {port} is in use"),
    ):
        await server.restart()


async def test_servers_started_together_have_their_own_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = free_ports(4)
    # nats-server finds the second port of etcd taken
    choices = iter([first, first + 1, first + 2, first + 2])
    monkeypatch.setattr(addresses.random, "choice", lambda _: next(choices))
    async with asyncio.TaskGroup() as group:
        etcd = group.create_task(local_servers.start_etcd(tmp_path))
        nats = group.create_task(local_servers.start_nats(tmp_path))
    await asyncio.gather(etcd.result().stop(), nats.result().stop())
    assert etcd.result().address == f"127.0.0.1:{first}"
    assert nats.result().address == f"nats://127.0.0.1:{first + 2}"


SAYS_IT_IS_READY = """#!/bin/sh
echo 'ready to serve client requests. Server is ready'
sleep 600
true
"""


@pytest.fixture
def sleeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Takes the place of etcd and NATS: it claims in its log to be ready, and listens nowhere."""
    program = tmp_path / "sleeper"
    program.write_text(SAYS_IT_IS_READY)
    program.chmod(0o755)
    for name in ("etcd_binary", "nats_binary"):
        monkeypatch.setattr(local_servers, name, lambda: str(program))
    return program


@pytest.mark.parametrize("start", [local_servers.start_etcd, local_servers.start_nats])
async def test_server_that_only_logs_readiness_is_not_ready(
    start: Start, tmp_path: Path, sleeper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_servers, "READY_TIMEOUT_S", 0.5)
    with pytest.raises(
        ConfigError, match=r"sleeper was not ready within 0.5 s \(.*\); its last log lines:\nready"
    ):
        await start(tmp_path)
    assert not alive(sleeper)


@pytest.mark.parametrize("start", [local_servers.start_etcd, local_servers.start_nats])
async def test_server_start_cancelled_leaves_no_process(
    start: Start, tmp_path: Path, sleeper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_servers, "READY_TIMEOUT_S", 600.0)
    async with asyncio.timeout(SOON_S):
        starting = asyncio.create_task(start(tmp_path))
        while not alive(sleeper):  # noqa: ASYNC110  # the loop goes on while the server starts
            await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert not alive(sleeper)


async def test_frozen_server_stop_does_not_block_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_servers, "STOP_TIMEOUT_S", 0.5)
    server = await local_servers.start_nats(tmp_path)
    os.kill(server.pid, signal.SIGSTOP)
    turns = 0
    async with asyncio.timeout(SOON_S):
        stopping = asyncio.create_task(server.stop())
        while not stopping.done():
            await asyncio.sleep(0.01)
            turns += 1
        await stopping
    assert turns > 10
    assert await server.ended() == -signal.SIGKILL


def alive(program: Path) -> list[psutil.Process]:
    """Children of this process that run `program`."""
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and str(program) in child.cmdline()
    ]
