"""Exchange readiness and metrics between a frontend process and its parent over a socket pair.

Both ends work alike: either may request a snapshot of the other's metrics. Requests and tokens
never take this path.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from dynamo_trtllm.protocol.errors import DeadlineExceeded, Disconnected
from dynamo_trtllm.protocol.messages import decode, encode
from dynamo_trtllm.protocol.number_types import Number

_LENGTH: Final = struct.Struct("<I")


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """A request for a snapshot of the receiver's metrics, the reply to one, or news of the sender.

    A message that is none of these says that its sender is ready. The parent is ready once all
    processes are.
    """

    request: Number = 0  # the number of a request, counted from 1; 0: this is no request
    reply: Number = 0  # the number of the request that is answered; 0: this is no reply
    snapshot: bytes = b""  # the snapshot of a reply
    is_stop: bool = False  # the sender announces that it will be stopped


async def no_metrics() -> bytes:
    return b""


@dataclass(eq=False)
class ControlPipe:
    """One end of the pipe, which owns `reader` and `writer`.

    Args:
        snapshot: produces the reply to a request: metrics in the Prometheus text format.
        on_ready: called when the other end is ready.
    """

    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    snapshot: Callable[[], Awaitable[bytes]] = no_metrics
    _on_ready: Callable[[], None] = lambda: None
    _numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1), init=False)
    # The replies that are awaited, by the numbers of their requests.
    _waiting: dict[int, asyncio.Future[bytes]] = field(default_factory=dict, init=False)
    is_other_ready: bool = field(default=False, init=False)
    is_stop_announced: bool = field(default=False, init=False)  # by the other end

    async def run(self) -> None:
        """Handle messages until the other end is closed."""
        try:
            async with asyncio.TaskGroup() as group:
                while (message := await self._read_message()) is not None:
                    if message.request:
                        group.create_task(self._reply(message.request))
                    elif message.reply:
                        future = self._waiting.get(message.reply)
                        if future is not None and not future.done():
                            future.set_result(message.snapshot)
                    elif message.is_stop:
                        self.is_stop_announced = True
                    else:
                        self.is_other_ready = True
                        self._on_ready()
        finally:
            self.close()

    def close(self) -> None:
        """Close the pipe and fail the requests that wait for a reply. Idempotent."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._disconnected())
        self._writer.close()

    def send_ready(self) -> None:
        self._send(_Message())

    def announce_stop(self) -> None:
        """Let the other end know that both will be stopped."""
        self._send(_Message(is_stop=True))

    async def request_snapshot(self, within_s: float) -> bytes:
        """Request the other end's snapshot.

        Raises:
            DeadlineExceeded: no reply within `within_s` seconds.
            Disconnected: the other end is closed.
        """
        if self._writer.is_closing():
            raise self._disconnected()
        number = next(self._numbers)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._send(_Message(request=number))
            async with asyncio.timeout(within_s):
                return await future
        except TimeoutError:
            raise DeadlineExceeded(
                f"no metrics from the other frontend process within {within_s:g} s"
            ) from None
        finally:
            del self._waiting[number]

    async def _reply(self, number: int) -> None:
        self._send(_Message(reply=number, snapshot=await self.snapshot()))

    def _send(self, message: _Message) -> None:
        data = encode(message)
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(data)) + data)

    async def _read_message(self) -> _Message | None:
        """Return the next message; None if the other end is closed."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return decode(await self._reader.readexactly(length), _Message)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    @staticmethod
    def _disconnected() -> Disconnected:
        return Disconnected("the other frontend process has exited")
