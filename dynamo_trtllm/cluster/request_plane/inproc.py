"""Implement the request plane within one process (`--nats-server inproc://`).

This plane works like the plane over NATS, with an `InprocBus` as the server. Workers and frontends
may run on event loops of several threads. Each receives its messages on its own event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from dynamo_trtllm.cluster.request_plane.client import PlaneLimits
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.cluster.request_plane.transport import (
    OnDisconnect,
    Receive,
    Unsubscribe,
    no_listener,
    no_reply,
)
from dynamo_trtllm.cluster.shared_by_address import SharedByAddress
from dynamo_trtllm.protocol.errors import Disconnected
from dynamo_trtllm.support.background import BackgroundTasks

_CLOSED: Final = "the request plane is closed"


class Subscription:
    """A receiver of the messages to one subject, on the event loop that created it."""

    def __init__(self, subject: str, receive: Receive) -> None:
        self.subject = subject
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self.is_open = True

    def deliver_soon(self, data: bytes, reply: str) -> None:
        """Receive a message in the next iteration of the event loop."""
        if self._loop is asyncio.get_running_loop():
            self._loop.call_soon(self._deliver, data, reply)
            return
        # RuntimeError: the event loop of the receiver was closed before its plane.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver, data, reply)

    def _deliver(self, data: bytes, reply: str) -> None:
        if self.is_open:
            self._receive(data, reply)


class InprocBus:
    """The subscriptions of one cluster within this process. Thread-safe."""

    def __init__(self) -> None:
        self._subscriptions: dict[str, tuple[Subscription, ...]] = {}
        self._changing = threading.Lock()
        self._inbox_numbers = itertools.count()

    def new_inbox(self) -> str:
        """Return a subject that no other member of the cluster uses."""
        return f"_INBOX.{next(self._inbox_numbers)}"

    def add(self, subscription: Subscription) -> None:
        """Deliver messages to a subscription from now on."""
        subject = subscription.subject
        with self._changing:
            self._subscriptions[subject] = (*self._subscriptions.get(subject, ()), subscription)

    def remove(self, subscription: Subscription) -> None:
        """Deliver no more messages to a subscription. Idempotent."""
        subscription.is_open = False
        subject = subscription.subject
        with self._changing:
            others = self._subscriptions.get(subject, ())
            left = tuple(other for other in others if other is not subscription)
            if left:
                self._subscriptions[subject] = left
            else:
                self._subscriptions.pop(subject, None)

    def send(self, subject: str, data: bytes, reply: str = "") -> bool:
        """Deliver a message to all subscriptions of a subject. Return False if there is none."""
        subscriptions = self._subscriptions.get(subject, ())
        for subscription in subscriptions:
            subscription.deliver_soon(data, reply)
        return bool(subscriptions)


BUSES: Final = SharedByAddress(InprocBus)


class InprocTransport:
    """A `Transport` within this process. It loses no messages.

    It delivers in order, in the next iteration of the receiver's event loop.

    Args:
        bus: the bus, which the other transports of the cluster share. None: a new bus.
    """

    max_message_bytes = 1 << 20
    is_writing = False

    def __init__(self, bus: InprocBus | None = None) -> None:
        self._bus = bus or InprocBus()
        self._subscriptions: set[Subscription] = set()
        self._closed = False

    def new_inbox(self) -> str:
        return self._bus.new_inbox()

    def on_disconnect(self, callback: OnDisconnect) -> None:
        """Ignore the callback: this transport loses no messages."""

    def unavailable_reason(self) -> str | None:
        return _CLOSED if self._closed else None

    def rejection(self) -> str | None:
        return None

    async def subscribe(
        self, subject: str, receive: Receive, caught_up: Callable[[], None] = lambda: None
    ) -> Unsubscribe:
        def take(data: bytes, reply: str) -> None:
            try:
                receive(data, reply)
            finally:
                caught_up()

        subscription = self._open(subject, take)

        async def unsubscribe() -> None:
            self._close(subscription)

        return unsubscribe

    async def until_subscribed(self, timeout_s: float) -> None:
        """Return at once, because subscriptions are active when `subscribe` returns."""

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        if self._closed:
            raise Disconnected(_CLOSED)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def take(data: bytes, _: str) -> None:
            if not reply.done():
                reply.set_result(data)

        inbox = self._open(self.new_inbox(), take)
        try:
            if not self._bus.send(subject, data, inbox.subject):
                raise no_listener(subject)
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError as exc:
            raise no_reply(subject, timeout_s) from exc
        finally:
            self._close(inbox)

    def publish(self, subject: str, data: bytes) -> None:
        if not self._closed:
            self._bus.send(subject, data)

    def try_publish(self, subject: str, data: bytes) -> bool:
        self.publish(subject, data)
        return not self._closed

    async def aclose(self) -> None:
        self._closed = True
        for subscription in list(self._subscriptions):
            self._close(subscription)

    def _open(self, subject: str, receive: Receive) -> Subscription:
        subscription = Subscription(subject, receive)
        self._subscriptions.add(subscription)
        self._bus.add(subscription)
        return subscription

    def _close(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)
        self._bus.remove(subscription)


class InprocPlane(RequestPlane):
    """A request plane within one process.

    Args:
        limits: time-outs of the plane.
        bus: the bus, which the other planes of the cluster share. None: a new bus.
        tasks: owner of the plane's background tasks.
        on_unreadable: called for each message that can't be read.
    """

    def __init__(
        self,
        limits: PlaneLimits | None = None,
        bus: InprocBus | None = None,
        tasks: BackgroundTasks | None = None,
        on_unreadable: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(InprocTransport(bus), limits or PlaneLimits(), tasks, on_unreadable)
