"""The carrier seam: one-sided read by the decode side. `loopback` is the in-process twin; `nixl` and `tcp` are real.

A carrier moves pieces (address, bytes, device). Gathering KV blocks into pieces and scattering them is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class Piece(NamedTuple):
    """Contiguous memory its owner keeps alive and unchanged while a carrier uses it."""

    address: int
    num_bytes: int
    device: str = "cpu"  # or "cuda:0" …


class Carrier(Protocol):
    """One per engine. All calls are made from the event loop; blocking vendor calls run on threads inside."""

    name: str  # for tickets, logs and people: "nixl/ucx", "tcp", "loopback"

    async def start(self, on_fetched: Callable[[str], None]) -> None:
        """`on_fetched(ticket_id)` is called on the loop each time a peer says that it has read an offer."""
        ...

    async def offer(self, ticket_id: str, pieces: Sequence[Piece]) -> bytes:
        """Makes the pieces readable by whoever holds the returned bytes, until `withdraw`. Raises TransferFailed."""
        ...

    async def withdraw(self, ticket_id: str) -> None:
        """Ends an offer; its memory may be reused when this returns. Unknown tickets are no error."""
        ...

    async def fetch(self, ticket_id: str, offer: bytes, pieces: Sequence[Piece], *, timeout_s: float) -> None:
        """Reads an offer of equal piece sizes into own memory and tells its holder. Nothing is written to `pieces`
        after this returns, raises or is cancelled. Raises HandoffTimeout, TransferFailed (peer dead, offer gone)."""
        ...

    async def aclose(self) -> None: ...
