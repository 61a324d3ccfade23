"""Define the message transport that a request plane needs, and the heartbeat to its peers.

A transport delivers each message at most once, and in order per pair of sender and subscriber. `client` and `server`
rely on nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol, TypeAlias

from dynamo_trtllm.background import BackgroundTasks
from dynamo_trtllm.errors import Disconnected, DynamoError, PlaneError

logger = logging.getLogger(__name__)

Receive: TypeAlias = Callable[[bytes, str], None]  # data, reply subject ("" when no reply is wanted); never blocks
OnDisconnect: TypeAlias = Callable[[DynamoError], None]


class Subscription(Protocol):
    """A subscription to one subject."""

    async def stop(self) -> None:
        """Stop receiving. Idempotent."""
        ...


class Transport(Protocol):
    """A connection that publishes messages to subjects and receives those of subscribed subjects."""

    @property
    def max_message_bytes(self) -> int:
        """Return the size limit of one message."""
        ...

    def new_inbox(self) -> str:
        """Return a subject that no other client uses."""
        ...

    def on_disconnect(self, callback: OnDisconnect) -> None:
        """Call `callback` whenever messages may have been lost."""
        ...

    def unavailable_reason(self) -> str | None:
        """Return, as text for users, why no message can be sent now. None: no reason is known."""
        ...

    async def subscribe(self, subject: str, receive: Receive) -> Subscription:
        """Call `receive` for each message to `subject`.

        The subscription is active for messages that this transport sends after the call, and for replies to them.
        """
        ...

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Send a request and return the reply.

        Raises:
            Unreachable: no process listens (raised at once), or none replies in time.
            Disconnected: the connection is lost.
        """
        ...

    def publish(self, subject: str, data: bytes) -> None:
        """Send a message without awaiting. Never raises."""
        ...

    async def aclose(self) -> None:
        """Send the published messages if possible, then close. Idempotent."""
        ...


class Heartbeat:
    """Heartbeat to each peer with running streams, because a message transport does not report when a peer dies.

    Args:
        transport: sends the heartbeats.
        interval_s: seconds between two heartbeats to a peer, and time-out of each.
        message: returns the heartbeat message for a peer.
        heard: returns a number that changes with each message from a peer.
        on_peer_lost: is called when a peer neither replied nor sent anything else.
        tasks: owner of the background task.
    """

    def __init__(
        self,
        transport: Transport,
        interval_s: float,
        *,
        message: Callable[[str], bytes],
        heard: Callable[[str], int],
        on_peer_lost: Callable[[str, DynamoError], None],
        tasks: BackgroundTasks,
    ) -> None:
        self._transport = transport
        self._tasks = tasks
        self._interval_s = interval_s
        self._message = message
        self._heard = heard
        self._on_peer_lost = on_peer_lost
        self._streams: Counter[str] = Counter()
        self._asking: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def add(self, peer: str) -> None:
        """Count one more stream with `peer`."""
        self._streams[peer] += 1
        if self._task is None:
            self._task = self._tasks.start(self._run(), "plane-heartbeat")

    def remove(self, peer: str) -> bool:
        """Count one stream less with `peer`. Return True if it was the last; then the heartbeats stop."""
        self._streams[peer] -= 1
        is_last = self._streams[peer] <= 0
        if is_last:
            del self._streams[peer]
        return is_last

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:  # a silent peer must not delay the others
            while True:
                await asyncio.sleep(self._interval_s)
                for peer in self._streams.keys() - self._asking:
                    group.create_task(self._ask(peer), name=f"plane-heartbeat-{peer}")

    async def _ask(self, peer: str) -> None:
        """Send a heartbeat to `peer`, and a second one if the peer neither replies nor sends anything else.

        The second one is needed because a message may be lost, and because this process may have been suspended when
        the reply arrived.
        """
        self._asking.add(peer)
        try:
            for is_last in (False, True):
                heard = self._heard(peer)
                try:
                    await self._transport.request(peer, self._message(peer), timeout_s=self._interval_s)
                    return
                except PlaneError as exc:
                    if self._heard(peer) != heard:
                        return
                    if is_last or isinstance(exc, Disconnected):
                        self._on_peer_lost(peer, exc)
                        return
        finally:
            self._asking.discard(peer)

    async def aclose(self) -> None:
        """Stop all heartbeats. Idempotent."""
        task, self._task = self._task, None
        await self._tasks.cancel(task)
