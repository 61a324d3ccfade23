"""Name a pair of instances, and say which prefill and decode instances can be a pair."""

from __future__ import annotations

import sys
from typing import Final, TypeAlias

import msgspec

from dynamo_trtllm.kv_transfer.transfer_backend import EQUAL_LAYOUT
from dynamo_trtllm.protocol.errors import TransferFailed, TransferRejected, TransferTimeout
from dynamo_trtllm.protocol.messages import Instance

# The ids of (prefill, decode), or (None, id) for an instance that runs aggregated requests.
Pair: TypeAlias = tuple[int | None, int]

# Errors of a decode call for which the pair may be at fault: they count for its breaker.
PAIR_FAILURES: Final = (TransferFailed, TransferTimeout, TransferRejected)


def format_pair(pair: Pair) -> str:
    """Format a pair for logs and errors."""
    prefill, decode = pair
    if prefill is None:
        return f"instance {decode:x}"
    return f"pair {prefill:x} -> {decode:x}"


class WorkerSelection(msgspec.Struct, frozen=True):
    """The instances of a request. `prefill` is None if `decode` runs the aggregated request."""

    prefill: Instance | None
    decode: Instance


def pairing_fields(instance: Instance) -> tuple[tuple[str, object], ...]:
    """Return the (field, value) pairs that must be equal in two instances for KV transfer."""
    fields: list[tuple[str, object]] = [
        ("engine", instance.engine),
        ("strategy", instance.strategy),
        ("--kv-transfer-key-file", "given" if instance.signs_kv_transfers else "not given"),
    ]
    fields += [(f"layout.{name}", getattr(instance.layout, name)) for name in EQUAL_LAYOUT]
    fields += sorted(instance.kv_compat.items())
    return tuple(fields)


def pairing_key(instance: Instance) -> str:
    """Return `pairing_fields` as a text.

    It is interned, because each request compares it for every instance.
    """
    return sys.intern(repr(pairing_fields(instance)))


def differences(instance: Instance, other: Instance) -> str:
    """Return the fields in which two instances must be equal but differ, as text for people."""
    fields = dict(pairing_fields(instance))
    other_fields = dict(pairing_fields(other))
    texts: list[str] = []
    for name in fields | other_fields:
        value = fields.get(name)
        other_value = other_fields.get(name)
        if value != other_value:
            texts.append(
                f"{name} is {value!r} at {instance.role} and {other_value!r} at {other.role}"
            )
    return "; ".join(texts)
