"""Random models of a second's making: real architectures, small enough for one core. Needs torch and transformers."""

from __future__ import annotations

import warnings
from pathlib import Path


def save_tiny_gpt_oss(folder: Path) -> Path:
    """Sinks, experts, alternating sliding (128) and full layers; weights wide enough that answers vary."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        num_hidden_layers=4,
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
    """Full attention only, two ids that end an answer. `sizes`: fields of LlamaConfig that are to be others."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    usual = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 2048}
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


def save_tiny_llama4(folder: Path, chunk: int) -> Path:
    """The first layer sees its chunk of `chunk` tokens only, the second one all."""
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
        interleave_moe_layer_step=3,  # says the same to vLLM
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
        warnings.simplefilter("ignore")  # the vendor's own, about its own defaults
        model.save_pretrained(folder)  # type: ignore[attr-defined]
    return folder
