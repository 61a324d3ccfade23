"""How many bytes a model's weights take, counted from its shape: for memory estimates before anything is loaded. Pure.

Normal decoder layers are meant: attention, a gated MLP or gated experts, two norms.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_trtllm.engines.checkpoint import Checkpoint

MXFP4_BITS = 4.25  # four bits and an eight-bit scale for every 32 values
_BITS = {"mxfp4": MXFP4_BITS, "fp8": 8.0, "nvfp4": 4.5, "fp4": 4.5}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Bytes by how engines spread them."""

    experts: int  # split by expert or tensor parallelism
    attention: int  # split by tensor parallelism, whole on each rank with attention data parallelism
    vocabulary: int  # embedding and output matrix; split and copied like attention
    rest: int  # norms, router: on each rank whole

    @property
    def total(self) -> int:
        return self.experts + self.attention + self.vocabulary + self.rest


def weight_bytes(model: Checkpoint) -> WeightBytes:
    """All layers. MXFP4 covers the experts alone; another quantization all of the layers' matrices."""
    item = _DTYPE_BYTES[model.dtype]
    packed = _BITS.get(model.quantization or "", 8.0 * item) / 8
    dense = item if model.quantization == "mxfp4" else packed
    hidden, layers = model.hidden_size, model.num_layers
    copies = 1 if model.tie_word_embeddings else 2
    return WeightBytes(
        experts=layers * round(_mlp_matrices(model) * packed + _expert_biases(model) * item),
        attention=layers * round(_attention_matrices(model) * dense + _attention_vectors(model) * item),
        vocabulary=copies * model.vocab_size * hidden * item,
        rest=(layers * (2 * hidden + model.num_experts * (hidden + 1)) + hidden) * item,
    )


def _mlp_matrices(model: Checkpoint) -> int:
    """Values of gate, up and down matrices of one layer."""
    return 3 * model.hidden_size * model.intermediate_size * max(1, model.num_experts)


def _expert_biases(model: Checkpoint) -> int:
    """gpt-oss has biases in its experts."""
    if model.model_type != "gpt_oss":
        return 0
    return model.num_experts * (2 * model.intermediate_size + model.hidden_size)


def _attention_matrices(model: Checkpoint) -> int:
    """Values of the query, key, value and output matrices of one layer."""
    return 2 * model.hidden_size * (model.num_attention_heads + model.num_kv_heads) * model.head_dim


def _attention_vectors(model: Checkpoint) -> int:
    """Biases, and gpt-oss' sinks, of one layer."""
    biases = (model.num_attention_heads + 2 * model.num_kv_heads) * model.head_dim + model.hidden_size
    sinks = model.num_attention_heads if model.model_type == "gpt_oss" else 0
    return (biases if model.attention_bias else 0) + sinks
