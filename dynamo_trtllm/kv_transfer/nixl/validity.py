"""Manage validity slots, which show whether the memory of a published transfer is still valid.

Readers read slots over NIXL, like the KV. A slot contains, in this order:

* a nonce of 16 random bytes, which is cleared when the transfer is unpublished
* the number of regions that hold their data
* the acknowledgment
* the checksum of all regions, once it is known. Readers without checksums do not read this part.

A reader copies the slot into a slot of its own. After a successful read, it writes the first 8
bytes of the nonce into the prefill worker's slot as the acknowledgment. So a late acknowledgment of
an earlier transfer has no effect. Notifications of NIXL are not used, because the next read from
the same peer would wait until the peer has received them.
"""

from __future__ import annotations

import mmap
import secrets
from typing import NamedTuple

from dynamo_trtllm.kv_transfer.memory import address_of
from dynamo_trtllm.protocol.errors import TransferFailed

NONCE_BYTES = 16
COUNT_BYTES = 8
ACK_BYTES = 8
CHECKSUM_BYTES = 8
PLAIN_BYTES = NONCE_BYTES + COUNT_BYTES + ACK_BYTES  # a slot without the checksum
SLOT_BYTES = PLAIN_BYTES + CHECKSUM_BYTES
ACK_OFFSET = NONCE_BYTES + COUNT_BYTES
SLOTS = 4096  # most published transfers and fetches together


class Validity(NamedTuple):
    """The content of a slot, without the acknowledgment."""

    nonce: bytes
    ready: int  # number of regions that hold their data
    checksum: int  # 0: not known yet


class ValiditySlots:
    """The slots of one process.

    `acquire` and `release` are thread-safe, because list operations are atomic.
    """

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, SLOTS * SLOT_BYTES)
        self.address = address_of(self._page)
        self.num_bytes = len(self._page)
        self.free_slots = list(range(SLOTS))

    def acquire(self) -> int:
        """Return a free slot.

        Raises:
            TransferFailed: all slots are in use.
        """
        if not self.free_slots:
            raise TransferFailed(
                f"transfer backend nixl has {SLOTS} transfers open; retry when some have ended"
            )
        return self.free_slots.pop()

    def release(self, slot: int) -> None:
        """Clear a slot and make it available again."""
        self.clear(slot)
        self.free_slots.append(slot)

    def activate(self, slot: int, ready: int) -> bytes:
        """Mark a transfer as published.

        Args:
            ready: the number of regions that hold their data.

        Returns:
            The nonce in the slot.
        """
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._write(slot, ACK_OFFSET, bytes(ACK_BYTES))
        self.set_checksum(slot, 0)
        self.mark_ready(slot, ready)
        self._write(slot, 0, nonce)
        return nonce

    def mark_ready(self, slot: int, ready: int) -> None:
        """Publish that the first `ready` regions hold their data."""
        self._write(slot, NONCE_BYTES, ready.to_bytes(COUNT_BYTES, "little"))

    def set_checksum(self, slot: int, checksum: int | None) -> None:
        """Publish the checksum of all regions.

        Thread-safe. None: the checksum can't be computed, so reads of the transfer have to fail.
        """
        if checksum is None:
            self.clear(slot)
            return
        self._write(slot, PLAIN_BYTES, checksum.to_bytes(CHECKSUM_BYTES, "little"))

    def clear(self, slot: int) -> None:
        """Clear a slot, so that reads of its transfer fail from now on."""
        self._write(slot, 0, bytes(SLOT_BYTES))

    def _write(self, slot: int, offset: int, content: bytes) -> None:
        """Write a part of a slot at once, so that readers see a complete value of 8 bytes."""
        begin = slot * SLOT_BYTES + offset
        self._page[begin : begin + len(content)] = content

    def was_read(self, slot: int) -> bool:
        """Return whether a reader has acknowledged since the last call."""
        entry = self._page[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]
        if entry[ACK_OFFSET:PLAIN_BYTES] != entry[:ACK_BYTES]:
            return False
        # In a cleared slot, nonce and acknowledgment are zeros. This is no acknowledgment.
        if not any(entry[:NONCE_BYTES]):
            return False
        self._write(slot, ACK_OFFSET, bytes(ACK_BYTES))
        return True

    def get(self, slot: int) -> Validity:
        """Return the content of a slot."""
        entry = self._page[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]
        ready = entry[NONCE_BYTES : NONCE_BYTES + COUNT_BYTES]
        checksum = entry[PLAIN_BYTES:]
        return Validity(
            nonce=entry[:NONCE_BYTES],
            ready=int.from_bytes(ready, "little"),
            checksum=int.from_bytes(checksum, "little"),
        )

    def descriptor(self, slot: int) -> tuple[int, int, int]:
        """Return NIXL's descriptor of a slot without its checksum.

        That is: address, size in bytes, device.
        """
        address = self.address + slot * SLOT_BYTES
        return address, PLAIN_BYTES, 0


def part_of_slot(
    validity_slot: tuple[int, int, int], num_bytes: int, offset: int = 0
) -> tuple[int, int, int]:
    """Return the descriptor of a part of a slot, given that of the slot.

    The acknowledgment is ACK_BYTES at ACK_OFFSET. A reader sends the first ACK_BYTES of the nonce
    in its own slot.
    """
    address, _, device = validity_slot
    return address + offset, num_bytes, device


def with_checksum(validity_slot: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the descriptor of a whole slot, given that of the slot without its checksum."""
    address, _, device = validity_slot
    return address, SLOT_BYTES, device
