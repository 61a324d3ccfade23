"""Notice that a client has disconnected while nothing is received from its connection."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

_DISCONNECTED = select.EPOLLRDHUP  # the kernel adds EPOLLHUP and EPOLLERR


class HangupWatch:
    """Close connections whose clients disconnect while the event loop does not read from them.

    An event loop notices a disconnect when it reads. An epoll object of our own reports it without
    reading.
    """

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._by_file: dict[int, Callable[[], None]] = {}  # what to call

    def add(self, file: int, hang_up: Callable[[], None]) -> None:
        """Watch a connection.

        Args:
            file: descriptor of its socket.
            hang_up: called once if the client disconnects.
        """
        if self._epoll is None:
            self._epoll = select.epoll()
            asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._close_disconnected)
        self._epoll.register(file, _DISCONNECTED)
        self._by_file[file] = hang_up

    def discard(self, file: int) -> None:
        """Watch the connection of this socket no more. A second call does nothing."""
        if self._by_file.pop(file, None) is not None:
            assert self._epoll is not None
            self._epoll.unregister(file)

    def close(self) -> None:
        """Watch no connection any more."""
        self._by_file.clear()
        if self._epoll is not None:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

    def _close_disconnected(self) -> None:
        assert self._epoll is not None
        for file, _ in self._epoll.poll(0):
            hang_up = self._by_file[file]
            self.discard(file)
            hang_up()
