"""What a request plane needs of a message transport, and the heartbeat to the peers at its other end.

Transports deliver at most once, and in order per pair of listener and sender; `linked` builds on that alone.
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
    async def stop(self) -> None:
        """No more is received. Idempotent."""
        ...


class Transport(Protocol):
    @property
    def max_message_bytes(self) -> int: ...

    def new_inbox(self) -> str:
        """Return a subject that no other client uses."""
        ...

    def on_disconnect(self, callback: OnDisconnect) -> None:
        """Call `callback` whenever messages may have been lost."""
        ...

    def unavailable_reason(self) -> str | None:
        """See `base.Plane`."""
        ...

    async def subscribe(self, subject: str, receive: Receive) -> Subscription:
        """What this link itself sends from now on to `subject`, or asks to be sent there, arrives."""
        ...

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Return the reply. Raises Unreachable when no worker listens (at once) or replies in time, Disconnected."""
        ...

    def publish(self, subject: str, data: bytes) -> None:
        """Send without awaiting; never raises."""
        ...

    async def aclose(self) -> None:
        """After what was posted is sent, as far as that is possible. Idempotent."""
        ...


class Heartbeat:
    """Asks each peer with running streams, once per interval, whether it is alive.

    A message transport does not report when a peer dies. `message` returns what to send to a peer, and `heard` a number
    that changes with each sign of life from it. `on_peer_lost` is called when a peer
    gave none. The owner reads the answers.
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
        """Count one stream less. Return whether it was the last: a peer with none is not asked."""
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
        """Ask `peer`, twice when the first question is not answered and nothing else comes from it meanwhile.

        One message may be lost, and a process that stood still itself was not there to hear the answer.
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
        """Stop asking. Idempotent."""
        task, self._task = self._task, None
        await self._tasks.cancel(task)
