"""One fetch within all that bounds it: the request's deadline, the ticket's expiry and the bound of every fetch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from dynamo_trtllm.errors import DeadlineExceeded, DynamoError, HandoffTimeout, TicketExpired
from dynamo_trtllm.kv_transfer.base import Carrier, OnPiece, Piece
from dynamo_trtllm.messages import HandoffTicket


class Within(NamedTuple):
    """Of one request: its deadline in seconds since the epoch, and the longest time for any fetch."""

    deadline: float
    timeout_s: float


class Bound(NamedTuple):
    """What ends a fetch first. It decides whether the hand-off is at fault, and so what is tried next."""

    left_s: float
    error: type[DynamoError]
    why: str


def bound(ticket: HandoffTicket, within: Within, now: float) -> Bound:
    timeout_s = within.timeout_s
    bounds = (
        Bound(within.deadline - now, DeadlineExceeded, "the request's deadline passed"),
        Bound(ticket.expires_at - now, HandoffTimeout, "its ticket expired"),
        Bound(timeout_s, HandoffTimeout, f"--handoff-timeout-s {timeout_s:g} passed"),
    )
    return min(bounds, key=lambda each: each.left_s)


def late(ticket: HandoffTicket, reached: Bound) -> DynamoError:
    return reached.error(f"the KV of ticket {ticket.ticket_id} did not come before {reached.why}")


class Destination(NamedTuple):
    """Where a ticket's KV goes, and who hears of each piece of it (see `Carrier.fetch`)."""

    pieces: Sequence[Piece]
    on_piece: OnPiece | None = None


async def fetch(carrier: Carrier, ticket: HandoffTicket, offer: bytes, to: Destination, within: Within) -> None:
    """Raises as the carrier does; when time is over, the error of the bound that was reached."""
    first = bound(ticket, within, time.time())
    if first.left_s <= 0:
        if first.error is HandoffTimeout:  # nobody is slow: it waited too long for its place
            raise TicketExpired(f"ticket {ticket.ticket_id} expired before there was a place to fetch its KV to")
        raise late(ticket, first)
    try:
        await carrier.fetch(ticket.ticket_id, offer, to.pieces, timeout_s=first.left_s, on_piece=to.on_piece)
    except HandoffTimeout as exc:
        raise late(ticket, first) from exc
