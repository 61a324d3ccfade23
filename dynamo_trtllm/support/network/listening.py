"""Listen on TCP ports: bind them, accept connections in batches, and raise the file limit."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import resource
import socket
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.network.addresses import LOOPBACK, is_loopback

log = logging.getLogger(__name__)

BACKLOG = 2048  # most connections that wait to be accepted
# Most connections that are accepted in one iteration of the event loop. Each new request of a
# frontend takes 1 to 2 ms of work.
ACCEPTS_PER_TURN = 64
_PAUSE_S = 0.1  # pause after a failed accept
_RELIEVED_PAUSE_S = 0.001  # pause after a failed accept if idle connections are being closed
_LOG_EVERY_S = 10.0
# Errors after which the listening socket itself is unusable.
_UNUSABLE = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})

Relieve: TypeAlias = Callable[[], bool]


def bind(
    host: str, port: int, *, is_shared: bool = False, setting: str = "http", listens: bool = False
) -> socket.socket:
    """Return a bound TCP socket.

    Args:
        host: IP address or host name.
        port: the port. 0: any free port.
        is_shared: other processes may bind the same port, if all of them set this (SO_REUSEPORT).
        setting: prefix of the flags --{setting}-host and --{setting}-port, for the error.
        listens: the socket also listens.

    Raises:
        ConfigError: the port can't be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if is_shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
        if listens:
            sock.listen(BACKLOG)
    except (OSError, UnicodeError) as exc:  # UnicodeError: the host has an empty or too long part
        sock.close()
        raise _not_bound(host, port, setting, exc) from exc
    return sock


def listen(
    host: str, port: int, *, is_shared: bool = False, setting: str = "http"
) -> socket.socket:
    """Return a listening TCP socket. The arguments and errors are those of `bind`."""
    return bind(host, port, is_shared=is_shared, setting=setting, listens=True)


def warn_if_exposed(host: str, port: int, what: str, flag: str) -> None:
    """Log one warning if other machines can connect to a server that listens on `host`.

    Args:
        host: the address that the server listens on.
        port: the port that it listens on.
        what: the words after "every client can", which say what clients can do without
            authentication.
        flag: the flag that sets `host`.
    """
    if not is_loopback(host):
        text = (
            "port %d is open to other machines without authentication: every client can %s; to"
            " restrict it to this machine, set %s %s"
        )
        log.warning(text, port, what, flag, LOOPBACK)


class Acceptor:
    """Accepts connections at a listening socket, several in each iteration of the event loop.

    uvloop accepts only one connection in each iteration. Under load, iterations take long. So if
    many clients connect at the same moment, the last one would wait for seconds.
    """

    def __init__(
        self,
        sock: socket.socket,
        serve: Callable[[socket.socket], Coroutine[Any, Any, None]],
        relieve: Relieve,
        accepts_per_turn: int = ACCEPTS_PER_TURN,
    ) -> None:
        """Start to accept connections.

        Args:
            sock: a listening socket. The caller still owns it.
            serve: runs in its own task for each connection, and closes the connection at its end.
            relieve: called if the system has no file descriptor for another connection. It closes
                idle connections within the next iterations of the event loop. It returns False if
                there are none.
            accepts_per_turn: most connections that are accepted in one iteration.
        """
        self._sock = sock
        self._serve = serve
        self._relieve = relieve
        self._accepts_per_turn = accepts_per_turn
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_failures = 0  # number of failed accepts since the last log line about them
        self._logged_at = -math.inf
        self._pause: asyncio.TimerHandle | None = None
        self.broken: OSError | None = None  # set if the listening socket is unusable
        sock.setblocking(False)
        self._loop.add_reader(sock, self._accept)

    def _accept(self) -> None:
        """Accept the connections that wait, at most `accepts_per_turn`."""
        for _ in range(self._accepts_per_turn):
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
        """Try again after a pause, in which connections can end, unless the socket is unusable."""
        self._loop.remove_reader(self._sock)
        if exc.errno in _UNUSABLE:
            self.broken = exc
            log.error(
                "port %s accepts no more connections: %s; restart this process", self._port(), exc
            )
            return
        self._num_failures += 1
        if self._loop.time() >= self._logged_at + _LOG_EVERY_S:
            text = (
                "port %s can't accept connections, retrying: %s (%d failed attempts); check the"
                " limit of open files"
            )
            log.warning(text, self._port(), exc, self._num_failures)
            self._num_failures = 0
            self._logged_at = self._loop.time()
        pause_s = _RELIEVED_PAUSE_S if self._relieve() else _PAUSE_S
        self._pause = self._loop.call_later(
            pause_s, self._loop.add_reader, self._sock, self._accept
        )

    def _port(self) -> str:
        try:
            return str(self._sock.getsockname()[1])
        except OSError:  # the socket was closed
            return "unknown"

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            log.error("connection failed", exc_info=error)

    @property
    def num_connections(self) -> int:
        """Return the number of connections whose `serve` runs."""
        return len(self._tasks)

    def close(self) -> None:
        """Stop accepting connections."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock)

    async def wait_closed(self) -> None:
        """Wait until the tasks of accepted connections have ended. Called after `close`."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def aclose(self) -> None:
        """Stop accepting connections, and cancel the tasks of accepted connections."""
        self.close()
        for task in self._tasks:
            task.cancel()
        await self.wait_closed()


def allow_files(wanted: int, hint: str) -> int:
    """Raise this process's limit of open files to `wanted`.

    Without enough files, connections are not accepted. If the system does not allow `wanted` files,
    this logs a warning.

    Args:
        wanted: the number of files that this process needs.
        hint: text at the end of the warning.

    Returns:
        The number of files that this process may open, but at most `wanted`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        log.warning(
            "open files are limited to %d; raise the limit to %d (ulimit -n)%s", most, wanted, hint
        )
    return most


def _not_bound(host: str, port: int, setting: str, exc: OSError | UnicodeError) -> ConfigError:
    if isinstance(exc, UnicodeError):
        return _not_own_address(host, setting, "not a host name")
    if isinstance(exc, socket.gaierror) or exc.errno == errno.EADDRNOTAVAIL:
        return _not_own_address(host, setting, exc.strerror)
    if exc.errno == errno.EACCES:
        return ConfigError(
            f"--{setting}-port {port} needs more rights than this process has; choose a port above"
            " 1023",
            field=f"{setting}_port",
        )
    return ConfigError(
        f"--{setting}-port {port} can't be opened on --{setting}-host {host} ({exc.strerror}); stop"
        " the process that uses it, or choose another port (0 = any free port) or address",
        field=f"{setting}_port",
    )


def _not_own_address(host: str, setting: str, why: str | None) -> ConfigError:
    return ConfigError(
        f"--{setting}-host {host} is not an address of this machine ({why}); give one of its"
        f" addresses, {LOOPBACK} for connections from this machine only, or 0.0.0.0 for"
        " connections from everywhere",
        field=f"{setting}_host",
    )
