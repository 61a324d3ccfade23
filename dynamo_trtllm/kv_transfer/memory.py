"""Name memory that is sent or received, access it, and check that it fits a transfer."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import NamedTuple

from dynamo_trtllm.protocol.errors import TransferFailed


class MemoryRegion(NamedTuple):
    """Contiguous memory, which its owner keeps alive and unchanged while a backend uses it."""

    address: int  # virtual address in this process
    num_bytes: int
    device: str = "cpu"  # or "cuda:N"


def view(region: MemoryRegion) -> memoryview:
    """Return the bytes of a region of host memory as a writable view, without a copy.

    The caller keeps the memory alive while it uses the view.
    """
    # A view of no bytes can't be cast.
    if region.num_bytes == 0:
        return memoryview(bytearray())
    chars = (ctypes.c_char * region.num_bytes).from_address(region.address)
    return memoryview(chars).cast("B")


def address_of(buffer: mmap.mmap | bytearray) -> int:
    """Return the address of a writable buffer.

    The buffer must not be resized or freed while the address is used.
    """
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def require_cpu(regions: Sequence[MemoryRegion], backend: str) -> None:
    """Check that all regions are in host memory.

    Raises:
        TransferFailed: a region is on another device, which the error names.
    """
    for region in regions:
        if region.device != "cpu":
            raise TransferFailed(
                f"transfer backend {backend} supports CPU memory only, not {region.device}; use"
                " transfer backend nixl"
            )


def require_sizes(transfer_id: str, theirs: Sequence[int], regions: Sequence[MemoryRegion]) -> None:
    """Check that the destination regions have the published sizes, in the same order.

    Args:
        transfer_id: the id of the transfer.
        theirs: the sizes of the published regions, in bytes.
        regions: the destination.

    Raises:
        TransferFailed: they differ.
    """
    ours = [region.num_bytes for region in regions]
    if len(ours) != len(theirs):
        raise TransferFailed(
            f"KV transfer {transfer_id}: {len(theirs)} regions at prefill, {len(ours)} at decode"
        )
    for index, (at_prefill, at_decode) in enumerate(zip(theirs, ours, strict=True)):
        if at_prefill != at_decode:
            raise TransferFailed(
                f"KV transfer {transfer_id}: region {index} has {at_prefill} bytes at prefill,"
                f" {at_decode} at decode"
            )
