"""Helpers of transfer backends for pieces: views of raw memory and the sizes check. Owns and moves no memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

from dynamo_trtllm.errors import TransferFailed
from dynamo_trtllm.kv_transfer.base import MemoryRegion


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
