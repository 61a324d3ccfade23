"""Name a pair of instances, and say which prefill and decode instances can be a pair."""

from __future__ import annotations

import sys
from typing import Final, Self, TypeAlias

import msgspec

from dynamo_trtllm.kv_transfer.transfer_backend import EQUAL_LAYOUT
from dynamo_trtllm.protocol.errors import TransferFailed, TransferRejected, TransferTimeout
from dynamo_trtllm.protocol.messages import GenerateRequest, Instance, Role
from dynamo_trtllm.protocol.number_types import ceil_div

# The ids of (prefill, decode), or (None, id) for an instance that runs aggregated requests.
Pair: TypeAlias = tuple[int | None, int]

# Errors of a decode call for which the pair may be at fault: they count for its breaker.
PAIR_FAILURES: Final = (TransferFailed, TransferTimeout, TransferRejected)


def pair_of(prefill_id: int, decode_id: int) -> Pair:
    """Return the pair whose breaker counts for a request with these two instances.

    They may be one elastic instance, which then runs the whole request.
    """
    return (None if prefill_id == decode_id else prefill_id), decode_id


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

    def aggregated_on(self, instance: Instance) -> Self:
        """Return the selection in which one instance runs the whole request."""
        return msgspec.structs.replace(self, prefill=None, decode=instance)


def can_transfer(prefill: Instance, decode: Instance, request: GenerateRequest) -> bool:
    """Return whether elastic instances have enough blocks to transfer the KV of a request.

    Without this limit, two elastic instances that transfer KV to each other could wait for each
    other's blocks for ever. For instances with a fixed role there is no limit.
    """
    tokens = len(request.token_ids)
    for instance in (prefill, decode):
        blocks = ceil_div(tokens, instance.layout.block_tokens)
        if instance.role is Role.ELASTIC and blocks > instance.limits.max_transfer_blocks:
            return False
    if decode.role is not Role.ELASTIC:
        return True
    # The decode call can always use the blocks that transfers for other workers may not take.
    limits = decode.limits
    blocks = ceil_div(tokens + request.sampling.max_tokens, decode.layout.block_tokens)
    return blocks <= limits.kv_blocks - limits.max_transfer_blocks


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
