"""How answers reach their sockets: pieces of streams past ASGI, which takes a few coroutines for each, and a head
together with the first of what follows it. For our own server."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

WRITER: Final = "dynamo_trtllm.writer"
"""In the state of a request to our own server: a `BodyWriter` of its answer."""


class BodyWriter(Protocol):
    """Sends pieces of one answer of unknown length."""

    def is_ready(self) -> bool:
        """Whether the client is there and keeps up. Ask before each `write`."""
        ...

    def write(self, data: bytes) -> None:
        """Not empty, and neither the first piece nor the last. Sent soon, together with what comes till then."""
        ...

    def flush(self) -> None:
        """Sends what was written. Before anything goes another way."""
        ...

    def abort(self) -> None:
        """Closes the connection; what the client has not taken is lost."""
        ...


class FlushBatch:
    """The answers that were written to in this turn of the loop: each is sent once, at its end. A message from a
    worker holds the tokens of many answers, and, when they come fast, many tokens of each."""

    def __init__(self) -> None:
        self._written: list[CycleWriter] = []

    def add(self, writer: CycleWriter) -> None:
        if not self._written:
            asyncio.get_running_loop().call_soon(self._flush)
        self._written.append(writer)

    def _flush(self) -> None:
        written, self._written = self._written, []
        for writer in written:
            writer.flush()


class CycleWriter:
    """A `BodyWriter` of one request's answer."""

    __slots__ = ("_cycle", "_pieces", "_turn")

    def __init__(self, cycle: RequestResponseCycle, turn: FlushBatch) -> None:
        self._cycle = cycle
        self._turn = turn
        self._pieces: list[bytes] = []

    def is_ready(self) -> bool:
        return not (self._cycle.flow.write_paused or self._cycle.disconnected)

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._turn.add(self)
        self._pieces.append(data)

    def flush(self) -> None:
        pieces = self._pieces
        if not pieces:
            return
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if not self._cycle.transport.is_closing():
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def abort(self) -> None:
        self._cycle.transport.abort()


class HeldHead(asyncio.Transport):
    """The transport of one answer until its head is out: the head leaves with what is written next, and by itself at
    the end of the loop's turn. uvicorn would have the client wake up for it alone. Not for an answer to HEAD."""

    def __init__(self, cycle: RequestResponseCycle, transport: asyncio.Transport) -> None:
        super().__init__()
        self._cycle = cycle
        self._transport = transport
        self._head = b""

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def write(self, data: bytes) -> None:  # type: ignore[override]
        if self._head:
            self._send(data)
        else:
            self._head = data
            asyncio.get_running_loop().call_soon(self._send)

    def close(self) -> None:
        self._send()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def _send(self, rest: bytes = b"") -> None:
        """Once; from then on the answer is written to the transport itself."""
        if self._cycle.transport is not self:
            return
        self._cycle.transport = self._transport
        if self._head and not self._transport.is_closing():
            self._transport.write(self._head + rest)
