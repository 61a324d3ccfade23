"""The published shapes of models that people check configurations for before they have the files. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dynamo_trtllm.engines.checkpoint import Checkpoint


def _gpt_oss(name: str, *, layers: int, experts: int) -> Checkpoint:
    return Checkpoint(
        folder=Path(name),
        model_type="gpt_oss",
        num_layers=layers,
        num_attention_heads=64,
        num_kv_heads=8,
        head_dim=64,
        hidden_size=2880,
        intermediate_size=2880,
        vocab_size=201088,
        context_length=131072,
        sliding_window=128,
        num_sliding_layers=layers // 2,
        num_experts=experts,
        experts_per_token=4,
        quantization="mxfp4",
        eos_token_ids=(200002, 199999, 200012),
        attention_bias=True,
    )


SHAPES: Mapping[str, Checkpoint] = {
    "gpt-oss-120b": _gpt_oss("gpt-oss-120b", layers=36, experts=128),
    "gpt-oss-20b": _gpt_oss("gpt-oss-20b", layers=24, experts=32),
}
