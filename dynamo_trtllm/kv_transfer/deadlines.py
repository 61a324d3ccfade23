"""One fetch within all that bounds it: the request's deadline, the ticket's expiry and the bound of every fetch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from dynamo_trtllm.errors import DeadlineExceeded, DynamoError, TransferExpired, TransferTimeout
from dynamo_trtllm.kv_transfer.base import MemoryRegion, OnRegion, TransferBackend
from dynamo_trtllm.messages import KvTransferParams


class FetchLimits(NamedTuple):
    """Of one request: its deadline in seconds since the epoch, and the longest time for any fetch."""

    deadline: float
    timeout_s: float


class Deadline(NamedTuple):
    """What ends a fetch first. It decides whether the hand-off is at fault, and so what is tried next."""

    left_s: float
    error: type[DynamoError]
    why: str


def first_deadline(ticket: KvTransferParams, within: FetchLimits, now: float) -> Deadline:
    timeout_s = within.timeout_s
    bounds = (
        Deadline(within.deadline - now, DeadlineExceeded, "the request's deadline passed"),
        Deadline(ticket.expires_at - now, TransferTimeout, "its ticket expired"),
        Deadline(timeout_s, TransferTimeout, f"--handoff-timeout-s {timeout_s:g} passed"),
    )
    return min(bounds, key=lambda each: each.left_s)


def timeout_error(ticket: KvTransferParams, reached: Deadline) -> DynamoError:
    return reached.error(f"the KV of ticket {ticket.ticket_id} did not come before {reached.why}")


class Destination(NamedTuple):
    """Where a ticket's KV goes, and who hears of each piece of it (see `TransferBackend.fetch`)."""

    pieces: Sequence[MemoryRegion]
    on_piece: OnRegion | None = None


async def fetch(
    backend: TransferBackend, ticket: KvTransferParams, offer: bytes, to: Destination, within: FetchLimits
) -> None:
    """Raises as the backend does; when time is over, the error of the bound that was reached."""
    first = first_deadline(ticket, within, time.time())
    if first.left_s <= 0:
        if first.error is TransferTimeout:  # no peer is slow: the fetch waited too long for its place
            raise TransferExpired(f"ticket {ticket.ticket_id} expired before there was a place to fetch its KV to")
        raise timeout_error(ticket, first)
    try:
        await backend.fetch(ticket.ticket_id, offer, to.pieces, timeout_s=first.left_s, on_piece=to.on_piece)
    except TransferTimeout as exc:
        raise timeout_error(ticket, first) from exc
