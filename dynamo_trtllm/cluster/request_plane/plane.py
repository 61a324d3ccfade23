"""Connect a process to the request plane, with one client and any number of servers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dynamo_trtllm.cluster.request_plane.client import PlaneClient, PlaneLimits
from dynamo_trtllm.cluster.request_plane.server import PlaneServer
from dynamo_trtllm.cluster.request_plane.transport import Receive, Service, Transport, Unsubscribe
from dynamo_trtllm.protocol.errors import BadFrame
from dynamo_trtllm.protocol.messages import LoadReport
from dynamo_trtllm.support.background import BackgroundTasks

log = logging.getLogger(__name__)


class RequestPlane:
    """A connection to the request plane. A frontend uses its client, a worker a server.

    Args:
        transport: the transport. The plane owns it.
        limits: time-outs of the plane.
        tasks: owner of the background tasks.
        on_unreadable: called for each message that can't be read.
    """

    def __init__(
        self,
        transport: Transport,
        limits: PlaneLimits,
        tasks: BackgroundTasks | None = None,
        on_unreadable: Callable[[], None] = lambda: None,
    ) -> None:
        self._transport = transport
        self._limits = limits
        self._tasks = tasks or BackgroundTasks()
        self._on_unreadable = on_unreadable
        self._num_unreadable = 0  # number of messages that could not be read
        self.client = PlaneClient(transport, limits, self._tasks, self._count_unreadable)
        self._servers: list[PlaneServer] = []

    async def serve(
        self, subject: str, service: Service, load: Callable[[], LoadReport] | None = None
    ) -> PlaneServer:
        """Serve requests at `subject`, and control verbs at its control subject.

        Return the server, which serves until it is closed. `load` returns the load that the server
        reports to its callers.
        """
        server = PlaneServer(
            self._transport,
            service,
            self._limits.ping_interval_s,
            self._tasks,
            load,
            self._count_unreadable,
        )
        self._servers.append(server)
        await server.start(subject, self._limits.ack_timeout_s)
        return server

    async def subscribe(self, subject: str, receive: Receive) -> Unsubscribe:
        """Receive messages that belong to no call. See `Transport.subscribe`."""
        return await self._transport.subscribe(subject, receive)

    def try_publish(self, subject: str, data: bytes) -> bool:
        """Send a message that belongs to no call. See `Transport.try_publish`."""
        return self._transport.try_publish(subject, data)

    def unavailable_reason(self) -> str | None:
        """Return, as text for users, why no message can be sent now. None: no reason is known."""
        return self._transport.unavailable_reason()

    def rejection(self) -> str | None:
        """Return why the server rejects this process, as text for users. None: it does not."""
        return self._transport.rejection()

    async def aclose(self) -> None:
        """Close all servers, end all calls and close the transport. Idempotent."""
        for server in self._servers:
            await server.aclose()
        await self.client.aclose()
        await self._transport.aclose()

    def _count_unreadable(self, error: BadFrame) -> None:
        self._on_unreadable()
        self._num_unreadable += 1
        # There may be many such messages, so only the 1st, 2nd, 4th, 8th … is logged.
        is_power_of_two = self._num_unreadable.bit_count() == 1
        if is_power_of_two:
            log.warning("unreadable message (%d so far): %s", self._num_unreadable, error.message)
