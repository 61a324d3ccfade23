"""Manage the open connections of a server, and the state that they share."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Set
from operator import attrgetter
from typing import Protocol

from dynamo_trtllm.protocol.counted import counted
from dynamo_trtllm.protocol.errors import Overloaded
from dynamo_trtllm.protocol.http_status import ErrorForm
from dynamo_trtllm.support.http_server.exchange import FlushBatch, Handler
from dynamo_trtllm.support.http_server.hangup_watch import HangupWatch
from dynamo_trtllm.support.http_server.limits import ConnectionLimits
from dynamo_trtllm.support.http_server.parsing_turns import ParsingTurns
from dynamo_trtllm.support.http_server.request_head import HeadHolder, LargeHeads
from dynamo_trtllm.support.network.by_group import ByGroup

log = logging.getLogger(__name__)

# Most bytes that are received from a connection before other connections have their turn.
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
        limits: the limits of the connections.
        error_form: the form of errors, unless the handler sets another form.
        origins: the origins whose pages may read errors that the handler does not send (CORS).
    """

    def __init__(
        self,
        handler: Handler,
        limits: ConnectionLimits,
        error_form: ErrorForm,
        origins: Set[str] = frozenset(),
    ) -> None:
        self.handler = handler
        self.limits = limits
        self.error_form = error_form
        self.origins = origins
        self.max_open = limits.max_connections + limits.reserved_connections
        self.batch = FlushBatch()
        self.open: set[OpenConnection] = set()
        # The connections that run no request. They may be closed to accept others, even while they
        # receive a request.
        self.idle = ByGroup[OpenConnection](attrgetter("network"))
        self.large_heads = LargeHeads(limits.max_large_head_bytes)
        self.parsing_turns = ParsingTurns()
        self.hangups = HangupWatch()
        self.receive_buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self.tasks: set[asyncio.Task[None]] = set()  # the tasks of running handlers
        self.is_draining = False
        self.changed = asyncio.Event()  # set when a connection or a task has ended
        self._num_evicted = 0  # number of evicted connections since the last log line about them
        self._logged_at_s = -math.inf

    def admit(self, connection: OpenConnection) -> None:
        """Add a connection that was opened.

        If there are too many connections, close the idlest connection of the client that has the
        most idle connections.
        """
        if len(self.open) >= self.max_open:
            self.evict_idlest()
        self.open.add(connection)
        self.idle.add(connection)

    def remove(self, connection: OpenConnection) -> None:
        """Remove a connection that has ended. Idempotent."""
        self.open.discard(connection)
        self.idle.discard(connection)
        self.large_heads.release(connection)
        self.changed.set()

    def check_capacity(self) -> None:
        """Check that a request may run on one more connection. Raises Overloaded."""
        if self._num_running >= self.limits.max_connections:
            raise Overloaded(
                f"the server runs requests on {counted(self._num_running, 'connection')}, its"
                " limit; try again later"
            )

    def mark_running(self, connection: OpenConnection) -> None:
        """Do not evict a connection while it runs a request.

        If too many connections run requests, this has no effect.
        """
        if self._num_running < self.limits.max_connections:
            self.idle.discard(connection)

    def mark_idle(self, connection: OpenConnection) -> None:
        """Let other connections replace this one.

        This connection is now the least idle one, so all others are evicted before it.
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

        A connection without a request is closed a little later, because a request may be on its
        way.
        """
        self.is_draining = True
        for connection in list(self.open):
            connection.drain()

    async def until_ended(self) -> None:
        """Wait until there is no connection and no task."""
        while self.open or self.tasks:
            self.changed.clear()
            await self.changed.wait()
