"""KV over plain TCP, for hosts without NIXL: one connection per fetch, straight between sockets and memory.

Moves CPU memory only. An offer carries a random token, without which the listener gives nothing away; the bytes
themselves are not encrypted. One fetch is: `_ASK` and the ticket id, `_REPLY`, the pieces, `_ACK`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from dynamo_trtllm import codec
from dynamo_trtllm.errors import BadFrame, ConfigError, EngineFailed, HandoffTimeout, TransferFailed
from dynamo_trtllm.handoff.base import OnPiece, Piece
from dynamo_trtllm.handoff.memory import require_cpu, require_sizes, view

_log = logging.getLogger(__name__)

_MAGIC = b"DKV1"
_TOKEN_BYTES = 32
_ASK = struct.Struct(f"!4s{_TOKEN_BYTES}sH")  # magic, token, bytes of the ticket id that follows
_REPLY = struct.Struct("!4s?Q")  # magic, whether the offer stands, bytes that follow
_ACK = b"\x01"
_BACKLOG = 4096  # fetches that begin in one moment: one that finds no place here tries again seconds later
_ASK_TIMEOUT_S = 10.0  # a connection that does not ask is closed
_ACCEPT_PAUSE_S = 0.1  # after the system refused a connection, usually for lack of file descriptors


class _Offer(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    port: int
    token: bytes
    sizes_bytes: list[int]


@dataclass(slots=True, kw_only=True)
class _Held:
    pieces: tuple[Piece, ...]
    token: bytes
    ready: int  # pieces that hold their data
    advanced: asyncio.Event = field(default_factory=asyncio.Event)  # replaced each time
    readers: set[asyncio.Task[None]] = field(default_factory=set)

    async def until_ready(self, index: int) -> None:
        while self.ready <= index:
            await self.advanced.wait()


class TcpCarrier:
    """A Carrier over TCP. `bind_host` is where it listens, `advertise_host` how other hosts reach that."""

    name = "tcp"

    def __init__(self, bind_host: str = "0.0.0.0", advertise_host: str = "127.0.0.1") -> None:
        self._bind_host = bind_host
        self._advertise_host = advertise_host
        self._offers: dict[str, _Held] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def start(self, on_fetched: Callable[[str], None]) -> None:
        """Raises ConfigError when it can't listen at its host."""
        self._on_fetched = on_fetched
        family = socket.AF_INET6 if ":" in self._bind_host else socket.AF_INET
        try:
            self._listener = socket.create_server((self._bind_host, 0), family=family, backlog=_BACKLOG)
        except OSError as exc:
            raise ConfigError(f"carrier tcp can't listen at {self._bind_host}: {exc}") from exc
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listener), name="tcp-handoff-accept")

    # --- the holder's side ---------------------------------------------------------------------------------

    async def register(self, region: Piece) -> None:
        require_cpu([region], self.name)  # and that is all that it takes

    async def offer(self, ticket_id: str, pieces: Sequence[Piece], *, ready: int | None = None) -> bytes:
        require_cpu(pieces, self.name)
        if self._listener is None:
            raise TransferFailed("carrier tcp is not running; start it before it offers")
        if ticket_id in self._offers:
            raise TransferFailed(f"ticket {ticket_id} is already offered; withdraw it first")
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._offers[ticket_id] = _Held(
            pieces=tuple(pieces), token=token, ready=len(pieces) if ready is None else ready
        )
        return codec.encode(
            _Offer(
                host=self._advertise_host,
                port=self._listener.getsockname()[1],
                token=token,
                sizes_bytes=[piece.num_bytes for piece in pieces],
            )
        )

    def advance(self, ticket_id: str, ready: int) -> None:
        held = self._offers.get(ticket_id)
        if held is not None:
            held.ready = ready
            held.advanced.set()
            held.advanced = asyncio.Event()

    async def withdraw(self, ticket_id: str) -> None:
        held = self._offers.pop(ticket_id, None)
        if held is not None:
            await _stop(set(held.readers))

    def check(self) -> None:
        if self._accepting is not None and self._accepting.done():
            raise EngineFailed("KV transfer over tcp accepts no connections: its accept loop ended; restart the worker")

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as exc:
                _log.warning("carrier tcp can't accept a connection: %s", exc)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            task = asyncio.create_task(self._serve(connection), name="tcp-handoff-serve")
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        """One connection. What the peer does wrong ends it and concerns nobody else."""
        with connection:
            _prepare(connection)
            try:
                async with asyncio.timeout(_ASK_TIMEOUT_S):
                    ticket_id, token = await _read_ask(connection)
                held = self._offers.get(ticket_id)
                if held is None or not hmac.compare_digest(held.token, token):
                    await asyncio.get_running_loop().sock_sendall(connection, _REPLY.pack(_MAGIC, False, 0))
                    return
                await self._send(connection, ticket_id, held)
            except (OSError, TimeoutError, EOFError, BadFrame) as exc:
                _log.debug("carrier tcp: a connection ended early: %r", exc)

    async def _send(self, connection: socket.socket, ticket_id: str, held: _Held) -> None:
        reader = asyncio.current_task()
        assert reader is not None
        held.readers.add(reader)  # `withdraw` ends it: the memory is not ours any more
        try:
            loop = asyncio.get_running_loop()
            total_bytes = sum(piece.num_bytes for piece in held.pieces)
            await loop.sock_sendall(connection, _REPLY.pack(_MAGIC, True, total_bytes))
            for index, piece in enumerate(held.pieces):
                await held.until_ready(index)
                await loop.sock_sendall(connection, view(piece))
            await _receive(connection, memoryview(bytearray(len(_ACK))))
        finally:
            held.readers.discard(reader)
        self._on_fetched(ticket_id)

    # --- the reader's side ---------------------------------------------------------------------------------

    async def fetch(
        self,
        ticket_id: str,
        offer: bytes,
        pieces: Sequence[Piece],
        *,
        timeout_s: float,
        on_piece: OnPiece | None = None,
    ) -> None:
        try:
            facts = codec.decode(offer, _Offer)
        except BadFrame as exc:
            raise TransferFailed(f"ticket {ticket_id}: its offer is not one of carrier {self.name}") from exc
        require_cpu(pieces, self.name)
        require_sizes(ticket_id, facts.sizes_bytes, pieces)
        where = f"ticket {ticket_id}: its holder at {facts.host}:{facts.port}"
        try:
            async with asyncio.timeout(timeout_s):
                await self._read(ticket_id, facts, pieces, on_piece)
        except TimeoutError as exc:
            raise HandoffTimeout(f"{where} did not send all of it within {timeout_s:g} s") from exc
        except (OSError, EOFError, struct.error) as exc:
            raise TransferFailed(f"{where} broke off: {exc}") from exc

    async def _read(self, ticket_id: str, facts: _Offer, pieces: Sequence[Piece], on_piece: OnPiece | None) -> None:
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in facts.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            _prepare(connection)
            await loop.sock_connect(connection, (facts.host, facts.port))
            ticket = ticket_id.encode()
            await loop.sock_sendall(connection, _ASK.pack(_MAGIC, facts.token, len(ticket)) + ticket)
            head = bytearray(_REPLY.size)
            await _receive(connection, memoryview(head))
            magic, stands, total_bytes = _REPLY.unpack(head)
            if magic != _MAGIC:
                raise TransferFailed(f"ticket {ticket_id}: {facts.host}:{facts.port} is no KV holder")
            if not stands:
                raise TransferFailed(f"ticket {ticket_id}: its holder no longer offers it")
            if total_bytes != sum(facts.sizes_bytes):
                raise TransferFailed(f"ticket {ticket_id}: its holder sends {total_bytes} bytes, not as it offered")
            for index, piece in enumerate(pieces):
                await _receive(connection, view(piece))
                if on_piece is not None:
                    on_piece(index)
            await loop.sock_sendall(connection, _ACK)

    async def aclose(self) -> None:
        listener, self._listener = self._listener, None
        if listener is None:
            return
        await _stop({task for task in (self._accepting, *self._connections) if task is not None})
        listener.close()
        self._offers.clear()


def _prepare(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def _read_ask(connection: socket.socket) -> tuple[str, bytes]:
    head = bytearray(_ASK.size)
    await _receive(connection, memoryview(head))
    magic, token, ticket_bytes = _ASK.unpack(head)
    if magic != _MAGIC:
        raise BadFrame("not a request for KV")
    ticket = bytearray(ticket_bytes)
    await _receive(connection, memoryview(ticket))
    return ticket.decode(errors="replace"), token


async def _receive(connection: socket.socket, target: memoryview) -> None:
    """Fills `target`. Raises EOFError when the peer closes before that."""
    loop = asyncio.get_running_loop()
    at = 0
    while at < len(target):
        count = await loop.sock_recv_into(connection, target[at:])
        if count == 0:
            raise EOFError("the connection was closed")
        at += count


async def _stop(tasks: set[asyncio.Task[None]]) -> None:
    """Cancels tasks and waits for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
