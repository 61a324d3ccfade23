"""Writes a model folder with gpt-oss's architecture and no weights, for engines with dummy
weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FULL_LAYERS = 36
_CONTEXT = 131_072


def gpt_oss_config(*, layers: int = FULL_LAYERS, experts: int = 128) -> dict[str, Any]:
    """Return gpt-oss-120b's config.json with this number of layers and experts."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "layer_types": [
            "sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(layers)
        ],
        "sliding_window": 128,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-05,
        "initializer_range": 0.02,
        "max_position_embeddings": _CONTEXT,
        "initial_context_length": 4096,
        "rope_theta": 150_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "vocab_size": 201_088,
        "eos_token_id": 200_002,
        "pad_token_id": 199_999,
        "tie_word_embeddings": False,
        "use_cache": True,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.9,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    }


def write_model(folder: Path, *, layers: int = FULL_LAYERS, tokenizer: bool = False) -> Path:
    """Write config.json, and with `tokenizer` the files that other servers need to detokenize (28
    MB).
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(gpt_oss_config(layers=layers), indent=2) + "\n")
    if tokenizer and not (folder / "tokenizer.json").is_file():
        from dynamo_trtllm.models.expand import write_tokenizer

        write_tokenizer(folder, context_length=_CONTEXT)
    return folder
