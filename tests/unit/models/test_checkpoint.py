"""Model folders as their JSON files describe them, and as transformers reads the same ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.models.checkpoint import (
    SHAPES,
    Checkpoint,
    read_checkpoint,
    read_eos_token_ids,
    weight_bytes,
)
from dynamo_trtllm.protocol.errors import ConfigError

GPT_OSS_120B = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "eos_token_id": 200002,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
}
LLAMA = {
    "model_type": "llama",
    "eos_token_id": [128001, 128009],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
    "dtype": "float16",
}


def write(folder: Path, config: dict[str, Any], **files: Any) -> Path:
    """A folder with config.json and further JSON files, by name without the ending."""
    for name, value in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize(
    ("fields", "has_recurrent_layers"),
    [
        ({}, False),
        ({"layer_types": ["sliding_attention", "full_attention"]}, False),
        ({"layer_types": ["linear_attention", "full_attention"]}, True),
        ({"layer_types": ["mamba", "attention"]}, True),
        ({"hybrid_override_pattern": "M-M-M*-"}, True),
    ],
)
def test_checkpoint_knows_layers_with_state_instead_of_kv(
    tmp_path: Path, fields: dict[str, Any], has_recurrent_layers: bool
) -> None:
    found = read_checkpoint(write(tmp_path, {**LLAMA, "sliding_window": 128, **fields}))
    assert found.has_recurrent_layers is has_recurrent_layers


def test_read_gpt_oss_120b_equals_the_published_shape(tmp_path: Path) -> None:
    found = read_checkpoint(
        write(tmp_path, GPT_OSS_120B, generation_config={"eos_token_id": [200002, 199999, 200012]})
    )
    assert found == replace(SHAPES["gpt-oss-120b"], folder=tmp_path)
    assert found.renderer == "harmony"


def test_read_leaves_out_a_byte_order_mark(tmp_path: Path) -> None:
    folder = write(tmp_path, LLAMA)
    config = folder / "config.json"
    config.write_text("\ufeff" + config.read_text(encoding="utf-8"), encoding="utf-8")
    assert read_checkpoint(folder).model_type == "llama"


def test_read_dense_model_has_fields_and_defaults(tmp_path: Path) -> None:
    folder = write(tmp_path, LLAMA, tokenizer={}, tokenizer_config={})
    assert read_checkpoint(folder) == Checkpoint(
        folder=folder,
        model_type="llama",
        num_layers=32,
        num_attention_heads=32,
        num_kv_heads=8,
        head_dim=128,
        hidden_size=4096,
        intermediate_size=14336,
        vocab_size=128256,
        context_length=131072,
        dtype="float16",
        eos_token_ids=(128001, 128009),
        tie_word_embeddings=True,
        files={name: folder / name for name in ("tokenizer.json", "tokenizer_config.json")},
    )


def test_read_without_kv_heads_uses_attention_heads(tmp_path: Path) -> None:
    assert (
        read_checkpoint(write(tmp_path, without(LLAMA, "num_key_value_heads"))).num_kv_heads == 32
    )


def test_read_window_without_sliding_layers_is_none(tmp_path: Path) -> None:
    found = read_checkpoint(write(tmp_path, {**LLAMA, "sliding_window": 4096}))
    assert (found.sliding_window, found.num_sliding_layers) == (None, 0)


def test_read_nested_text_settings_keeps_the_model_type(tmp_path: Path) -> None:
    nested = {"model_type": "gemma3", "text_config": {**LLAMA, "model_type": "gemma3_text"}}
    found = read_checkpoint(write(tmp_path, nested))
    assert (found.model_type, found.num_layers) == ("gemma3", 32)


def test_read_end_falls_back_to_the_model_config(tmp_path: Path) -> None:
    found = read_checkpoint(write(tmp_path, LLAMA, generation_config={"do_sample": True}))
    assert found.eos_token_ids == (128001, 128009)
    assert read_checkpoint(write(tmp_path, without(LLAMA, "eos_token_id"))).eos_token_ids == ()


def test_read_eos_omits_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, generation_config={"eos_token_id": [-1, 2, 100]})
    assert read_eos_token_ids(tmp_path, {}, vocab_size=100) == (2,)
    with pytest.raises(ConfigError, match="eos_token_id"):
        read_eos_token_ids(tmp_path, {})


def test_read_index_total_overrides_shape_and_files(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 10)
    assert read_checkpoint(write(tmp_path, LLAMA)).index_bytes == 10
    write(
        tmp_path, LLAMA, **{"model.safetensors.index": {"metadata": {"total_size": 16_060_522_496}}}
    )
    assert read_checkpoint(tmp_path).index_bytes == 16_060_522_496


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (without(LLAMA, "model_type"), "model_type is missing: expected a name"),
        (without(LLAMA, "num_hidden_layers"), "num_hidden_layers is missing"),
        (
            {**LLAMA, "vocab_size": "many"},
            "vocab_size is 'many': expected a whole number from 1 on",
        ),
        ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads is 0"),
        ({**LLAMA, "hidden_size": True}, "hidden_size is True"),
        ({**LLAMA, "dtype": "int3"}, "dtype is 'int3': expected one of float32"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "expected an object with quant_method"),
        ({**LLAMA, "eos_token_id": "end"}, "eos_token_id is 'end': expected a token id"),
        ([], "not a JSON object"),
    ],
)
def test_read_wrong_field_names_file_and_field(tmp_path: Path, config: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_checkpoint(write(tmp_path, config))
    assert f"{tmp_path / 'config.json'}: " in caught.value.message
    assert said in caught.value.message
    assert caught.value.field == "model_path"


def test_read_missing_or_broken_files_names_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        read_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="no/folder does not exist"):
        read_checkpoint(Path("no/folder"))
    write(tmp_path, LLAMA, generation_config=[1])
    with pytest.raises(ConfigError, match=r"generation_config\.json: not a JSON object"):
        read_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json can't be read"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", ["gpt_oss", "llama"])
def test_read_transformers_folder_counts_every_byte(tmp_path: Path, kind: str) -> None:
    from safetensors import safe_open

    from tests.kit.tiny_models import save_tiny_gpt_oss, save_tiny_llama

    folder = (save_tiny_gpt_oss if kind == "gpt_oss" else save_tiny_llama)(tmp_path / "model")
    found = read_checkpoint(folder)
    with safe_open(folder / "model.safetensors", "np") as tensors:
        values = sum(tensors.get_tensor(name).size for name in tensors.keys())
    assert weight_bytes(found).total == 4 * values  # float32
    assert found.model_type == kind


@pytest.mark.parametrize(
    ("quantization", "found"),
    [
        ({"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": None}, None),
        (None, None),
    ],
)
def test_kv_quantization_when_modelopts_file_sets_it_then_read(
    tmp_path: Path, quantization: dict[str, Any] | None, found: str | None
) -> None:
    folder = write(
        tmp_path,
        LLAMA,
        hf_quant_config={"producer": {"name": "modelopt"}, "quantization": quantization},
    )
    assert read_checkpoint(folder).kv_quantization == found
    (tmp_path / "hf_quant_config.json").unlink()
    assert read_checkpoint(tmp_path).kv_quantization is None


def test_checkpoint_reads_latent_attention_and_experts(tmp_path: Path) -> None:
    deepseek = {
        **LLAMA,
        "model_type": "deepseek_v3",
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "n_routed_experts": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(deepseek))
    model = read_checkpoint(tmp_path)
    assert (model.latent_kv_dim, model.num_experts) == (576, 256)
