"""Instances to register in tests."""

from __future__ import annotations

from dynamo_trtllm.discovery.keys import EndpointId, subject
from dynamo_trtllm.messages import Instance, KvLayout, ModelCard, Role

CARD = ModelCard(name="tiny", context_length=128, vocab_size=32, eos_token_ids=(2,), renderer="chat_template")
LAYOUT = KvLayout(dtype="float32", block_tokens=16, num_layers=2, num_kv_heads=1, head_dim=8)


def make_instance(instance_id: int, *, namespace: str = "dynamo", role: Role = Role.DECODE) -> Instance:
    endpoint = EndpointId(namespace, "prefill" if role is Role.PREFILL else "tensorrt_llm", "generate")
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
    )
