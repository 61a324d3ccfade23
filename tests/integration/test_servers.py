"""The local servers come up, are at one address after a restart, and die with their parent."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.launch import servers
from tests.servers import TestServer


def answers(address: str) -> bool:
    host, _, port = address.rpartition("/")[2].rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("kind", ["etcd", "nats"])
def test_server_when_started_and_restarted_then_same_address_answers(kind: str, request: pytest.FixtureRequest) -> None:
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
        "import sys, signal; from pathlib import Path; from dynamo_trtllm.launch import servers\n"
        f"s = servers.{start}(Path({str(tmp_path)!r})); sys.stdout.write(f'{{s.process.pid}}\\n'); sys.stdout.flush()\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        pidfd = os.pidfd_open(pid)
        parent.kill()
    ready, _, _ = select.select([pidfd], [], [], 5)
    os.close(pidfd)
    if not ready:
        os.kill(pid, signal.SIGKILL)
    assert ready, "the server outlived its parent"


def test_server_when_it_can_not_come_up_then_error_has_the_log(tmp_path: Path) -> None:
    (tmp_path / "etcd").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"end of .*etcd\.log"):
        servers.start_etcd(tmp_path)


def test_server_when_port_is_taken_then_error_names_it(tmp_path: Path, nats_server: str) -> None:
    port = int(nats_server.rpartition(":")[2])
    with pytest.raises(ConfigError, match=str(port)):
        servers.start_nats(tmp_path, port)
