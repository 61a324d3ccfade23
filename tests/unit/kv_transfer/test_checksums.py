"""The checksum of an offer at its holder: over blocks of pieces, ended with the offer, and its
failures named.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import NoReturn

import pytest

from dynamo_trtllm.kv_transfer.checksums import (
    BLOCK_BYTES,
    NOTHING,
    Checksums,
    OfferChecksum,
    combined,
)
from dynamo_trtllm.kv_transfer.memory import MemoryRegion, address_of
from dynamo_trtllm.protocol.errors import TransferFailed


@pytest.fixture
def checksums() -> Iterator[Checksums]:
    made = Checksums("on")
    yield made
    made.close()


async def test_hashes_of_several_blocks_are_in_order(checksums: Checksums) -> None:
    memory = bytearray(range(256)) * ((BLOCK_BYTES + 512) // 256)
    region = MemoryRegion(address_of(memory), len(memory))
    found = list[int | None]()
    expected = [
        checksums.hash(MemoryRegion(region.address + begin, size))
        for begin, size in ((0, BLOCK_BYTES), (BLOCK_BYTES, 512))
    ]
    offer = OfferChecksum(checksums, [region], found.append)
    offer.mark_ready(1)
    assert await offer.hashes(0) == expected
    await offer.stop()
    assert found == [combined(NOTHING, expected)]


async def test_advance_does_not_read_withdrawn_memory(checksums: Checksums) -> None:
    memory = bytearray(1000)
    found = list[int | None]()
    offer = OfferChecksum(checksums, [MemoryRegion(address_of(memory), len(memory))], found.append)
    await offer.stop()
    offer.mark_ready(1)  # of a copy that ended afterwards
    assert found == []


async def test_hashes_that_cannot_be_computed_fail_the_transfer(checksums: Checksums) -> None:
    def broken(region: MemoryRegion) -> NoReturn:
        raise RuntimeError("the GPU is gone")

    checksums.device_checksum = broken
    offer = OfferChecksum(checksums, [MemoryRegion(0, 8, "cuda:0")])
    offer.mark_ready(1)
    with pytest.raises(TransferFailed, match="the GPU is gone"):
        await offer.hashes(0)


async def test_stop_waits_for_a_checksum_report(checksums: Checksums) -> None:
    memory = bytearray(BLOCK_BYTES)
    found = list[int | None]()
    has_begun = threading.Event()

    def slow(checksum: int | None) -> None:
        has_begun.set()
        threading.Event().wait(0.02)  # nothing tells this thread that `stop` was called
        found.append(checksum)

    offer = OfferChecksum(checksums, [MemoryRegion(address_of(memory), len(memory))], slow)
    offer.mark_ready(1)
    await asyncio.to_thread(has_begun.wait)
    await offer.stop()
    assert len(found) == 1


def test_submit_all_of_empty_piece_hashes_nothing(checksums: Checksums) -> None:
    assert (
        checksums.submit_all(MemoryRegion(0, 0, "cuda:0"))
        == checksums.submit_all(MemoryRegion(0, 0))
        == []
    )
