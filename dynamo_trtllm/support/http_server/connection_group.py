"""Hold the open connections of a server, and what they share: limits, turns, running handlers."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from operator import attrgetter
from typing import Protocol

from dynamo_trtllm.protocol.errors import Overloaded
from dynamo_trtllm.protocol.http_status import ErrorForm
from dynamo_trtllm.support.http_server.exchange import FlushBatch, Handler
from dynamo_trtllm.support.http_server.hangup_watch import HangupWatch
from dynamo_trtllm.support.http_server.limits import ConnectionLimits
from dynamo_trtllm.support.http_server.parsing_turns import ParsingTurns
from dynamo_trtllm.support.http_server.request_head import HeadHolder, LargeHeads
from dynamo_trtllm.support.network.by_group import ByGroup

log = logging.getLogger(__name__)

# the most that is received from a connection before others have their turn
_RECEIVE_BYTES = 16 << 10
_LOG_EVERY_S = 10.0


class OpenConnection(HeadHolder, Protocol):
    """A connection of the group."""

    @property
    def network(self) -> str:
        """The client's network, see `addresses.network_of`."""

    def drain(self) -> None:
        """Close the connection after the responses to the requests that were received."""

    def abort(self) -> None:
        """Close the connection. Data that the client has not read is lost."""


class ConnectionGroup:
    """The open connections of a server, and the state that they share.

    Args:
        handler: runs the requests.
        limits: of the connections.
        error_form: the form of errors, unless the handler sets another one.
    """

    def __init__(self, handler: Handler, limits: ConnectionLimits, error_form: ErrorForm) -> None:
        self.handler = handler
        self.limits = limits
        self.error_form = error_form
        self.max_open = limits.max_connections + limits.reserved_connections
        self.batch = FlushBatch()
        self.open: set[OpenConnection] = set()
        # Those of `open` that may be closed to accept others, because they run no request. Some
        # receive one.
        self.idle = ByGroup[OpenConnection](attrgetter("network"))
        self.large_heads = LargeHeads(limits.max_large_head_bytes)
        self.parsing_turns = ParsingTurns()
        self.hangups = HangupWatch()
        self.receive_buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self.tasks: set[asyncio.Task[None]] = set()  # of running handlers
        self.is_draining = False
        self.changed = asyncio.Event()  # set when a connection or a task has ended
        self._num_evicted = 0  # idle connections, since the last log line about them
        self._logged_at_s = -math.inf

    def admit(self, connection: OpenConnection) -> None:
        """Add a connection that was opened.

        If there are too many, close the idlest one of the client that has most idle ones.
        """
        if len(self.open) >= self.max_open:
            self.evict_idlest()
        self.open.add(connection)
        self.idle.add(connection)

    def remove(self, connection: OpenConnection) -> None:
        """Forget a connection that has ended. A second call does nothing."""
        self.open.discard(connection)
        self.idle.discard(connection)
        self.large_heads.release(connection)
        self.changed.set()

    def check_capacity(self) -> None:
        """Check that a request may run on one more connection. Raises Overloaded."""
        if self._num_running >= self.limits.max_connections:
            raise Overloaded(
                f"the server runs requests on {self._num_running} connections, its limit; try again"
                " later"
            )

    def mark_running(self, connection: OpenConnection) -> None:
        """Keep a connection open while it runs a request, unless too many run one already."""
        if self._num_running < self.limits.max_connections:
            self.idle.discard(connection)

    def mark_idle(self, connection: OpenConnection) -> None:
        """Let other connections replace this one, whose request has ended.

        It is the least idle one now.
        """
        self.idle.add(connection)

    @property
    def _num_running(self) -> int:
        return len(self.open) - len(self.idle)

    def evict_idlest(self) -> bool:
        """Close an idle connection. Return False if there is none."""
        network = self.idle.largest()
        if network is None:
            return False
        self.idle.oldest(network).evict()
        self._num_evicted += 1
        now_s = time.monotonic()
        if now_s >= self._logged_at_s + _LOG_EVERY_S:
            text = (
                "closed %d idle connections to accept others, the last one of client %s; %d are"
                " open, of at most %d"
            )
            log.warning(text, self._num_evicted, network, len(self.open), self.max_open)
            self._num_evicted = 0
            self._logged_at_s = now_s
        return True

    def drain(self) -> None:
        """Close connections after their responses.

        Idle ones are closed when a request on its way has had time to arrive.
        """
        self.is_draining = True
        for connection in list(self.open):
            connection.drain()

    async def until_ended(self) -> None:
        """Wait until there is no connection and no task."""
        while self.open or self.tasks:
            self.changed.clear()
            await self.changed.wait()
