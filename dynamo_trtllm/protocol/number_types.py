"""Define the types of the numbers that processes exchange, each with its range; divide numbers.

Fields of messages and records have one of these types. When msgspec decodes a message, it rejects
values out of range, also NaN, which fails every comparison. So all decoded numbers are finite and
fit into timers, counters and the integers of libraries.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

MAX_COUNT: Final = (1 << 31) - 1
MAX_INT64: Final = (1 << 63) - 1
# Not every engine distinguishes more values.
MAX_PRIORITY: Final = 1 << 20
# Limits of the weight of an API key. With less than a hundredth of the weight of others, requests
# would seem to hang.
MIN_WEIGHT: Final = 0.01
MAX_WEIGHT: Final = 100.0
MAX_DP_RANKS: Final = 1 << 16
MAX_LOGPROBS: Final = 20  # alternatives of one token
MAX_SECONDS: Final = 1e9  # 31 years
MAX_SLO_S: Final = 3600.0  # largest limit of the times of a request
_LAST_TIME: Final = 1e11  # this is in the year 5138

Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COUNT)]  # of tokens, blocks, requests, layers
PositiveCount: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
# Any other whole number: an id, a number of bytes, an address, or a number in order.
Number: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_INT64)]
Int64: TypeAlias = Annotated[int, Meta(ge=-MAX_INT64 - 1, le=MAX_INT64)]
# No upper bound: MessagePack has no larger integers, and msgspec accepts none above MAX_INT64.
UInt64: TypeAlias = Annotated[int, Meta(ge=0)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]
Port: TypeAlias = Annotated[int, Meta(ge=0, le=65_535)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
SloSeconds: TypeAlias = Annotated[float, Meta(gt=0, le=MAX_SLO_S)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]  # of the work of one kind
EpochSeconds: TypeAlias = Annotated[float, Meta(ge=0, le=_LAST_TIME)]  # seconds since the epoch


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient of two whole numbers, rounded up."""
    return -(-dividend // divisor)
