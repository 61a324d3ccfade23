"""Creates tiny models with random weights and real architectures. Needs torch and transformers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import safetensors.numpy


def save_tiny_gpt_oss(folder: Path) -> Path:
    """Save a gpt-oss model with sinks, experts, and alternating sliding (128) and full attention
    layers.
    """
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        num_hidden_layers=2,
        hidden_size=128,
        intermediate_size=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=128,
        vocab_size=2048,
        initializer_range=0.2,
        max_position_embeddings=8192,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return _save(GptOssForCausalLM(config), folder)


def save_tiny_llama(folder: Path, **sizes: int) -> Path:
    """Save a Llama model with full attention and two end-of-sequence ids.

    `sizes` overrides LlamaConfig.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    usual = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
    }
    config = LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=[1, 2],
        bos_token_id=None,
        **(usual | sizes),
    )
    return _save(LlamaForCausalLM(config), folder)


def write_tiny_llama(folder: Path) -> Path:
    """As save_tiny_llama, with other weights, and without the seconds that importing torch and
    transformers takes.
    """
    hidden = 64
    inner = 128
    vocabulary = 512
    kv = 32
    shapes = {
        "model.embed_tokens": (vocabulary, hidden),
        "lm_head": (vocabulary, hidden),
        "model.norm": (hidden,),
    }
    for layer in (f"model.layers.{number}." for number in range(2)):
        shapes |= {f"{layer}self_attn.{name}_proj": (hidden, hidden) for name in "qo"}
        shapes |= {f"{layer}self_attn.{name}_proj": (kv, hidden) for name in "kv"}
        shapes |= {f"{layer}mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj": (hidden, inner)}
        shapes |= {f"{layer}{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    chosen = np.random.default_rng(0)
    weights = {
        f"{name}.weight": (
            np.ones(shape) if len(shape) == 1 else chosen.normal(0, 0.2, shape)
        ).astype(np.float32)
        for name, shape in shapes.items()
    }
    safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": [1, 2],
        "bos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_tiny_llama4(folder: Path, chunk: int) -> Path:
    """Save a Llama 4 model: chunked attention with `chunk` tokens in the first layer, full in the
    second.
    """
    import torch
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(0)
    config = Llama4TextConfig(
        architectures=["Llama4ForCausalLM"],
        num_hidden_layers=2,
        no_rope_layers=[1, 0],
        attention_chunk_size=chunk,
        hidden_size=128,
        intermediate_size=256,
        intermediate_size_mlp=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=2,
        moe_layers=[],
        interleave_moe_layer_step=3,  # the same for vLLM
        vocab_size=2048,
        initializer_range=0.2,
        max_position_embeddings=4096,
        pad_token_id=0,
        eos_token_id=[1, 2],
        bos_token_id=None,
    )
    return _save(Llama4ForCausalLM(config), folder)


def _save(model: object, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about its own defaults
        model.save_pretrained(folder)  # type: ignore[attr-defined]
    return folder
