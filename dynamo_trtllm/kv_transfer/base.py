"""The interface of KV transfer backends: `nixl` and `tcp`, and `loopback` within one process.

The decode side reads one-sided. A backend moves pieces (address, bytes, device). The engine gathers KV blocks into
pieces and scatters them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from dynamo_trtllm.kv_transfer.checksums import Checksums
import ctypes
import mmap

from dynamo_trtllm.errors import TransferFailed


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

    async def publish(self, ticket_id: str, pieces: Sequence[MemoryRegion], *, ready: int | None = None) -> bytes:
        """Make the pieces readable for every holder of the returned bytes, until `unpublish`. Raises TransferFailed.

        Only the first `ready` pieces hold their data yet (None: all); a reader waits for `mark_ready` with the others.
        """
        ...

    def mark_ready(self, ticket_id: str, ready: int) -> None:
        """The first `ready` pieces of an offer hold their data. Unknown tickets are no error."""
        ...

    async def unpublish(self, ticket_id: str) -> None:
        """Ends an offer; its memory may be reused when this returns. Unknown tickets are no error."""
        ...

    async def read(
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


def view(piece: MemoryRegion) -> memoryview:
    """The bytes of a CPU piece, writable and not copied; the caller keeps the memory alive while it uses the view."""
    if not piece.num_bytes:
        return memoryview(bytearray())  # a view of no bytes can't be cast
    return memoryview((ctypes.c_char * piece.num_bytes).from_address(piece.address)).cast("B")


def require_cpu(pieces: Sequence[MemoryRegion], backend: str) -> None:
    """Raises TransferFailed naming the device when a piece is not in host memory."""
    for piece in pieces:
        if piece.device != "cpu":
            raise TransferFailed(
                f"transfer backend {backend} moves CPU memory only, not {piece.device}; use transfer backend nixl"
            )


def require_sizes(ticket_id: str, theirs: Sequence[int], pieces: Sequence[MemoryRegion]) -> None:
    """Raises TransferFailed unless own pieces have the sizes of the offer, in its order."""
    ours = [piece.num_bytes for piece in pieces]
    if ours == list(theirs):
        return
    if len(ours) != len(theirs):
        raise TransferFailed(f"ticket {ticket_id}: the offer has {len(theirs)} pieces, the destination {len(ours)}")
    at = next(i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b)
    raise TransferFailed(f"ticket {ticket_id}: piece {at} has {theirs[at]} bytes in the offer, {ours[at]} here")


def address_of(buffer: mmap.mmap | bytearray) -> int:
    """Where a writable buffer lies; it must not be resized or freed while the address is in use."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
