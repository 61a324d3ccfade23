"""Listening sockets: binding them, accepting connections, and raising the limit of open files for these."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import math
import resource
import socket
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from dynamo_trtllm.errors import ConfigError

_log = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
_ANY_PORT = 4222  # for a URL without one; nothing is sent to it


def address_towards(urls: Iterable[str]) -> str:
    """Return this host's address on the way to the first of `urls` that leads to another interface than loopback.

    Return 127.0.0.1 when none does. Block while names are resolved; send nothing to the URLs.
    """
    for url in urls:
        parts = urlsplit(url.strip() if "//" in url else f"//{url.strip()}")
        try:
            target = socket.getaddrinfo(parts.hostname, parts.port or _ANY_PORT, type=socket.SOCK_DGRAM)[0]
            with socket.socket(target[0], socket.SOCK_DGRAM) as probe:
                probe.connect(target[4])  # chooses a route
                address = ipaddress.ip_address(probe.getsockname()[0])
        except (OSError, ValueError) as exc:
            _log.warning("can't find the address of this host towards %s: %s", parts.hostname, exc)
            continue
        if not address.is_loopback and not (address.version == 6 and address.is_link_local):
            return str(address)
    return LOOPBACK


def resolve_host(host: str) -> str:
    """Return the first IP address of an address or host name. Raise ConfigError when there is none. May block."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as exc:
        raise ConfigError(f"host name {host!r} can't be resolved ({exc.strerror}); give an IP address") from exc


def is_wildcard(host: str) -> bool:
    """Return whether `host` means every interface, or several hosts: others can't connect to it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in ("", "*")
    return address.is_unspecified or address.is_multicast


BACKLOG = 2048  # connections that wait to be accepted
ACCEPTS_PER_TURN = 64  # a new request of a frontend takes 1 to 2 ms of work
_PAUSE_S = 0.1  # after the system refused a connection
_RELIEVED_S = 0.001  # the same, while idle connections are being closed to free resources
_LOG_EVERY_S = 10.0
_UNUSABLE = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})  # the listening socket itself is unusable

Relieve: TypeAlias = Callable[[], bool]


def bind(host: str, port: int, *, is_shared: bool = False, setting: str = "http") -> socket.socket:
    """Return a bound socket that does not listen yet, so it gets no connections.

    `is_shared`: other processes may bind and listen too, if all of them set it. `setting`: the flags are
    --{setting}-host and --{setting}-port. Raises ConfigError.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if is_shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError as exc:
        sock.close()
        raise _taken(host, port, setting, exc) from exc
    return sock


def listen(host: str, port: int, *, is_shared: bool = False, setting: str = "http") -> socket.socket:
    """Return a listening socket, otherwise as `bind`; clients that connect wait to be served."""
    sock = bind(host, port, is_shared=is_shared, setting=setting)
    try:
        sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        raise _taken(host, port, setting, exc) from exc
    return sock


def warn_if_exposed(host: str, port: int, what: str, flag: str) -> None:
    """Log one warning when other machines can connect to a server that listens on `host`.

    Args:
        what: what everyone who connects can do: no server here asks for a key or password.
        flag: the one that gave `host`.
    """
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    if not is_local:
        _log.warning(
            "port %d is open to other machines (%s %s) and no key is asked for: everyone who reaches it can %s; %s %s "
            "admits this machine only",
            port,
            flag,
            host,
            what,
            flag,
            LOOPBACK,
        )


class Acceptor:
    """Accepts connections at a listening socket until `close`, several per iteration of the event loop.

    uvloop accepts one per iteration. Under load, when iterations are long, the last of many clients that connect at the
    same moment would wait for seconds while the first ones are served at full speed. The caller still owns the socket.
    """

    def __init__(
        self, sock: socket.socket, serve: Callable[[socket.socket], Coroutine[Any, Any, None]], relieve: Relieve
    ) -> None:
        """Start to accept.

        Args:
            serve: run in a task of its own for each connection, which it closes in the end.
            relieve: called when the system has no file descriptor for another connection: closes idle ones within
                the next iterations of the loop and returns whether there were any.
        """
        self._sock = sock
        self._serve = serve
        self._relieve = relieve
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures = 0  # since the last log line about them
        self._logged_at = -math.inf
        self._pause: asyncio.TimerHandle | None = None
        self.broken: OSError | None = None  # why no connection can be accepted any more
        sock.setblocking(False)
        self._loop.add_reader(sock, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # the client has already disconnected
                continue
            except OSError as exc:  # usually no file descriptors or memory
                self._failed(exc)
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._serve(connection), name="accepted-connection")
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _failed(self, exc: OSError) -> None:
        """Pause, so that connections end meanwhile; then try again, unless the socket itself is unusable."""
        self._loop.remove_reader(self._sock)
        if exc.errno in _UNUSABLE:
            self.broken = exc
            _log.error("no connection can be accepted any more at port %s: %s", self._port(), exc)
            return
        self._failures += 1
        if self._loop.time() >= self._logged_at + _LOG_EVERY_S:
            _log.warning(
                "new connections at port %s wait until the system has resources for them: %s (failed attempts: %d)",
                self._port(),
                exc,
                self._failures,
            )
            self._failures, self._logged_at = 0, self._loop.time()
        pause_s = _RELIEVED_S if self._relieve() else _PAUSE_S
        self._pause = self._loop.call_later(pause_s, self._loop.add_reader, self._sock, self._accept)

    def _port(self) -> str:
        try:
            return str(self._sock.getsockname()[1])
        except OSError:  # it was closed
            return "unknown"

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a connection could not be served", exc_info=error)

    @property
    def num_connections(self) -> int:
        """Connections whose `serve` runs."""
        return len(self._tasks)

    def close(self) -> None:
        """Accept no more."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock)

    async def wait_closed(self) -> None:
        """Wait until the tasks of accepted connections have ended. uvicorn calls it after `close`."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def aclose(self) -> None:
        """Accept no more, and cancel the tasks of accepted connections."""
        self.close()
        for task in self._tasks:
            task.cancel()
        await self.wait_closed()


def allow_files(wanted: int, hint: str) -> None:
    """Raise this process's limit of open files to `wanted` where the system lets it; log a warning with `hint` where
    it does not. A connection beyond the limit would wait unanswered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        _log.warning(
            "the system lets this process have %d open files, fewer than %d: raise the limit (ulimit -n) to %d%s",
            most,
            wanted,
            wanted,
            hint,
        )


def _taken(host: str, port: int, setting: str, exc: OSError) -> ConfigError:
    return ConfigError(
        f"--{setting}-port {port} can't be opened on --{setting}-host {host} ({exc.strerror}); stop what uses it, or "
        "choose another port (0 takes a free one) or address",
        field=f"{setting}_port",
    )
