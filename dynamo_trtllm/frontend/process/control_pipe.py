"""Exchange readiness and metrics between a frontend process and its parent over a socket pair.

Both ends work alike: either may request the other's snapshot. Requests and tokens never take this path.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from dynamo_trtllm.errors import DeadlineExceeded, Disconnected
from dynamo_trtllm.messages import decode, encode
from dynamo_trtllm.observability.metrics_aggregator import Snapshot

_LENGTH: Final = struct.Struct("<I")


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The sender is ready. From the parent: all processes are ready."""


class MetricsRequest(msgspec.Struct, frozen=True, tag=True):
    """A request for the receiver's metrics snapshot."""

    number: int


class MetricsReply(msgspec.Struct, frozen=True, tag=True):
    """The reply to the `MetricsRequest` of the same number."""

    number: int
    snapshot: Snapshot


class _Message(msgspec.Struct, frozen=True, array_like=True):
    body: Ready | MetricsRequest | MetricsReply


class ControlPipe:
    """One end of the pipe, which owns `reader` and `writer`.

    Args:
        snapshot: produces the reply to a request.
        on_ready: called when the other end is ready.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        snapshot: Callable[[], Awaitable[Snapshot]],
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._snapshot = snapshot
        self._on_ready = on_ready
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Snapshot]] = {}
        self._is_closed = False
        self.is_other_ready = False

    async def run(self) -> None:
        """Handle messages until the other end is closed."""
        try:
            async with asyncio.TaskGroup() as group:
                while (message := await self._next()) is not None:
                    match message:
                        case Ready():
                            self.is_other_ready = True
                            self._on_ready()
                        case MetricsRequest(number):
                            group.create_task(self._reply(number))
                        case MetricsReply(number, snapshot):
                            future = self._waiting.get(number)
                            if future is not None and not future.done():
                                future.set_result(snapshot)
        finally:
            self.close()

    def close(self) -> None:
        """Close the pipe and fail the requests that wait for a reply. Idempotent."""
        self._is_closed = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._disconnected())
        self._writer.close()

    def send_ready(self) -> None:
        self._send(Ready())

    async def request_snapshot(self, within_s: float) -> Snapshot:
        """Request the other end's snapshot.

        Raises:
            DeadlineExceeded: no reply within `within_s` seconds.
            Disconnected: the other end is closed.
        """
        if self._is_closed:
            raise self._disconnected()
        number = next(self._numbers)
        future: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._send(MetricsRequest(number))
            async with asyncio.timeout(within_s):
                return await future
        except TimeoutError:
            raise DeadlineExceeded(f"no metrics from the other frontend process within {within_s:g} s") from None
        finally:
            del self._waiting[number]

    async def _reply(self, number: int) -> None:
        self._send(MetricsReply(number, await self._snapshot()))

    def _send(self, body: Ready | MetricsRequest | MetricsReply) -> None:
        data = encode(_Message(body))
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(data)) + data)

    async def _next(self) -> Ready | MetricsRequest | MetricsReply | None:
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return decode(await self._reader.readexactly(length), _Message).body
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    @staticmethod
    def _disconnected() -> Disconnected:
        return Disconnected("the other frontend process has exited")
