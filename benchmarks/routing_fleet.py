"""Requests and instances for benchmarks of routing, and quantiles of what they measure.

Part of `benchmarks.routing`.
"""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    Instance,
    KvLayout,
    ModelDeploymentCard,
    Role,
    Sampling,
    token_ids,
)


def percentile(ordered: Sequence[float], share: int) -> float:
    """Return a quantile of sorted values. `share`: in percent."""
    return ordered[len(ordered) * share // 100]


def new_request(ids: Sequence[int]) -> GenerateRequest:
    """Return a request with this prompt."""
    return GenerateRequest(
        request_id="r",
        model="model",
        token_ids=token_ids(ids),
        sampling=Sampling(max_tokens=1),
        deadline=0.0,
    )


def new_instance(number: int, block_tokens: int) -> Instance:
    """Return an instance: a prefill worker if its number is odd, else a decode worker."""
    return Instance(
        id=number,
        namespace="n",
        component="c",
        endpoint="e",
        subject=f"s{number}",
        role=Role.PREFILL if number % 2 else Role.DECODE,
        engine="mock",
        card=ModelDeploymentCard(
            name="model", context_length=1, vocab_size=1, eos_token_ids=(), renderer="harmony"
        ),
        layout=KvLayout(
            dtype="fp8", block_tokens=block_tokens, num_layers=1, num_kv_heads=1, head_dim=1
        ),
        publishes_kv_events=True,
        can_aggregate=True,
    )
