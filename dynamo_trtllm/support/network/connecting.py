"""Connect sockets on the event loop. An IP address needs no name resolution."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any


async def connect(sock: socket.socket, host: str, port: int) -> None:
    """Connect a non-blocking TCP socket. A host name is resolved, an IP address is not.

    uvloop's `sock_connect` also sends IP addresses to the threads that resolve names, of which only
    two work at a time. There, slow name servers would delay connections that need none. Besides, a
    process that was forked from one with such threads crashes when it exits.

    Raises:
        OSError: the connection failed, or the host name has no address.
    """
    try:
        sock.connect(await _socket_address(sock.family, host, port))
    except BlockingIOError:
        await _until_writable(sock)
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error)) from None


async def _socket_address(family: int, host: str, port: int) -> tuple[Any, ...]:
    try:
        infos = socket.getaddrinfo(
            host, port, family, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    except socket.gaierror:  # a host name
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
    _, _, _, _, address = infos[0]
    return address


async def _until_writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    writable = asyncio.Event()
    loop.add_writer(sock, writable.set)
    try:
        await writable.wait()
    finally:
        loop.remove_writer(sock)
