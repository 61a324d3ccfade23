"""The guards of offers: one page of slots that readers look at, over the same backend as the data.

A slot holds 16 random bytes, which are wiped when its offer is withdrawn, then the number of pieces that hold their
data, and the checksum of all pieces once it is known. Readers without checksums read only the part before it.
Readers read the guard of an offer into a slot of their own. One that has read the offer writes the first of the random
bytes behind the count: a late word about another offer says nothing. NIXL's own notifications are not used: the next
read from the same peer ends only when its holder has looked for them.
"""

from __future__ import annotations

import mmap
import secrets
from typing import NamedTuple

from dynamo_trtllm.errors import TransferFailed
from dynamo_trtllm.kv_transfer.base import address_of

NONCE_BYTES = 16
COUNT_BYTES = 8
ACK_BYTES = 8
CHECKSUM_BYTES = 8
PLAIN_BYTES = NONCE_BYTES + COUNT_BYTES + ACK_BYTES  # the size of a guard without a checksum
SLOT_BYTES = PLAIN_BYTES + CHECKSUM_BYTES
_ACK_OFFSET = NONCE_BYTES + COUNT_BYTES
SLOTS = 4096  # offers and fetches at once


class Validity(NamedTuple):
    nonce: bytes
    ready: int
    checksum: int  # 0: not there yet


class ValiditySlots:
    """Slots of one process. Taken and freed on any thread: list operations are atomic."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, SLOTS * SLOT_BYTES)
        self.address = address_of(self._page)
        self.num_bytes = len(self._page)
        self.free_slots = list(range(SLOTS))

    def acquire(self) -> int:
        """A free slot. Raises TransferFailed when there is none."""
        if not self.free_slots:
            raise TransferFailed(f"transfer backend nixl has {SLOTS} offers and fetches open; withdraw some")
        return self.free_slots.pop()

    def release(self, slot: int) -> None:
        self.clear(slot)
        self.free_slots.append(slot)

    def activate(self, slot: int, ready: int) -> bytes:
        """From here on the slot says that its offer stands. Returns the nonce that it holds."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._clear_ack(slot)
        self.set_checksum(slot, 0)
        self.mark_ready(slot, ready)
        self._page[slot * SLOT_BYTES : slot * SLOT_BYTES + NONCE_BYTES] = nonce
        return nonce

    def mark_ready(self, slot: int, ready: int) -> None:
        begin = slot * SLOT_BYTES + NONCE_BYTES
        self._page[begin : begin + COUNT_BYTES] = ready.to_bytes(COUNT_BYTES, "little")  # eight bytes at once

    def set_checksum(self, slot: int, checksum: int) -> None:
        """Let readers see the checksum of all pieces. Callable on any thread."""
        begin = slot * SLOT_BYTES + PLAIN_BYTES
        self._page[begin : begin + CHECKSUM_BYTES] = checksum.to_bytes(CHECKSUM_BYTES, "little")

    def clear(self, slot: int) -> None:
        self._page[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = bytes(SLOT_BYTES)

    def was_read(self, slot: int) -> bool:
        """Whether a reader said so since the last time it was asked."""
        entry = self._page[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]
        if entry[_ACK_OFFSET:PLAIN_BYTES] != entry[:ACK_BYTES] or not any(entry[:NONCE_BYTES]):
            return False
        self._clear_ack(slot)
        return True

    def _clear_ack(self, slot: int) -> None:
        begin = slot * SLOT_BYTES + _ACK_OFFSET
        self._page[begin : begin + ACK_BYTES] = bytes(ACK_BYTES)

    def get(self, slot: int) -> Validity:
        entry = self._page[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]
        ready, checksum = entry[NONCE_BYTES : NONCE_BYTES + COUNT_BYTES], entry[PLAIN_BYTES:]
        return Validity(entry[:NONCE_BYTES], int.from_bytes(ready, "little"), int.from_bytes(checksum, "little"))

    def descriptor(self, slot: int) -> tuple[int, int, int]:
        """Return where a slot is: address, size in bytes without the checksum, device."""
        return self.address + slot * SLOT_BYTES, PLAIN_BYTES, 0

    def ack_word(self, slot: int) -> tuple[int, int, int]:
        """Where a reader has the word that says that it has read the offer whose guard it looked at."""
        return self.address + slot * SLOT_BYTES, ACK_BYTES, 0


def with_checksum(validity_slot: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return where a guard is, with its checksum included."""
    address, _, device = validity_slot
    return address, SLOT_BYTES, device


def ack_address(validity_slot: tuple[int, int, int]) -> tuple[int, int, int]:
    """Where in a holder's guard that word belongs."""
    address, _, device = validity_slot
    return address + _ACK_OFFSET, ACK_BYTES, device
