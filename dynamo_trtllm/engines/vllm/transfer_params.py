"""vLLM's `kv_transfer_params` to the opaque part of a ticket and back. Pure: plain values, typed here.

A decode engine gets exactly what the prefill engine's connector answered; a ticket without one of these is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo_trtllm import codec
from dynamo_trtllm.engines.pending_transfers import EngineState, decode_state
from dynamo_trtllm.errors import RequestRejected
from dynamo_trtllm.messages import KvTransferParams

OPAQUE_VERSION = 1


class TransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """What NixlConnector's request_finished answers, as of connector version 4."""

    do_remote_prefill: bool
    do_remote_decode: bool
    remote_block_ids: list[list[int]]  # per group of layers with KV of one kind
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    tp_size: int
    remote_num_tokens: int = 0


class _VllmState(EngineState, frozen=True, kw_only=True):
    params: TransferParams
    seed: int | None = None  # of a request without one, where prefill and decode each sample the first token


def pack(params: Mapping[str, Any] | None, *, release: str, seed: int | None) -> bytes:
    """Raises RequestRejected when the connector answered nothing, or what can't travel."""
    if not params or not params.get("remote_block_ids"):
        raise RequestRejected(
            "vLLM's connector left nothing to hand over; see its log for NixlConnector", field="kv_transfer_config"
        )
    try:
        typed = msgspec.convert(params, TransferParams, strict=False)
    except msgspec.ValidationError as exc:
        raise RequestRejected(
            f"vLLM {release} answers kv_transfer_params of another form: {exc}", field="kv_transfer_config"
        ) from exc
    return codec.encode(_VllmState(version=OPAQUE_VERSION, release=release, params=typed, seed=seed))


class Unpacked(msgspec.Struct, frozen=True, kw_only=True):
    params: dict[str, Any]  # plain, for `extra_args`
    seed: int | None


def unpack(ticket: KvTransferParams) -> Unpacked:
    """Raises TransferMismatch naming the field."""
    opaque = decode_state(ticket, _VllmState, OPAQUE_VERSION)
    return Unpacked(params=msgspec.structs.asdict(opaque.params), seed=opaque.seed)
