"""What a request plane needs of a message carrier, and the watch over the peers at its other end.

Carriers are at most once and in order per pair of listener and poster; all else is made of that in `linked`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol, TypeAlias

from dynamo_trtllm.errors import DynamoError, PlaneError
from dynamo_trtllm.plane.stream import PING

logger = logging.getLogger(__name__)

Receive: TypeAlias = Callable[[bytes, str], None]  # data, reply subject ("" when no reply is wanted); never blocks
Lost: TypeAlias = Callable[[DynamoError], None]

_STOOD_STILL = 1.5  # times the interval that an answer may take: a time-out that came later came to a busy loop


class Listening(Protocol):
    async def stop(self) -> None:
        """No more is received. Idempotent."""
        ...


class Link(Protocol):
    @property
    def max_message_bytes(self) -> int: ...

    def new_inbox(self) -> str:
        """A subject nobody else has."""
        ...

    def on_lost(self, lost: Lost) -> None:
        """Call `lost` whenever messages may have been lost."""
        ...

    def outage(self) -> str | None:
        """See `base.Plane`."""
        ...

    async def listen(self, subject: str, receive: Receive) -> Listening:
        """What this link itself sends from now on to `subject`, or asks to be sent there, arrives."""
        ...

    async def ask(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """The reply. Raises Unreachable when nobody listens (at once) or replies in time, Disconnected."""
        ...

    def post(self, subject: str, data: bytes) -> None:
        """Send without awaiting; never raises."""
        ...

    async def aclose(self) -> None:
        """After what was posted is sent, as far as that is possible. Idempotent."""
        ...


class PeerWatch:
    """Asks the peers of running streams whether they are there: a carrier does not tell when one dies."""

    def __init__(self, link: Link, interval_s: float, lost: Callable[[str, DynamoError], None]) -> None:
        self._link = link
        self._interval_s = interval_s
        self._lost = lost
        self._streams: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None

    def add(self, peer: str) -> None:
        """One more stream with `peer`."""
        self._streams[peer] += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="plane-peer-watch")

    def remove(self, peer: str) -> None:
        self._streams[peer] -= 1
        if self._streams[peer] <= 0:
            del self._streams[peer]

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            async with asyncio.TaskGroup() as group:
                for peer in list(self._streams):
                    group.create_task(self._ping(peer))

    async def _ping(self, peer: str) -> None:
        """A process that itself stood still asks once more: the answer had not the time that it was to have."""
        clock = asyncio.get_running_loop().time
        for is_last in (False, True):
            asked_s = clock()
            try:
                await self._link.ask(peer, PING, timeout_s=self._interval_s)
                return
            except PlaneError as exc:
                if is_last or clock() - asked_s < _STOOD_STILL * self._interval_s:
                    self._lost(peer, exc)
                    return

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
