"""Pack the shares by which workers were selected into a number of a recorded event."""

from __future__ import annotations

from typing import Final, NamedTuple

_SHARE_BITS: Final = 16
_FULL_SHARE: Final = 1000


class PackedShares(NamedTuple):
    """The shares by which the workers of a request were selected. None: of a fixed role."""

    prefill: float | None  # of the worker that computes the prompt
    decode: float | None


def packed_shares(shares: PackedShares) -> int:
    """Return shares as a number of an event, in thousandths. 0: both workers have fixed roles."""
    number = 0
    for share in shares:
        part = 0 if share is None else 1 + round(share * _FULL_SHARE)
        number = number << _SHARE_BITS | part
    return number


def unpacked_shares(number: int) -> PackedShares:
    """Return the shares of a number of an event."""
    parts = (number >> _SHARE_BITS, number & ((1 << _SHARE_BITS) - 1))
    prefill, decode = ((part - 1) / _FULL_SHARE if part else None for part in parts)
    return PackedShares(prefill, decode)
