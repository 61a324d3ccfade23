"""Implement the request plane in one process: the same plane as over NATS, with a dictionary as
transport.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from dynamo_trtllm.cluster.request_plane.client import PlaneLimits
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.cluster.request_plane.transport import (
    OnDisconnect,
    Receive,
    Unsubscribe,
    no_listener,
    no_reply,
)
from dynamo_trtllm.protocol.errors import Disconnected


class InprocTransport:
    """A `Transport` within this process.

    It delivers in order, in the next iteration of the event loop.
    """

    max_message_bytes = 1 << 20
    is_writing = False

    def __init__(self) -> None:
        self._listeners: dict[str, Receive] = {}
        self._numbers = itertools.count()
        self._closed = False

    def new_inbox(self) -> str:
        return f"_INBOX.{next(self._numbers)}"

    def on_disconnect(self, callback: OnDisconnect) -> None:
        """Ignore the callback: this transport loses no messages."""

    def unavailable_reason(self) -> str | None:
        return "the request plane is closed" if self._closed else None

    async def subscribe(
        self, subject: str, receive: Receive, caught_up: Callable[[], None] = lambda: None
    ) -> Unsubscribe:
        async def unsubscribe() -> None:
            self._listeners.pop(subject, None)

        def take(data: bytes, reply: str) -> None:
            receive(data, reply)
            caught_up()

        self._listeners[subject] = take
        return unsubscribe

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        if self._closed:
            raise Disconnected("the request plane is closed")
        if subject not in self._listeners:
            raise no_listener(subject)
        inbox = self.new_inbox()
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._listeners[inbox] = lambda data, _: None if reply.done() else reply.set_result(data)
        self._deliver_soon(subject, data, inbox)
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError as exc:
            raise no_reply(subject, timeout_s) from exc
        finally:
            del self._listeners[inbox]

    def publish(self, subject: str, data: bytes) -> None:
        self._deliver_soon(subject, data, "")

    def try_publish(self, subject: str, data: bytes) -> bool:
        self.publish(subject, data)
        return True

    def _deliver_soon(self, subject: str, data: bytes, reply: str) -> None:
        asyncio.get_running_loop().call_soon(self._deliver, subject, data, reply)

    def _deliver(self, subject: str, data: bytes, reply: str) -> None:
        receive = self._listeners.get(subject)
        if receive is not None:
            receive(data, reply)

    async def aclose(self) -> None:
        self._closed = True
        self._listeners.clear()


class InprocPlane(RequestPlane):
    """A request plane within one process. Workers and callers share one object."""

    def __init__(self, limits: PlaneLimits | None = None) -> None:
        super().__init__(InprocTransport(), limits or PlaneLimits())
