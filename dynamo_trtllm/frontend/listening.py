"""The port of a frontend, taken before anything is started: that it is in use is the first thing to be said."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from dynamo_trtllm.errors import ConfigError

BACKLOG = 2048  # connections that wait to be accepted
ACCEPTS_PER_TURN = 64  # a new request takes 1 to 2 ms of work


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


@contextmanager
def repeated(sock: socket.socket) -> Iterator[list[socket.socket]]:
    """Yield duplicates of a listening socket, so that uvloop accepts several connections per iteration.

    uvloop accepts one per descriptor and iteration; under load, the last of many simultaneous clients would wait for
    seconds.
    """
    with ExitStack() as stack:
        yield [sock, *(stack.enter_context(sock.dup()) for _ in range(ACCEPTS_PER_TURN - 1))]


def _taken(host: str, port: int, exc: OSError) -> ConfigError:
    return ConfigError(
        f"--http-port {port} on {host} can't be used ({exc.strerror}); stop what uses it or choose another",
        field="http_port",
    )
