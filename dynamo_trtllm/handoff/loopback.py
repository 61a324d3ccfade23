"""The in-process twin of the carriers: offers live in a table of this process, a fetch is a memmove.

Moves CPU memory only and reaches no other process.
"""

from __future__ import annotations

import asyncio
import ctypes
import uuid
from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec

from dynamo_trtllm import codec
from dynamo_trtllm.errors import BadFrame, TransferFailed
from dynamo_trtllm.handoff.base import Piece
from dynamo_trtllm.handoff.memory import require_cpu, require_sizes


class _Offer(msgspec.Struct, frozen=True, kw_only=True):
    carrier_id: str
    sizes_bytes: list[int]


class LoopbackCarrier:
    """A Carrier between engines of one process. Peers find each other by the id in the offer."""

    name = "loopback"
    _open: ClassVar[dict[str, LoopbackCarrier]] = {}

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        self._offers: dict[str, tuple[Piece, ...]] = {}
        self._on_fetched: Callable[[str], None] | None = None

    async def start(self, on_fetched: Callable[[str], None]) -> None:
        self._on_fetched = on_fetched
        self._open[self._id] = self

    async def offer(self, ticket_id: str, pieces: Sequence[Piece]) -> bytes:
        require_cpu(pieces, self.name)
        if self._id not in self._open:
            raise TransferFailed("the loopback carrier is not running; start it before it offers")
        if ticket_id in self._offers:
            raise TransferFailed(f"ticket {ticket_id} is already offered; withdraw it first")
        self._offers[ticket_id] = tuple(pieces)
        return codec.encode(_Offer(carrier_id=self._id, sizes_bytes=[piece.num_bytes for piece in pieces]))

    async def withdraw(self, ticket_id: str) -> None:
        self._offers.pop(ticket_id, None)

    async def fetch(self, ticket_id: str, offer: bytes, pieces: Sequence[Piece], *, timeout_s: float) -> None:
        """See `Carrier.fetch`. The copy itself does not yield, so `timeout_s` can't pass within it."""
        try:
            facts = codec.decode(offer, _Offer)
        except BadFrame as exc:
            raise TransferFailed(f"ticket {ticket_id}: its offer is not one of carrier {self.name}") from exc
        require_cpu(pieces, self.name)
        require_sizes(ticket_id, facts.sizes_bytes, pieces)
        holder = self._open.get(facts.carrier_id)
        if holder is None:
            raise TransferFailed(f"ticket {ticket_id}: its holder is not in this process or is closed")
        sources = holder._offers.get(ticket_id)
        if sources is None:
            raise TransferFailed(f"ticket {ticket_id}: its holder no longer offers it")
        for source, target in zip(sources, pieces, strict=True):
            ctypes.memmove(target.address, source.address, source.num_bytes)
        if holder._on_fetched is not None:
            asyncio.get_running_loop().call_soon(holder._on_fetched, ticket_id)

    async def aclose(self) -> None:
        self._open.pop(self._id, None)
        self._offers.clear()
