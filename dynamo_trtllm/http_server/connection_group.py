"""The open connections of one server, their limits, and what they share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_trtllm.http_server.exchange import FlushBatch, Handler

if TYPE_CHECKING:
    from dynamo_trtllm.http_server.connection import HttpConnection


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The limits of one server. A connection beyond the limit gets 429, unless it replaces another one."""

    max_connections: int
    max_header_bytes: int  # request line and headers
    receive_timeout_s: float  # for the head from its first byte (or the connection) on, then for the body
    keep_alive_timeout_s: float  # of an idle connection
    answer_timeout_s: float | None = None  # until the client has read a response; None: no limit here
    closes_least_recent: bool = False  # a connection beyond the limit replaces the least recently used one
    max_body_bytes: int = 0  # includes chunk sizes, extensions and trailers beyond `max_header_bytes`


class ConnectionGroup:
    """The open connections of one server, and what they share."""

    def __init__(self, handler: Handler, limits: ConnectionLimits) -> None:
        self.handler = handler
        self.limits = limits
        self.batch = FlushBatch()
        self.open: set[HttpConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()  # of running handlers
        self.is_draining = False
        self.changed = asyncio.Event()  # set when a connection or a task has ended

    def close_least_recent(self) -> bool:
        """Close the connection whose last request or opening is oldest. Return False if there is no connection."""
        if not self.open:
            return False
        oldest = min(self.open, key=lambda each: each.last_activity)
        self.open.discard(oldest)
        oldest.abort()  # `close` would wait until the client has read all data
        return True

    def drain(self) -> None:
        """Close idle connections now, and the others after their responses."""
        self.is_draining = True
        for connection in list(self.open):
            connection.drain()

    async def until_ended(self) -> None:
        """Wait until there is no connection and no task."""
        while self.open or self.tasks:
            self.changed.clear()
            await self.changed.wait()
