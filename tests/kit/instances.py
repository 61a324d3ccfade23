"""Instances to register in tests."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import reduce

import msgspec

from dynamo_trtllm.cluster.discovery.records import EndpointId, subject
from dynamo_trtllm.frontend.routing.cluster_view import ModelView
from dynamo_trtllm.protocol.messages import (
    WIRE_VERSION,
    Instance,
    KvLayout,
    KvTransferParams,
    Limits,
    ModelDeploymentCard,
    Role,
    token_ids,
)
from dynamo_trtllm.protocol.shares import ALL_WORK, Shares

CARD = ModelDeploymentCard(
    name="tiny", context_length=128, vocab_size=32, eos_token_ids=(2,), renderer="chat_template"
)
LAYOUT = KvLayout(dtype="float32", block_tokens=16, num_layers=2, num_kv_heads=1, head_dim=8)


def make_instance(
    instance_id: int, *, namespace: str = "dynamo", role: Role = Role.DECODE
) -> Instance:
    endpoint = EndpointId(
        namespace, "prefill" if role is Role.PREFILL else "tensorrt_llm", "generate"
    )
    return Instance(
        id=instance_id,
        namespace=namespace,
        component=endpoint.component,
        endpoint=endpoint.endpoint,
        subject=subject(endpoint, instance_id),
        role=role,
        engine="mock",
        card=CARD,
        layout=LAYOUT,
        wire=WIRE_VERSION,
    )


def elastic_instance(
    instance_id: int, shares: Shares = ALL_WORK, *, namespace: str = "dynamo"
) -> Instance:
    """Return an elastic instance with 100 KV blocks, of which KV for others may take 40."""
    return msgspec.structs.replace(
        make_instance(instance_id, namespace=namespace, role=Role.ELASTIC),
        can_aggregate=True,
        is_elastic=True,
        shares=shares,
        limits=Limits(max_batch_size=8, kv_blocks=100, max_transfer_blocks=40),
    )


def model_view(
    prefill: Iterable[Instance] = (),
    decode: Iterable[Instance] = (),
    aggregated: Iterable[Instance] = (),
) -> ModelView:
    return reduce(ModelView.including, (*prefill, *decode, *aggregated), ModelView())


def make_transfer_params(
    transfer_id: str, *, prefill_instance_id: int = 1, ttl_s: float = 60.0
) -> KvTransferParams:
    """Return KV transfer parameters with one token, whose KV does not exist."""
    return KvTransferParams(
        version=1,
        transfer_id=transfer_id,
        engine="mock",
        model="tiny",
        layout=LAYOUT,
        prefill_instance_id=prefill_instance_id,
        expires_at=time.time() + ttl_s,
        prompt_tokens=3,
        first_token_ids=token_ids([10]),
        transport="none",
        kv_bytes=7,
        engine_state=b"",
    )
