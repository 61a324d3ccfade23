"""The port of a frontend, taken before anything is started: that it is in use is the first thing to be said."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from dynamo_trtllm.errors import ConfigError

_log = logging.getLogger(__name__)

BACKLOG = 2048  # connections that wait to be accepted
ACCEPTS_PER_TURN = 64  # a new request takes 1 to 2 ms of work
_PAUSE_S = 0.1


def bound(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Not listening yet, so that no connection comes here. `is_shared`: other processes may bind and listen too, all
    of which have to say so. Raises ConfigError."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if is_shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError as exc:
        sock.close()
        raise _taken(host, port, exc) from exc
    return sock


def listening(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """As `bound`; clients may connect, and wait to be served."""
    sock = bound(host, port, is_shared=is_shared)
    try:
        sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        raise _taken(host, port, exc) from exc
    return sock


class Acceptor:
    """Accepts connections at a listening socket until `close`, several per iteration of the event loop.

    uvloop accepts one per iteration. Under load, when iterations are long, the last of many clients that connect at the
    same moment would wait for seconds while the first ones are served at full speed. `make_protocol` is called once per
    connection. The socket stays its owner's.
    """

    def __init__(self, sock: socket.socket, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        self._sock = sock
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_short = False  # of file descriptors or memory
        self._pause: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        self._loop.add_reader(sock, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # that client has gone again
                continue
            except OSError as exc:  # no file descriptors or memory: what runs has to end first
                if not self._is_short:  # once, and not at each attempt
                    self._is_short = True
                    _log.warning("new connections wait until the system has resources for them: %s", exc)
                self._loop.remove_reader(self._sock)
                self._pause = self._loop.call_later(_PAUSE_S, self._loop.add_reader, self._sock, self._accept)
                return
            self._is_short = False
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._serve(connection), name="http-accept")
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a connection could not be served", exc_info=error)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError as exc:
            connection.close()
            _log.debug("a client left while it was accepted: %s", exc)

    def close(self) -> None:
        """Accept no more."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock)

    async def wait_closed(self) -> None:
        """Wait until the connections that were accepted have their protocols. uvicorn calls it after `close`."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _taken(host: str, port: int, exc: OSError) -> ConfigError:
    return ConfigError(
        f"--http-port {port} on {host} can't be used ({exc.strerror}); stop what uses it or choose another",
        field="http_port",
    )
