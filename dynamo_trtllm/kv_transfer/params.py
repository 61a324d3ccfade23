"""Ticket rules, as pure functions: which ticket an engine may redeem, and why not. Moves nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dynamo_trtllm.errors import DeadlineExceeded, DynamoError, TransferExpired, TransferMismatch, TransferTimeout
from dynamo_trtllm.kv_transfer.base import MemoryRegion, OnRegion, TransferBackend
from dynamo_trtllm.messages import KvLayout, KvTransferParams

TICKET_VERSION = 1


# Of a KvLayout, all but the number of ranks must be equal: whether that may differ the engine says (`kv_compat`).
EQUAL_LAYOUT = tuple(name for name in KvLayout.__struct_fields__ if name != "tensor_parallel_size")


def check_params(
    ticket: KvTransferParams,
    *,
    engine: str,
    model: str,
    layout: KvLayout,
    now: float,
    kv_compat: Mapping[str, str] = {},
) -> None:
    """Raises TransferMismatch naming the field and both values, or TransferExpired. `now`: seconds since the epoch."""
    pairs = [
        ("version", ticket.version, TICKET_VERSION),
        ("engine", ticket.engine, engine),
        ("model", ticket.model, model),
    ]
    pairs += [(f"layout.{name}", getattr(ticket.layout, name), getattr(layout, name)) for name in EQUAL_LAYOUT]
    pairs += [
        (name, ticket.kv_compat.get(name), kv_compat.get(name)) for name in sorted({*ticket.kv_compat, *kv_compat})
    ]
    for name, theirs, ours in pairs:
        if theirs != ours:
            raise TransferMismatch(
                f"ticket {ticket.ticket_id}: {name} is {theirs!r} at prefill and {ours!r} at decode; "
                "start both workers with the same model and settings",
                field=name,
            )
    if ticket.expires_at <= now:
        raise TransferExpired(f"ticket {ticket.ticket_id} expired {now - ticket.expires_at:.1f} s ago")


class FetchLimits(NamedTuple):
    """Of one request: its deadline in seconds since the epoch, and the longest time for any fetch."""

    deadline: float
    timeout_s: float


class Deadline(NamedTuple):
    """What ends a fetch first. It decides whether the hand-off is at fault, and so what is tried next."""

    left_s: float
    error: type[DynamoError]
    why: str


def first_deadline(ticket: KvTransferParams, limits: FetchLimits, now: float) -> Deadline:
    timeout_s = limits.timeout_s
    bounds = (
        Deadline(limits.deadline - now, DeadlineExceeded, "the request's deadline passed"),
        Deadline(ticket.expires_at - now, TransferTimeout, "its ticket expired"),
        Deadline(timeout_s, TransferTimeout, f"--handoff-timeout-s {timeout_s:g} passed"),
    )
    return min(bounds, key=lambda each: each.left_s)


def timeout_error(ticket: KvTransferParams, reached: Deadline) -> DynamoError:
    return reached.error(f"the KV of ticket {ticket.ticket_id} did not come before {reached.why}")


class Destination(NamedTuple):
    """Where a ticket's KV goes, and who hears of each piece of it (see `TransferBackend.read`)."""

    pieces: Sequence[MemoryRegion]
    on_piece: OnRegion | None = None


async def fetch(
    backend: TransferBackend, ticket: KvTransferParams, offer: bytes, to: Destination, limits: FetchLimits
) -> None:
    """Raises as the backend does; when time is over, the error of the bound that was reached."""
    first = first_deadline(ticket, limits, time.time())
    if first.left_s <= 0:
        if first.error is TransferTimeout:  # no peer is slow: the fetch waited too long for its place
            raise TransferExpired(f"ticket {ticket.ticket_id} expired before there was a place to fetch its KV to")
        raise timeout_error(ticket, first)
    try:
        await backend.read(ticket.ticket_id, offer, to.pieces, timeout_s=first.left_s, on_piece=to.on_piece)
    except TransferTimeout as exc:
        raise timeout_error(ticket, first) from exc
