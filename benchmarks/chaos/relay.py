"""Relays between client and server that can cut connections, drop or repeat NATS messages, and
change bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

Copies = Callable[[bytes], int]  # message body → copies to forward
Change = Callable[[bytes], bytes]  # received bytes → forwarded bytes

_LINE_BYTES = 1 << 20  # the longest line of NATS' protocol is INFO
_WITH_BODY = (b"MSG", b"HMSG", b"PUB", b"HPUB")  # their last word is the size of the body


class Relay:
    """A TCP relay to a server. Cutting it does not stop the server."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("nats://").rpartition(":")
        self._target = (host, int(port))
        self._server: asyncio.Server | None = None
        self._port = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, address: str) -> Self:
        """Start a relay to the server at `address` (host:port, or a NATS URL)."""
        relay = cls(address)
        await relay.mend()
        return relay

    def point_at(self, host: str, port: int) -> None:
        """Set the server for further connections."""
        self._target = (host, port)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def mend(self) -> None:
        """Accept connections, at the same port as before a cut."""
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", self._port, limit=_LINE_BYTES
        )
        self._port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Close all connections and stop accepting new ones."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        if self._pumps:
            await asyncio.wait(self._pumps)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target, limit=_LINE_BYTES)
        except OSError:
            writer.transport.abort()
            return
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await self._next(source):
                sink.write(data)
                await sink.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            sink.close()

    async def _next(self, source: asyncio.StreamReader) -> bytes:
        """Return the next bytes to forward, or b"" at the end."""
        return await source.read(65536)


class NatsRelay(Relay):
    """Forwards NATS messages. `copies` returns how often to forward a message. None: once."""

    copies: Copies | None = None

    async def _next(self, source: asyncio.StreamReader) -> bytes:
        while True:
            line = await source.readuntil(b"\r\n")
            words = line.split()
            if not words or words[0].upper() not in _WITH_BODY:
                return line
            body = await source.readexactly(int(words[-1]) + 2)
            times = 1 if self.copies is None else self.copies(body[:-2])
            if times:
                return (line + body) * times


class ChangingRelay(Relay):
    """Applies `change` to all bytes that it forwards."""

    change: Change | None = None

    async def _next(self, source: asyncio.StreamReader) -> bytes:
        data = await super()._next(source)
        return data if self.change is None or not data else self.change(data)
