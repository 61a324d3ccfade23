"""The interface of KV transfer backends: `nixl` and `tcp`, and `loopback` within one process.

The decode side reads one-sided. A backend moves pieces (address, bytes, device). The engine gathers KV blocks into
pieces and scatters them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from dynamo_trtllm.kv_transfer.checksums import Checksums


class MemoryRegion(NamedTuple):
    """Contiguous memory its owner keeps alive and unchanged while a backend uses it."""

    address: int
    num_bytes: int
    device: str = "cpu"  # or "cuda:0" …


OnRegion: TypeAlias = Callable[[int], None]


class TransferBackend(Protocol):
    """One per engine. All calls are made from the event loop; blocking vendor calls run on threads inside."""

    name: str  # for tickets, logs and people: "nixl/ucx", "tcp", "loopback"
    checksums: Checksums

    async def start(self, on_fetched: Callable[[str], None]) -> None:
        """`on_fetched(ticket_id)` is called on the loop each time a peer says that it has read an offer."""
        ...

    async def register(self, region: MemoryRegion) -> None:
        """Makes memory known once, until `aclose`: what is offered or fetched within it then needs no registration.

        Raises TransferFailed, and leaves nothing behind, for memory that this backend can't move.
        """
        ...

    async def offer(self, ticket_id: str, pieces: Sequence[MemoryRegion], *, ready: int | None = None) -> bytes:
        """Make the pieces readable for every holder of the returned bytes, until `withdraw`. Raises TransferFailed.

        Only the first `ready` pieces hold their data yet (None: all); a reader waits for `advance` with the others.
        """
        ...

    def advance(self, ticket_id: str, ready: int) -> None:
        """The first `ready` pieces of an offer hold their data. Unknown tickets are no error."""
        ...

    async def withdraw(self, ticket_id: str) -> None:
        """Ends an offer; its memory may be reused when this returns. Unknown tickets are no error."""
        ...

    async def fetch(
        self,
        ticket_id: str,
        offer: bytes,
        pieces: Sequence[MemoryRegion],
        *,
        timeout_s: float,
        on_piece: OnRegion | None = None,
    ) -> None:
        """Read an offer of equal piece sizes into own memory and notify its holder. Nothing is written to `pieces`
        after this returns, raises or is cancelled. Raises TransferTimeout, TransferFailed (peer dead, offer gone, wrong
        checksum).

        `on_piece(index)` is called for every piece in order as soon as it is whole, on the loop or on a thread of the
        backend, never after this has ended; it must be quick. The data is not valid before this returns: some backends
        compare the checksum of all pieces last.
        """
        ...

    def check(self) -> None:
        """Raise EngineFailed when this backend can no longer send or fetch KV. Called often; must be cheap."""
        ...

    async def aclose(self) -> None: ...
