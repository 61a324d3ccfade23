"""The limit of the time in which a client reads its responses."""

from __future__ import annotations

import asyncio

from dynamo_trtllm.http_server import exchange


class ReadTimer:
    """Closes a connection whose client does not read. One limit applies at a time: the first that was set."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def limit_answer(self, seconds: float, response: exchange.HttpResponse) -> None:
        """Close the connection at this time from now, unless the response was sent."""
        self._timer = self._loop.call_later(seconds, self._cut_answer, response)

    def watch(self) -> None:
        """Close the connection once the client has read nothing for a while."""
        if self._timer is None:
            unread_bytes = self._transport.get_write_buffer_size()
            self._timer = self._loop.call_later(exchange.STALL_S, self._cut_reader, unread_bytes)

    def stop(self) -> None:
        """Set no limit any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut_answer(self, response: exchange.HttpResponse) -> None:
        self._timer = None
        if not response.ended or self._transport.get_write_buffer_size():
            self._transport.abort()

    def _cut_reader(self, unread_bytes: int) -> None:
        self._timer = None
        if self._transport.get_write_buffer_size() >= unread_bytes:
            self._transport.abort()
        else:
            self.watch()
