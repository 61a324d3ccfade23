"""A model folder becomes a model that the scheduler can run. The only module that names transformers' loaders.

A folder that holds nothing but a GGUF file is converted once into the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import struct
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, modeling_gguf_pytorch_utils
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging as vendor_logging

from dynamo_trtllm.config.load import process_environment
from dynamo_trtllm.engines.checkpoint import TOKENIZER, model_file, renderer_of, served_files
from dynamo_trtllm.engines.gpu import VISIBLE
from dynamo_trtllm.engines.torch.args import TorchArgs
from dynamo_trtllm.engines.torch.attention import NAME, paged_attention
from dynamo_trtllm.engines.torch.kv import most_bytes
from dynamo_trtllm.errors import ConfigError, EngineFailed
from dynamo_trtllm.messages import KvLayout

_log = logging.getLogger(__name__)
_CONVERSION_S = 600.0  # longest wait for a small file; one of 90 MB takes 25 s on two cores
_BYTES_PER_S = 300_000  # a tenth of that speed: a larger file may take longer
_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    module: torch.nn.Module
    device: torch.device
    dtype: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # per layer; None: sees everything
    renderer: str
    files: Mapping[str, Path]
    tokenizer: Path | None  # tokenizer.json, if there is one


def load(model_path: str, args: TorchArgs) -> LoadedModel:
    """Blocking. Raises ConfigError for a folder or device that can't work, EngineFailed when loading it fails."""
    vendor_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    vendor_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = _device(args.device)
    if device.type == "cpu" and args.free_gpu_memory_fraction is not None:
        raise ConfigError(
            "free_gpu_memory_fraction has no meaning on CPU: leave it out or use kv_cache_gib",
            field="free_gpu_memory_fraction",
        )
    dtype = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    folder = _folder(Path(model_path))
    AttentionInterface.register(NAME, paged_attention)
    began = time.monotonic()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        _require_supported(config, folder)
        make = _dummy_weights if args.load_format == "dummy" else _from_files
        module: Any = make(config, folder, device, getattr(torch, dtype)).eval().requires_grad_(False).to(device)
    except (OSError, ValueError, KeyError, ImportError) as exc:
        raise ConfigError(f"model folder {folder} does not load: {exc}", field="model_path") from exc
    except RuntimeError as exc:
        raise EngineFailed(f"loading {folder} failed: {exc}") from exc
    _log.info("loaded %s on %s as %s in %.1f s", folder, device, dtype, time.monotonic() - began)
    return _describe(module, config, folder, device=device, dtype=dtype)


def _from_files(config: Any, folder: Path, _device: torch.device, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation=NAME, local_files_only=True
    )


def _dummy_weights(config: Any, _folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Random weights, the same in every process on the same kind of device: its generator is seeded."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # it describes files that are not read; dummy weights have the engine's dtype
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)  # type: ignore[no-untyped-call]


def _describe(module: Any, config: Any, folder: Path, *, device: torch.device, dtype: str) -> LoadedModel:
    text = config.get_text_config()
    return LoadedModel(
        module=module,
        device=device,
        dtype=dtype,
        context_length=text.max_position_embeddings,
        vocab_size=text.vocab_size,
        eos_token_ids=tuple(each for each in _eos(folder, text) if 0 <= each < text.vocab_size),
        num_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        windows=_windows(text),
        renderer=renderer_of(config.model_type),
        files=served_files(folder, config.model_type),
        tokenizer=folder / TOKENIZER if (folder / TOKENIZER).is_file() else None,
    )


def _device(wanted: str) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
        requested = process_environment().get(VISIBLE, "")
        names = [word.strip() for word in requested.split(",")]
        if wanted == "cpu" and any(name.isdecimal() or name.startswith(("GPU-", "MIG-")) for name in names):
            raise ConfigError(
                f"GPUs {requested} are requested ({VISIBLE}), and torch {torch.__version__} can use none; install a "
                f"build of torch for CUDA, or give an empty {VISIBLE} to run on the CPU",
                field="device",
            )
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {wanted} does not exist: {torch.cuda.device_count()} GPUs are visible", field="device"
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _folder(path: Path) -> Path:
    found = model_file(path)
    return path if found.suffix != ".gguf" else _converted(found)


def _converted(gguf: Path) -> Path:
    """Return the folder in the cache that holds this GGUF file as safetensors, made at first use.

    One process converts; others that need the same file wait for it. The lock ends with the process that holds it.
    Raises ConfigError as `load`, EngineFailed when another process does not finish in time.
    """
    stat = gguf.stat()
    longest_s = max(_CONVERSION_S, stat.st_size / _BYTES_PER_S)
    key = hashlib.sha256(f"{gguf.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    target = Path.home() / ".cache" / "dynamo_trtllm" / "models" / f"{gguf.stem}-{key}"
    if (target / "config.json").is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.with_name(f".{target.name}.lock"))
        try:
            lock.acquire(blocking=False)
        except Timeout:
            _log.info("waiting for another process that converts %s", gguf.name)
            lock.acquire(timeout=longest_s)
        try:
            if not (target / "config.json").is_file():
                _convert(gguf, target)
        finally:
            lock.release()
    except Timeout as exc:
        raise EngineFailed(
            f"another process has not finished converting {gguf} after {longest_s:.0f} s: end it, and start this "
            "worker again"
        ) from exc
    except OSError as exc:
        raise ConfigError(f"{gguf} can't be converted into {target.parent}: {exc}", field="model_path") from exc
    return target


def _convert(gguf: Path, target: Path) -> None:
    """Write the folder beside its place, and move it there when it is whole."""
    _log.info(
        "converting %s (%d MB) into %s, once; 4 MB take about a second", gguf.name, gguf.stat().st_size >> 20, target
    )
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch:
        made = Path(scratch) / "model"
        try:
            _read_gguf(gguf).save_pretrained(made)
            AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True).save_pretrained(made)
        except ImportError as exc:
            raise ConfigError(
                "reading .gguf files needs the package gguf: pip install gguf", field="model_path"
            ) from exc
        except (ValueError, KeyError, RuntimeError, struct.error) as exc:
            raise ConfigError(f"{gguf} can't be converted: {exc}", field="model_path") from exc
        shutil.rmtree(target, ignore_errors=True)  # what an interrupted removal left
        made.rename(target)
    _log.info("converted %s in %.1f s", gguf.name, time.monotonic() - began)


def _read_gguf(gguf: Path) -> Any:
    """What from_pretrained(gguf_file=...) does, which refuses to without the package accelerate (transformers 5.23)."""
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    # The module's own bar would be shown whatever the verbosity is.
    modeling_gguf_pytorch_utils.tqdm = vendor_logging.tqdm  # type: ignore[attr-defined]
    read = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    weights = read(str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.float32)  # type: ignore[no-untyped-call]
    found = model.load_state_dict(weights["tensors"], strict=False)
    tied = set(model._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    if missing := set(found.missing_keys) - tied:
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    model.tie_weights()
    return model


def _require_supported(config: Any, folder: Path) -> None:
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if odd := sorted(kinds - _LAYER_TYPES):
        raise ConfigError(f"{folder}: layers of kind {', '.join(odd)} have no KV that can move", field="model_path")


def _windows(text: Any) -> tuple[int | None, ...]:
    """Which layers see only a window. Without `layer_types` every layer counts as full: more moves, nothing is lost."""
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    return tuple(text.sliding_window if kind == "sliding_attention" else None for kind in kinds)


def _eos(folder: Path, text: Any) -> tuple[int, ...]:
    found: int | list[int] | None = None
    if (folder / "generation_config.json").is_file():
        try:
            found = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
        except (OSError, ValueError, json.JSONDecodeError) as exc:
            raise ConfigError(f"{folder}/generation_config.json: {exc}", field="model_path") from exc
    if found is None:
        found = text.eos_token_id
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)


_CPU_KV_BYTES = 512 << 20
_GPU_KV_FRACTION = 0.5
_TRANSFER_BUFFER_SHARE = (
    8  # of the KV blocks' memory, one part in so many, if that is more than the longest request needs
)


def kv_layout(model: LoadedModel, args: TorchArgs) -> KvLayout:
    return KvLayout(
        dtype=model.dtype,
        block_tokens=args.kv_block_size,
        num_layers=len(model.windows),
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
    )


def block_bytes(layout: KvLayout) -> int:
    """Keys and values of one block in all layers."""
    per_token = 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim
    item_bytes: int = getattr(torch, layout.dtype).itemsize
    return per_token * layout.block_tokens * item_bytes


def kv_blocks(model: LoadedModel, args: TorchArgs, layout: KvLayout, *, has_transfer_buffer: bool) -> int:
    """Return the number of KV blocks. Raises ConfigError when not one block fits.

    `has_transfer_buffer`: the engine has a transfer buffer, which on a GPU is taken from the same memory.
    """
    if args.kv_cache_blocks is not None:
        return args.kv_cache_blocks
    longest = min(model.context_length, args.max_seq_len or model.context_length)
    useful = args.max_batch_size * -(-longest // layout.block_tokens)
    if args.kv_cache_gib is not None:
        kv_memory_bytes = int(args.kv_cache_gib * (1 << 30))
    elif model.device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(model.device)
        kv_memory_bytes = int(free_bytes * (args.free_gpu_memory_fraction or _GPU_KV_FRACTION))
    else:
        kv_memory_bytes = _CPU_KV_BYTES
    fitting = kv_memory_bytes // block_bytes(layout)
    if has_transfer_buffer and model.device.type == "cuda":
        fitting = _beside_transfer_buffer(model, args, layout, kv_memory_bytes)
    blocks = min(fitting, useful)
    if blocks < 1:
        raise ConfigError(
            f"{kv_memory_bytes >> 20} MiB hold no KV block of {block_bytes(layout) >> 20} MiB: raise kv_cache_gib",
            field="kv_cache_gib",
        )
    return blocks


def _beside_transfer_buffer(model: LoadedModel, args: TorchArgs, layout: KvLayout, kv_memory_bytes: int) -> int:
    """Return the most blocks that leave enough memory for their `transfer_buffer_bytes`."""
    each = block_bytes(layout)
    if args.kv_staging_gib is not None:
        return (kv_memory_bytes - int(args.kv_staging_gib * (1 << 30))) // each
    longest = min(model.context_length, args.max_seq_len or model.context_length)
    whole = (kv_memory_bytes - most_bytes(layout, model.windows, longest)) // each
    short = kv_memory_bytes // (
        2 * each
    )  # of fewer tokens than the longest request: staging takes no more than the blocks
    return min(max(whole, short), kv_memory_bytes * _TRANSFER_BUFFER_SHARE // ((_TRANSFER_BUFFER_SHARE + 1) * each))


def transfer_buffer_bytes(
    model: LoadedModel, args: TorchArgs, layout: KvLayout, num_blocks: int, context_length: int
) -> int:
    """Raises ConfigError when what was asked for can't hold the longest request: it would wait for ever."""
    least = most_bytes(layout, model.windows, context_length)
    least += -least % 4096
    if args.kv_staging_gib is None:
        return max(least, num_blocks * block_bytes(layout) // _TRANSFER_BUFFER_SHARE)
    asked = int(args.kv_staging_gib * (1 << 30))
    if asked < least:
        raise ConfigError(
            f"kv_staging_gib {args.kv_staging_gib:g} is {asked} bytes; one request of {context_length} tokens moves "
            f"{least}: raise it or lower max_seq_len",
            field="kv_staging_gib",
        )
    return asked


def context_length(model: LoadedModel, args: TorchArgs, pool_tokens: int) -> int:
    """The longest request: what the model, max_seq_len and the whole KV memory allow."""
    wanted = min(model.context_length, args.max_seq_len or model.context_length)
    if pool_tokens < wanted:
        _log.warning("KV memory holds %d tokens, so the context is that and not %d", pool_tokens, wanted)
    return min(wanted, pool_tokens)


def num_threads(model: LoadedModel, args: TorchArgs) -> int | None:
    """None: leave the vendor's choice."""
    return args.num_threads or (1 if model.device.type == "cpu" else None)
