"""Define the message transport below a request plane, the service above it, and the heartbeat.

`nats` implements the transport, and `inproc` within one process; both pass the same contract tests.
A transport delivers each message at most once, and in order per pair of sender and subscriber.
`client` and `server` rely on nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from dynamo_trtllm.protocol.errors import (
    Disconnected,
    DynamoError,
    NoListener,
    PlaneError,
    Unreachable,
)
from dynamo_trtllm.protocol.messages import Control
from dynamo_trtllm.protocol.streams import Generator
from dynamo_trtllm.support.background import BackgroundTasks

# data, reply subject ("" when no reply is wanted); never blocks
Receive: TypeAlias = Callable[[bytes, str], None]
OnDisconnect: TypeAlias = Callable[[DynamoError], None]
Unsubscribe: TypeAlias = Callable[[], Awaitable[None]]  # ends a subscription; idempotent


class Transport(Protocol):
    """A connection that publishes messages, and receives those to the subjects it subscribes."""

    @property
    def max_message_bytes(self) -> int:
        """Return the size limit of one message."""

    @property
    def is_writing(self) -> bool:
        """Return whether a published message is not yet written to the connection."""

    def new_inbox(self) -> str:
        """Return a subject that no other client uses."""

    def on_disconnect(self, callback: OnDisconnect) -> None:
        """Call `callback` whenever messages may have been lost."""

    def unavailable_reason(self) -> str | None:
        """Return, as text for users, why no message can be sent now. None: no reason is known."""

    def rejection(self) -> str | None:
        """Return, as text for users, why the server rejects this process. None: it does not.

        Unlike an outage of the server, it lasts until someone corrects the credentials.
        """

    async def subscribe(
        self, subject: str, receive: Receive, caught_up: Callable[[], None] = lambda: None
    ) -> Unsubscribe:
        """Call `receive` for each message to `subject`. Return the function that ends this.

        Messages that arrived together are received within one iteration of the event loop, many in
        several iterations. `caught_up` is called after the last message of an iteration.

        The subscription is active for messages that this transport sends after the call, and for
        replies to them.
        """

    async def until_subscribed(self, timeout_s: float) -> None:
        """Return once messages of every client to the subscribed subjects arrive.

        Raises:
            Unreachable: the server rejects a subscription, or delivers no message in time.
            Disconnected: the connection is lost.
        """

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Send a request and return the reply.

        Raises:
            NoListener: no process listens (raised at once).
            Unreachable: none replies in time.
            Disconnected: the connection is lost.
        """

    def publish(self, subject: str, data: bytes) -> None:
        """Send a message without awaiting. Never raises."""

    def try_publish(self, subject: str, data: bytes) -> bool:
        """Send a message that may be lost.

        Return False, and send nothing, if there is no connection or if the message could displace
        others. A message that is too large is dropped, and counts as sent.
        """

    async def aclose(self) -> None:
        """Send the published messages if possible, then close. Idempotent."""


class Service(Generator, Protocol):
    """The calls that a worker answers at its subject.

    The plane cancels a stream whose caller cancels it or is gone, also an ended one that still
    holds KV.
    """

    async def control(self, verb: Control) -> bytes:
        """Run a control verb and return the encoded reply, whose type depends on the verb.

        Raises:
            DynamoError: the caller gets the same error.
        """


def no_listener(subject: str) -> NoListener:
    """Return the error of a request to a subject that no process listens to."""
    return NoListener(f"no worker listens at {subject}: it has ended; retry the request")


def no_reply(subject: str, timeout_s: float) -> Unreachable:
    """Return the error of a request without a reply in time."""
    return Unreachable(
        f"no reply from {subject} within {timeout_s:.1f} s: its worker hangs or is gone; retry the"
        " request"
    )


@dataclass(kw_only=True, eq=False)
class Heartbeat:
    """Heartbeat to each peer with open streams.

    It is needed because a message transport does not report when a peer dies.
    """

    transport: Transport
    interval_s: float  # between two heartbeats to a peer, and time-out of each
    peers: Callable[[], Collection[str]]  # returns the peers that have open streams
    message: Callable[[str], bytes]  # returns the heartbeat message for a peer
    heard: Callable[[str], int]  # returns a number that changes with each message from a peer
    # called when a peer neither replied nor sent anything else
    on_peer_lost: Callable[[str, DynamoError], None]
    tasks: BackgroundTasks  # owner of the background task
    _asking: set[str] = field(default_factory=set, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    def start(self) -> None:
        """Start the heartbeats."""
        self._task = self.tasks.start(self._run(), "plane-heartbeat")

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:  # a silent peer must not delay the others
            while True:
                await asyncio.sleep(self.interval_s)
                for peer in set(self.peers()) - self._asking:
                    group.create_task(self._ask(peer), name=f"plane-heartbeat-{peer}")

    async def _ask(self, peer: str) -> None:
        """Send a heartbeat to `peer`, and a second one if nothing comes from it.

        The second one is needed because a message may be lost, and because this process may have
        been suspended when the reply arrived.
        """
        self._asking.add(peer)
        try:
            for is_last in (False, True):
                heard = self.heard(peer)
                try:
                    await self.transport.request(
                        peer, self.message(peer), timeout_s=self.interval_s
                    )
                    return
                except PlaneError as exc:
                    if self.heard(peer) != heard:
                        return
                    if is_last or isinstance(exc, Disconnected):
                        self.on_peer_lost(peer, exc)
                        return
        finally:
            self._asking.discard(peer)

    async def aclose(self) -> None:
        """Stop all heartbeats. Idempotent."""
        await self.tasks.cancel(self._task)
