"""Guards in memory: what readers say counts once, and only for the offer whose guard they looked
at.
"""

from __future__ import annotations

import ctypes

from dynamo_trtllm.kv_transfer.nixl.validity import (
    ACK_BYTES,
    ACK_OFFSET,
    Validity,
    ValiditySlots,
    part_of_slot,
)


def say(holder: ValiditySlots, slot: int, reader: ValiditySlots, own: int) -> None:
    """The result of a backend's read of the guard and of its write of the acknowledgement."""
    address, size, _ = holder.descriptor(slot)
    ctypes.memmove(reader.descriptor(own)[0], address, size)
    send(holder, slot, reader, own)


def send(holder: ValiditySlots, slot: int, reader: ValiditySlots, own: int) -> None:
    place, size, _ = part_of_slot(holder.descriptor(slot), ACK_BYTES, ACK_OFFSET)
    ctypes.memmove(place, part_of_slot(reader.descriptor(own), ACK_BYTES)[0], size)


def test_was_read_is_true_once_and_keeps_the_offer() -> None:
    holder = ValiditySlots()
    reader = ValiditySlots()
    slot = holder.acquire()
    own = reader.acquire()
    nonce = holder.activate(slot, 3)
    assert not holder.was_read(slot)
    for _ in range(2):
        say(holder, slot, reader, own)
        assert holder.was_read(slot)
        assert not holder.was_read(slot)
        assert holder.get(slot) == Validity(nonce, 3, 0)


def test_was_read_after_withdrawal_ignores_the_next_offer() -> None:
    holder = ValiditySlots()
    reader = ValiditySlots()
    slot = holder.acquire()
    own = reader.acquire()
    holder.activate(slot, 1)
    say(holder, slot, reader, own)
    holder.clear(slot)
    assert not holder.was_read(slot)
    send(holder, slot, reader, own)  # into a slot that is free
    assert not holder.was_read(slot)
    holder.activate(slot, 1)
    assert not holder.was_read(slot)
    send(holder, slot, reader, own)  # into one that is in use again
    assert not holder.was_read(slot)
