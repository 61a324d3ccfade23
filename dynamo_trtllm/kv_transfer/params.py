"""Check KV transfer parameters, decide which deadline ends a fetch first, and fetch within that deadline."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dynamo_trtllm.errors import DeadlineExceeded, DynamoError, TransferExpired, TransferMismatch, TransferTimeout
from dynamo_trtllm.kv_transfer.base import MemoryRegion, OnRegion, TransferBackend
from dynamo_trtllm.messages import KvLayout, KvTransferParams

TRANSFER_PARAMS_VERSION = 1  # of KvTransferParams

# The fields of KvLayout that must be equal at prefill and decode. The number of ranks may differ where an engine allows
# it (`kv_compat`).
EQUAL_LAYOUT = tuple(name for name in KvLayout.__struct_fields__ if name != "tensor_parallel_size")


def check_params(
    kv_params: KvTransferParams,
    *,
    engine: str,
    model: str,
    layout: KvLayout,
    now: float,
    kv_compat: Mapping[str, str] = {},
) -> None:
    """Check that a decode engine can use KV transfer parameters.

    Args:
        engine: The kind of the decode engine.
        model: The name of its model.
        layout: Its KV layout.
        now: Seconds since the epoch.
        kv_compat: Further values that must be equal at prefill and decode.

    Raises:
        TransferMismatch: A value differs. The error names the field and both values.
        TransferExpired: The transfer has expired.
    """
    pairs = [
        ("version", kv_params.version, TRANSFER_PARAMS_VERSION),
        ("engine", kv_params.engine, engine),
        ("model", kv_params.model, model),
    ]
    pairs += [(f"layout.{name}", getattr(kv_params.layout, name), getattr(layout, name)) for name in EQUAL_LAYOUT]
    pairs += [
        (name, kv_params.kv_compat.get(name), kv_compat.get(name))
        for name in sorted({*kv_params.kv_compat, *kv_compat})
    ]
    for name, theirs, ours in pairs:
        if theirs != ours:
            raise TransferMismatch(
                f"KV transfer {kv_params.transfer_id}: {name} is {theirs!r} at prefill and {ours!r} at decode; "
                "start both workers with the same model and settings",
                field=name,
            )
    if kv_params.expires_at <= now:
        raise TransferExpired(f"KV transfer {kv_params.transfer_id} expired {now - kv_params.expires_at:.1f} s ago")


class FetchLimits(NamedTuple):
    """The time limits of one fetch."""

    deadline: float  # of the request, in seconds since the epoch
    timeout_s: float  # of any fetch


class Deadline(NamedTuple):
    """The time limit that is reached first, and its error.

    The kind of error tells the frontend whether the KV transfer is at fault, and thus what to retry.
    """

    left_s: float  # seconds until it is reached
    error: type[DynamoError]
    why: str


def first_deadline(kv_params: KvTransferParams, limits: FetchLimits, now: float) -> Deadline:
    """Return the time limit that a fetch reaches first. `now`: seconds since the epoch."""
    timeout_s = limits.timeout_s
    bounds = (
        Deadline(limits.deadline - now, DeadlineExceeded, "the request's deadline passed"),
        Deadline(kv_params.expires_at - now, TransferTimeout, "it expired"),
        Deadline(timeout_s, TransferTimeout, f"--handoff-timeout-s {timeout_s:g} passed"),
    )
    return min(bounds, key=lambda each: each.left_s)


def timeout_error(kv_params: KvTransferParams, reached: Deadline) -> DynamoError:
    """Return the error of a fetch that has reached a time limit."""
    return reached.error(f"KV transfer {kv_params.transfer_id} did not finish before {reached.why}")


class Destination(NamedTuple):
    """The memory that KV is read into, and the callback for each region (see `TransferBackend.read`)."""

    regions: Sequence[MemoryRegion]
    on_region: OnRegion | None = None


async def fetch(
    backend: TransferBackend, kv_params: KvTransferParams, offer: bytes, to: Destination, limits: FetchLimits
) -> None:
    """Read a transfer's KV within the request's time limits.

    Raises:
        DeadlineExceeded: The request's deadline passed.
        TransferTimeout: The fetch took too long.
        TransferExpired: The transfer expired before the fetch could start.
        TransferFailed: The read failed.
    """
    first = first_deadline(kv_params, limits, time.time())
    if first.left_s <= 0:
        # TransferTimeout would blame the pair. Before the read begins, the wait for space is to blame, not the peer.
        if first.error is TransferTimeout:
            raise TransferExpired(
                f"KV transfer {kv_params.transfer_id} expired before this worker had space for its KV"
            )
        raise timeout_error(kv_params, first)
    try:
        await backend.read(kv_params.transfer_id, offer, to.regions, timeout_s=first.left_s, on_region=to.on_region)
    except TransferTimeout as exc:
        raise timeout_error(kv_params, first) from exc
