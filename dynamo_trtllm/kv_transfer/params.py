"""Ticket rules, as pure functions: which ticket an engine may redeem, and why not. Moves nothing."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_trtllm.errors import TransferExpired, TransferMismatch
from dynamo_trtllm.messages import KvLayout, KvTransferParams

TICKET_VERSION = 1


# Of a KvLayout, all but the number of ranks must be equal: whether that may differ the engine says (`pairing`).
EQUAL_LAYOUT = tuple(name for name in KvLayout.__struct_fields__ if name != "tensor_parallel_size")


def check(
    ticket: KvTransferParams, *, engine: str, model: str, layout: KvLayout, now: float, pairing: Mapping[str, str] = {}
) -> None:
    """Raises TransferMismatch naming the field and both values, or TransferExpired. `now`: seconds since the epoch."""
    pairs = [
        ("version", ticket.version, TICKET_VERSION),
        ("engine", ticket.engine, engine),
        ("model", ticket.model, model),
    ]
    pairs += [(f"layout.{name}", getattr(ticket.layout, name), getattr(layout, name)) for name in EQUAL_LAYOUT]
    pairs += [(name, ticket.pairing.get(name), pairing.get(name)) for name in sorted({*ticket.pairing, *pairing})]
    for name, theirs, ours in pairs:
        if theirs != ours:
            raise TransferMismatch(
                f"ticket {ticket.ticket_id}: {name} is {theirs!r} at prefill and {ours!r} at decode; "
                "start both workers with the same model and settings",
                field=name,
            )
    if ticket.expires_at <= now:
        raise TransferExpired(f"ticket {ticket.ticket_id} expired {now - ticket.expires_at:.1f} s ago")
