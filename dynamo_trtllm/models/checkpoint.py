"""Read the shape, token ids and defaults of a model from its JSON files, and compute the sizes of
its weights.

Neither the weights nor an inference library are loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import KvLayout, SamplingDefaults
from dynamo_trtllm.protocol.number_types import MAX_INT64

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
KV_CONFIG = "hf_quant_config.json"  # a file of ModelOpt
WEIGHT_INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
SERVED_FILES = (TOKENIZER, TOKENIZER_CONFIG, TEMPLATE)
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The shape of one model, as its files describe it."""

    folder: Path
    model_type: str
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int  # the size of one expert in MoE models
    vocab_size: int
    context_length: int  # tokens; 0 if the files do not set it
    sliding_window: int | None = None  # tokens
    num_sliding_layers: int = 0
    # True for hybrid models: some of their layers keep a state of constant size instead of KV.
    has_recurrent_layers: bool = False
    # Size of the KV of one token in a layer with latent attention (MLA); 0 if each head has KV.
    latent_kv_dim: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    quantization: str | None = None  # "mxfp4", "fp8", …; None if the weights have `dtype`
    # Type of KV blocks for which the weights were calibrated: "fp8", "nvfp4", …
    kv_quantization: str | None = None
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    # Size of all tensors, from the safetensors index or the file sizes; None without weights.
    index_bytes: int | None = None
    files: Mapping[str, Path] = field(default_factory=dict)  # tokenizer and template files, by name

    @property
    def renderer(self) -> str:
        return renderer_of(self.model_type)

    def kv_layout(self, dtype: str, block_tokens: int, tensor_parallel_size: int) -> KvLayout:
        """Return the layout of the model's KV."""
        return KvLayout(
            dtype=dtype,
            block_tokens=block_tokens,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            tensor_parallel_size=tensor_parallel_size,
        )


def renderer_of(model_type: str) -> str:
    """Return the prompt format of a model type: "harmony" or "chat_template"."""
    return "harmony" if model_type == "gpt_oss" else "chat_template"


def served_files(folder: Path, model_type: str) -> dict[str, Path]:
    """Return the files that a frontend fetches, by name. Harmony needs no file of the folder."""
    if renderer_of(model_type) == "harmony":
        return {}
    return {name: folder / name for name in SERVED_FILES if (folder / name).is_file()}


def model_file(folder: Path) -> Path:
    """Return the folder's config.json or its only GGUF file.

    Raises:
        ConfigError: the folder does not exist or contains neither.
    """
    _require_folder(folder)
    if (folder / CONFIG).is_file():
        return folder / CONFIG
    ggufs = list(folder.glob("*.gguf"))
    if len(ggufs) != 1:
        raise ConfigError(
            f"Model folder {folder} contains neither {CONFIG} nor exactly one .gguf file. Download"
            " the model again.",
            field="model_path",
        )
    return ggufs[0]


def _require_folder(folder: Path) -> None:
    if not os.path.isdir(folder):
        raise ConfigError(
            f"Model folder {folder} does not exist. Pass --model-path an existing model folder.",
            field="model_path",
        )


def check_model_files(folder: Path, *, reads_gguf: bool, weight_files: Sequence[str] = ()) -> None:
    """Check that a folder contains the files that an engine and a frontend need.

    Args:
        folder: model folder.
        reads_gguf: the engine loads GGUF files.
        weight_files: one of these must be there, unless the model is a GGUF file; (): weights are
            not checked.

    Raises:
        ConfigError: names the missing or unsupported file.
    """
    found = model_file(folder)
    if found.name != CONFIG:
        if not reads_gguf:
            raise ConfigError(
                f"{found} is a GGUF file, which only the torch engine supports. Pass a folder with"
                f" {CONFIG}.",
                field="model_path",
            )
        return
    model_type = _Fields(found, _read_json(found)).text("model_type")
    needed = () if renderer_of(model_type) == "harmony" else (TOKENIZER, TOKENIZER_CONFIG)
    for name in needed:
        if not (folder / name).is_file():
            raise ConfigError(
                f"Model folder {folder} has no {name}, which frontends need to render prompts."
                " Download it too.",
                field="model_path",
            )
    if weight_files and not any((folder / name).is_file() for name in weight_files):
        others = sorted(file.name for file in folder.glob("*.safetensors"))
        seen = f"; {others[0]} has another name" if others else ""
        raise ConfigError(
            f"Model folder {folder} has none of {', '.join(weight_files)}{seen}. Download the"
            " weights, or rename them.",
            field="model_path",
        )


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a model folder's config.json and generation_config.json.

    Raises:
        ConfigError: names the file, and the field in it, that is missing or invalid.
    """
    _require_folder(folder)
    path = folder / CONFIG
    top = _read_json(path)
    values = dict(top)
    # Multimodal models describe their language model in an object of its own.
    text_config = top.get("text_config")
    if isinstance(text_config, dict):
        values |= text_config
    config = _Fields(path, values)
    model_type = config.text("model_type")
    heads = config.count("num_attention_heads")
    num_sliding_layers = _num_sliding_layers(config)
    num_experts = config.first_count("num_local_experts", "num_experts", "n_routed_experts")
    experts_per_token = config.first_count("num_experts_per_tok", "experts_per_token")
    return Checkpoint(
        folder=folder,
        # The type of the whole model, which may differ from that of its language model.
        model_type=str(top.get("model_type", model_type)),
        num_layers=config.count("num_hidden_layers"),
        num_attention_heads=heads,
        num_kv_heads=config.count("num_key_value_heads", heads),
        head_dim=config.count("head_dim", config.count("hidden_size") // heads),
        hidden_size=config.count("hidden_size"),
        intermediate_size=config.count("moe_intermediate_size", config.count("intermediate_size")),
        vocab_size=config.count("vocab_size"),
        context_length=config.count("max_position_embeddings", 0),
        sliding_window=config.count("sliding_window") if num_sliding_layers else None,
        num_sliding_layers=num_sliding_layers,
        has_recurrent_layers=_has_recurrent_layers(config),
        latent_kv_dim=_latent_kv_dim(config),
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        quantization=_quantization(config),
        kv_quantization=_kv_quantization(folder),
        dtype=_dtype(config),
        eos_token_ids=read_eos_token_ids(folder, values),
        tie_word_embeddings=bool(config.get("tie_word_embeddings")),
        attention_bias=bool(config.get("attention_bias")),
        index_bytes=_index_bytes(folder),
        files=served_files(folder, model_type),
    )


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Return the sampling values of the folder's generation_config.json; no values without that
    file.

    Raises:
        ConfigError: names the field that is invalid.
    """
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return SamplingDefaults()
    try:
        values = dict(_read_json(path))
        top_k = values.get("top_k")
        if isinstance(top_k, float) and top_k.is_integer():
            values["top_k"] = int(top_k)
        return msgspec.convert(values, SamplingDefaults)
    except msgspec.ValidationError as exc:
        raise ConfigError(
            f"{path}: {exc}. Correct the file or start the worker with --generation-config none.",
            field="model_path",
        ) from exc


class _Fields:
    """The fields of one JSON file, with a type check for each."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def text(self, name: str) -> str:
        value = self._values.get(name)
        if not isinstance(value, str) or not value:
            raise self.wrong(name, "a name")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """Return a field that is an integer of at least 1; `default` if it is absent or null."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(name, "a whole number from 1 on")
        return value

    def first_count(self, *names: str) -> int:
        """Return the first of these fields that is set; 0 if none of them is set.

        Releases of transformers and model families name the same field differently.
        """
        # All fields are checked, so that an invalid field is reported even if another one is used.
        counts = [self.count(name, 0) for name in names]
        return next((count for count in counts if count), 0)

    def wrong(self, name: str, expected: str) -> ConfigError:
        found = repr(self._values[name]) if name in self._values else "missing"
        return ConfigError(
            f"{self.path}: {name} is {found}: expected {expected}", field="model_path"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as exc:
        raise ConfigError(
            f"{path} does not exist. Pass --model-path a model folder.", field="model_path"
        ) from exc
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} can't be read: {exc}", field="model_path") from exc
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object", field="model_path")
    return value


def _num_sliding_layers(config: _Fields) -> int:
    """Return the number of sliding-window layers.

    Without `layer_types`, all layers count as layers with full attention, as in the torch engine.
    """
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        return 0
    return sum(kind == "sliding_attention" for kind in kinds)


def _latent_kv_dim(config: _Fields) -> int:
    """Return the size of the latent KV of models such as DeepSeek's; 0 if the model has none.

    A layer with latent attention stores one vector and a rotary part for all heads.
    """
    if not isinstance(config.get("kv_lora_rank"), int):
        return 0
    return config.count("kv_lora_rank") + config.count("qk_rope_head_dim", 0)


# Values of `layer_types`, as in Qwen3-Next and in Granite 4.
_RECURRENT_LAYERS = frozenset({"linear_attention", "mamba"})


def _has_recurrent_layers(config: _Fields) -> bool:
    """Return whether the model is a hybrid of attention and recurrent layers."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and any(kind in _RECURRENT_LAYERS for kind in kinds):
        return True
    # Nemotron-H describes its layers by a pattern of letters, in which M stands for Mamba.
    pattern = config.get("hybrid_override_pattern")
    return isinstance(pattern, str) and "M" in pattern


def _quantization(config: _Fields) -> str | None:
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        return None
    method = found.get("quant_method") or found.get("quant_algo")
    if not isinstance(method, str) or not method:
        raise config.wrong("quantization_config", "an object with quant_method")
    return method.lower()


def _kv_quantization(folder: Path) -> str | None:
    """Return the type of KV blocks that the file of ModelOpt sets; None if it sets no type."""
    path = folder / KV_CONFIG
    if not path.is_file():
        return None
    found = _read_json(path).get("quantization")
    algorithm = found.get("kv_cache_quant_algo") if isinstance(found, dict) else None
    return algorithm.lower() if isinstance(algorithm, str) and algorithm else None


def _dtype(config: _Fields) -> str:
    """Return the type of the weights that are not quantized; bfloat16 if the file has no type."""
    # Older releases of transformers write `torch_dtype`.
    name = "dtype" if config.get("dtype") else "torch_dtype"
    found = str(config.get(name) or "bfloat16").removeprefix("torch.")
    if found not in _DTYPES:
        raise config.wrong(name, f"one of {', '.join(_DTYPES)}")
    return found


def read_eos_token_ids(
    folder: Path, config: Mapping[str, Any], *, vocab_size: int | None = None
) -> tuple[int, ...]:
    """Return the stop tokens of a model.

    If generation_config.json has stop tokens, it lists all of them. If not, those of config.json
    are returned.

    Args:
        folder: model folder.
        config: the values of its config.json.
        vocab_size: ids that are not in a vocabulary of this size are left out, because some models
            have the id -1 in place of a stop token.

    Raises:
        ConfigError: names the file and the field that is invalid. Without `vocab_size`, a negative
            id is invalid.
    """
    path = folder / GENERATION_CONFIG
    source = _Fields(folder / CONFIG, config)
    if path.is_file():
        generation = _Fields(path, _read_json(path))
        if generation.get("eos_token_id") is not None:
            source = generation
    found = source.get("eos_token_id")
    if found is None:
        return ()
    ids = found if isinstance(found, list) else [found]
    stop_ids = []
    for token_id in ids:
        is_number = isinstance(token_id, int) and not isinstance(token_id, bool)
        if is_number and vocab_size is not None and not 0 <= token_id < vocab_size:
            continue
        if not is_number or token_id < 0:
            raise source.wrong("eos_token_id", "a token id or a list of them")
        stop_ids.append(token_id)
    return tuple(stop_ids)


def _index_bytes(folder: Path) -> int | None:
    """Return the total in the safetensors index; without an index, the sum of the file sizes."""
    path = folder / WEIGHT_INDEX
    if path.is_file():
        metadata = _read_json(path).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if isinstance(total, int | float) and 0 < total <= MAX_INT64:
            return int(total)
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors") if file.is_file()]
    return sum(sizes) or None


_KNOWN = msgspec.yaml.decode(Path(__file__).with_name("known_models.yaml").read_bytes())


def _decode_path(kind: type[Path], value: str) -> Path:
    return kind(value)


SHAPES: Mapping[str, Checkpoint] = {
    name: msgspec.convert({**shape, "folder": name}, Checkpoint, dec_hook=_decode_path)
    for name, shape in _KNOWN.items()
}


MXFP4_BITS = 4.25  # 4 bits, and an 8-bit scale for every 32 values
_BITS = {"mxfp4": MXFP4_BITS, "fp8": 8.0, "nvfp4": 4.5, "fp4": 4.5}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Weight bytes of a model, grouped by how engines shard them."""

    experts: int  # sharded by expert or tensor parallelism
    attention: int  # sharded by tensor parallelism; replicated with attention data parallelism
    vocabulary: int  # embedding and output matrix; sharded like attention
    rest: int  # norms and router; replicated on each rank

    @property
    def total(self) -> int:
        return self.experts + self.attention + self.vocabulary + self.rest


def weight_bytes(model: Checkpoint) -> WeightBytes:
    """Compute the weight bytes of all layers.

    MXFP4 quantizes only the experts. Other methods quantize all matrices of the layers.
    """
    plain_bytes = _DTYPE_BYTES[model.dtype]  # bytes of a value without quantization
    expert_bytes: float = plain_bytes  # bytes of a value in an expert
    if model.quantization in _BITS:
        expert_bytes = _BITS[model.quantization] / 8
    # Bytes of a value in another matrix.
    dense_bytes = plain_bytes if model.quantization == "mxfp4" else expert_bytes
    hidden = model.hidden_size
    inner = model.intermediate_size
    layers = model.num_layers
    heads = model.num_attention_heads
    kv_heads = model.num_kv_heads
    experts = model.num_experts
    # The experts of gpt-oss have biases, and its attention has sinks. Other models have neither.
    is_gpt_oss = model.model_type == "gpt_oss"
    # The numbers of values of one layer. An expert has three matrices: gate, up and down.
    mlp = 3 * hidden * inner * max(1, experts)
    # The query and the output matrix have the same size, and so have the key and the value matrix.
    attention = 2 * hidden * (heads + kv_heads) * model.head_dim
    expert_biases = experts * (2 * inner + hidden) if is_gpt_oss else 0
    biases = (heads + 2 * kv_heads) * model.head_dim + hidden if model.attention_bias else 0
    sinks = heads if is_gpt_oss else 0
    num_vocabulary_matrices = 1 if model.tie_word_embeddings else 2
    # A layer has two norms, and a router if it has experts. The model has one more norm.
    router = experts * (hidden + 1)
    norms_and_routers = layers * (2 * hidden + router) + hidden
    return WeightBytes(
        experts=layers * round(mlp * expert_bytes + expert_biases * plain_bytes),
        attention=layers * round(attention * dense_bytes + (biases + sinks) * plain_bytes),
        vocabulary=num_vocabulary_matrices * model.vocab_size * hidden * plain_bytes,
        rest=norms_and_routers * plain_bytes,
    )
