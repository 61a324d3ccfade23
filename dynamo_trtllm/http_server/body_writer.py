"""Write response bodies to sockets without ASGI's coroutines per chunk, and headers together with the first chunk.

This works only with this package's HTTP server.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

WRITER: Final = "dynamo_trtllm.writer"
"""Key in the ASGI state of a request: the `BodyWriter` of its response."""


class BodyWriter(Protocol):
    """A writer of one chunked response body."""

    def is_ready(self) -> bool:
        """Return True if the client is connected and keeps up. Called before each `write`."""
        ...

    def write(self, data: bytes) -> None:
        """Queue data for the end of the loop's turn. It must not be empty, nor the first or the last chunk."""
        ...

    def flush(self) -> None:
        """Send the queued data. Called before anything is sent through ASGI."""
        ...

    def abort(self) -> None:
        """Close the connection. Data that the client has not read is lost."""
        ...


class FlushBatch:
    """The responses written to in this turn of the event loop. Each is flushed once, at the end of the turn.

    A worker's message contains tokens of many responses, and of each response several if they arrive fast.
    """

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
    """The `BodyWriter` of one request's response."""

    __slots__ = ("_batch", "_chunks", "_cycle")

    def __init__(self, cycle: RequestResponseCycle, batch: FlushBatch) -> None:
        self._cycle = cycle
        self._batch = batch
        self._chunks: list[bytes] = []

    def is_ready(self) -> bool:
        return not (self._cycle.flow.write_paused or self._cycle.disconnected)

    def write(self, data: bytes) -> None:
        if not self._chunks:
            self._batch.add(self)
        self._chunks.append(data)

    def flush(self) -> None:
        chunks = self._chunks
        if not chunks:
            return
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        if not self._cycle.transport.is_closing():
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def abort(self) -> None:
        self._cycle.transport.abort()


class HeldHead(asyncio.Transport):
    """A transport that delays a response's headers, to send them together with the first body data.

    It sends them alone at the end of the loop's turn if there is no data. uvicorn sends them in a packet of their own,
    which wakes the client once more. Not used for responses to HEAD.
    """

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
        """Send the headers and `rest`, once. Later writes go directly to the transport."""
        if self._cycle.transport is not self:
            return
        self._cycle.transport = self._transport
        if self._head and not self._transport.is_closing():
            self._transport.write(self._head + rest)
