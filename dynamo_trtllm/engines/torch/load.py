"""Load a model folder with transformers, and size the KV pool and the transfer buffer.

A folder whose only weights are a GGUF file is converted once into the user's cache folder.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    modeling_gguf_pytorch_utils,
)
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging as vendor_logging

from dynamo_trtllm.config.load import process_environment
from dynamo_trtllm.engines.engine_interface import EngineInfo
from dynamo_trtllm.engines.gpu import VISIBLE
from dynamo_trtllm.engines.torch.args import TorchArgs
from dynamo_trtllm.engines.torch.kv import NAME, block_bytes, most_bytes, paged_attention
from dynamo_trtllm.engines.torch.loading_progress import LoadingProgress
from dynamo_trtllm.models.checkpoint import (
    TOKENIZER,
    model_file,
    read_eos_token_ids,
    renderer_of,
    served_files,
)
from dynamo_trtllm.protocol.counted import counted_are
from dynamo_trtllm.protocol.errors import ConfigError, EngineFailed
from dynamo_trtllm.protocol.messages import KvLayout, Limits
from dynamo_trtllm.protocol.number_types import ceil_div

log = logging.getLogger(__name__)
# The longest wait for another process that converts a file. Converting 90 MB takes 25 s on two
# cores. Large files may take longer: the time in which a tenth of this speed converts them.
_CONVERSION_S = 600.0
_BYTES_PER_S = 300_000
_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A loaded model, and what its engine would register if KV memory were not limited."""

    module: torch.nn.Module
    device: torch.device
    windows: tuple[int | None, ...]  # per layer, in tokens; None: full attention
    tokenizer: Path | None  # tokenizer.json, if the folder has one
    info: EngineInfo


def load(model_path: str, args: TorchArgs, progress: LoadingProgress | None = None) -> LoadedModel:
    """Load the model. Blocks the caller.

    Args:
        model_path: the folder of the model, or a GGUF file.
        args: arguments of the engine.
        progress: follows the load.

    Raises:
        ConfigError: the folder, the device or an argument can't work.
        EngineFailed: loading failed.
    """
    vendor_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    vendor_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = _device(args.device)
    if device.type == "cpu" and args.free_gpu_memory_fraction is not None:
        raise ConfigError(
            "free_gpu_memory_fraction has no effect on CPU; remove it or set kv_cache_gib",
            field="free_gpu_memory_fraction",
        )
    dtype: str
    if args.dtype is not None:
        dtype = args.dtype
    else:
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    folder = Path(model_path)
    file = model_file(folder)
    if file.suffix == ".gguf":
        folder = _converted(file)
    AttentionInterface.register(NAME, paged_attention)
    begun_s = time.monotonic()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        windows = _windows(config.get_text_config(), folder)
        options = {"dtype": getattr(torch, dtype), "attn_implementation": NAME}
        if args.load_format == "dummy":
            loaded: Any = _dummy_weights(config, device, options)
        else:
            with (progress or LoadingProgress()).following(vendor_logging):
                loaded = AutoModelForCausalLM.from_pretrained(
                    folder, config=config, local_files_only=True, **options
                )
        module = loaded.eval().requires_grad_(False).to(device)
    except (OSError, ValueError, KeyError, ImportError) as exc:
        raise ConfigError(
            f"loading model folder {folder} failed: {exc}", field="model_path"
        ) from exc
    except RuntimeError as exc:
        raise EngineFailed(f"loading {folder} failed: {exc}") from exc
    loaded_s = time.monotonic() - begun_s
    log.info("loaded %s on %s as %s in %.1f s", folder, device, dtype, loaded_s)
    tokenizer = folder / TOKENIZER
    return LoadedModel(
        module=module,
        device=device,
        windows=windows,
        tokenizer=tokenizer if tokenizer.is_file() else None,
        info=_engine_info(config, folder, args, dtype=dtype, num_layers=len(windows)),
    )


def _engine_info(
    config: Any, folder: Path, args: TorchArgs, *, dtype: str, num_layers: int
) -> EngineInfo:
    """Return what the engine would register if KV memory were not limited."""
    text = config.get_text_config()
    # These two are missing, or None, if they follow from the others.
    num_kv_heads = getattr(text, "num_key_value_heads", None)
    if not num_kv_heads:
        num_kv_heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None)
    if not head_dim:
        head_dim = text.hidden_size // text.num_attention_heads
    layout = KvLayout(
        dtype=dtype,
        block_tokens=args.kv_block_size,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    context_length = text.max_position_embeddings
    if args.max_seq_len is not None:
        context_length = min(context_length, args.max_seq_len)
    eos_token_ids = read_eos_token_ids(
        folder, {"eos_token_id": text.eos_token_id}, vocab_size=text.vocab_size
    )
    return EngineInfo(
        engine="torch",
        context_length=context_length,
        vocab_size=text.vocab_size,
        eos_token_ids=eos_token_ids,
        renderer=renderer_of(config.model_type),
        layout=layout,
        limits=Limits(max_batch_size=args.max_batch_size, max_num_tokens=args.max_step_tokens),
        supported_features=("priority",),
        files=served_files(folder, config.model_type),
        can_aggregate=True,
        reuses_prefixes=args.enable_prefix_caching,
    )


def _dummy_weights(config: Any, device: torch.device, options: dict[str, Any]) -> Any:
    """Return a model with random weights.

    The weights are the same in every process on the same kind of device.
    """
    # Dummy weights have the engine's dtype, not that of the files.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), device:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, **options)  # type: ignore[no-untyped-call]


def _device(wanted: str) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
        # If GPUs are requested but can't be used, the engine should not silently use the CPU.
        requested = process_environment().get(VISIBLE, "")
        requests_gpu = any(_names_gpu(name.strip()) for name in requested.split(","))
        if wanted == "cpu" and requests_gpu:
            raise ConfigError(
                f"{VISIBLE} requests GPUs {requested}, but torch {torch.__version__} can use none;"
                f" install a build of torch for CUDA, or set {VISIBLE} to an empty value to run on"
                " the CPU",
                field="device",
            )
    device = torch.device(wanted)
    if device.type != "cuda":
        return device
    index = 0 if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device {wanted} does not exist:"
            f" {counted_are(torch.cuda.device_count(), 'GPU')} visible",
            field="device",
        )
    return torch.device("cuda", index)


def _names_gpu(name: str) -> bool:
    """Return whether an entry of CUDA_VISIBLE_DEVICES has the form of a GPU's number or UUID."""
    return name.isdecimal() or name.startswith(("GPU-", "MIG-"))


def _converted(gguf: Path) -> Path:
    """Return the cache folder with this GGUF file as safetensors; convert it at first use.

    One process converts the file, and others that need it wait. The lock is released when the
    converting process ends.

    Raises:
        ConfigError: the file can't be converted.
        EngineFailed: another process does not finish in time.
    """
    stat = gguf.stat()
    longest_s = max(_CONVERSION_S, stat.st_size / _BYTES_PER_S)
    # Another file, or a changed one, has another key.
    identity = f"{gguf.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    target = Path.home() / ".cache" / "dynamo_trtllm" / "models" / f"{gguf.stem}-{key}"
    if (target / "config.json").is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.with_name(f".{target.name}.lock"))
        try:
            acquired_lock = lock.acquire(blocking=False)
        except Timeout:
            log.info("waiting for another process to convert %s", gguf.name)
            acquired_lock = lock.acquire(timeout=longest_s)
        with acquired_lock:
            if not (target / "config.json").is_file():
                _convert(gguf, target)
    except Timeout as exc:
        raise EngineFailed(
            f"another process has not finished converting {gguf} after {longest_s:.0f} s; stop it"
            " and restart this worker"
        ) from exc
    except OSError as exc:
        raise ConfigError(
            f"{gguf} can't be converted into {target.parent}: {exc}", field="model_path"
        ) from exc
    return target


def _convert(gguf: Path, target: Path) -> None:
    """Write the converted model to a temporary folder, and rename it when it is complete."""
    log.info(
        "converting %s (%d MB) into %s, once; 4 MB take about a second",
        gguf.name,
        gguf.stat().st_size >> 20,
        target,
    )
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch:
        model_folder = Path(scratch) / "model"
        try:
            _read_gguf(gguf).save_pretrained(model_folder)
            tokenizer = AutoTokenizer.from_pretrained(
                gguf.parent, gguf_file=gguf.name, local_files_only=True
            )
            tokenizer.save_pretrained(model_folder)
        except ImportError as exc:
            raise ConfigError(
                "reading .gguf files needs the package gguf; run pip install gguf",
                field="model_path",
            ) from exc
        except (ValueError, LookupError, RuntimeError, struct.error) as exc:
            raise ConfigError(f"{gguf} can't be converted: {exc}", field="model_path") from exc
        shutil.rmtree(target, ignore_errors=True)  # an interrupted removal may have left files
        model_folder.rename(target)
    log.info("converted %s in %.1f s", gguf.name, time.monotonic() - begun_s)


def _read_gguf(gguf: Path) -> Any:
    """Load a GGUF file as `from_pretrained(gguf_file=...)` does.

    `from_pretrained` requires the package accelerate (transformers 5.23), and this function does
    not.
    """
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    # The module's own progress bar ignores the verbosity.
    modeling_gguf_pytorch_utils.tqdm = vendor_logging.tqdm  # type: ignore[attr-defined]
    read = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    weights = read(str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.float32)  # type: ignore[no-untyped-call]
    result = model.load_state_dict(weights["tensors"], strict=False)
    missing = set(result.missing_keys)
    # The file does not have tied weights, which are copies of other weights.
    if config.tie_word_embeddings:
        missing -= set(model._tied_weights_keys or ())
    if missing:
        raise ValueError(f"the file lacks {', '.join(sorted(missing))}")
    model.tie_weights()
    return model


def _windows(text: Any, folder: Path) -> tuple[int | None, ...]:
    """Return the attention window of each layer in tokens; None for full attention.

    Without `layer_types` in the configuration every layer counts as full attention, and more KV is
    transferred.

    Raises:
        ConfigError: the engine does not support a type of layers.
    """
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    unsupported = sorted(set(kinds) - _LAYER_TYPES)
    if unsupported:
        raise ConfigError(
            f"{folder}: the engine does not support layers of type {', '.join(unsupported)}",
            field="model_path",
        )
    return tuple(text.sliding_window if kind == "sliding_attention" else None for kind in kinds)


_CPU_KV_BYTES = 512 << 20
_GPU_KV_FRACTION = 0.5
# The transfer buffer has 1/8 of the KV blocks' memory, or space for the longest request if that is
# more.
_TRANSFER_BUFFER_SHARE = 8


class MemoryPlan(NamedTuple):
    """The use of an engine's KV memory."""

    num_blocks: int
    context_length: int  # longest request in tokens
    transfer_buffer_bytes: int  # 0 without a transfer buffer


def plan_memory(model: LoadedModel, args: TorchArgs, *, has_transfer_buffer: bool) -> MemoryPlan:
    """Divide the KV memory into blocks and, on a GPU, the transfer buffer.

    On a CPU, the memory of the transfer buffer is not a part of the KV memory.

    Raises:
        ConfigError: the memory is too small for one block, or kv_staging_gib is too small for the
            longest request, which would wait for ever.
    """
    if args.kv_cache_blocks is not None:
        num_blocks = args.kv_cache_blocks
    else:
        num_blocks = _fitting_blocks(model, args, has_transfer_buffer=has_transfer_buffer)
    pool_tokens = num_blocks * model.info.layout.block_tokens
    if pool_tokens < model.info.context_length:
        log.warning(
            "KV memory holds %d tokens, which limits the context (wanted: %d); raise kv_cache_gib"
            " or lower max_seq_len",
            pool_tokens,
            model.info.context_length,
        )
    context_length = min(model.info.context_length, pool_tokens)
    if not has_transfer_buffer:
        return MemoryPlan(num_blocks, context_length, 0)
    longest_bytes = most_bytes(model.info.layout, model.windows, context_length)
    # Round up to a multiple of the buffer's alignment.
    longest_bytes += -longest_bytes % 4096
    if args.kv_staging_gib is None:
        share_bytes = num_blocks * block_bytes(model.info.layout) // _TRANSFER_BUFFER_SHARE
        return MemoryPlan(num_blocks, context_length, max(longest_bytes, share_bytes))
    wanted_bytes = int(args.kv_staging_gib * (1 << 30))
    if wanted_bytes < longest_bytes:
        raise ConfigError(
            f"kv_staging_gib {args.kv_staging_gib:g} is {wanted_bytes} bytes; one request of"
            f" {context_length} tokens needs {longest_bytes}; raise it or lower max_seq_len",
            field="kv_staging_gib",
        )
    return MemoryPlan(num_blocks, context_length, wanted_bytes)


def _fitting_blocks(model: LoadedModel, args: TorchArgs, *, has_transfer_buffer: bool) -> int:
    """Return the number of KV blocks that fit into the memory, but not more than the largest batch
    of requests can use.
    """
    bytes_per_block = block_bytes(model.info.layout)
    if args.kv_cache_gib is not None:
        kv_memory_bytes = int(args.kv_cache_gib * (1 << 30))
    elif model.device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(model.device)
        fraction = args.free_gpu_memory_fraction
        if fraction is None:
            fraction = _GPU_KV_FRACTION
        kv_memory_bytes = int(free_bytes * fraction)
    else:
        kv_memory_bytes = _CPU_KV_BYTES
    if has_transfer_buffer and model.device.type == "cuda":
        fitting = _beside_transfer_buffer(model, args, kv_memory_bytes)
    else:
        fitting = kv_memory_bytes // bytes_per_block
    blocks_per_request = ceil_div(model.info.context_length, model.info.layout.block_tokens)
    blocks = min(fitting, args.max_batch_size * blocks_per_request)
    if blocks < 1:
        raise ConfigError(
            f"{kv_memory_bytes >> 20} MiB of KV memory has no space for one KV block of "
            f"{bytes_per_block >> 20} MiB; raise kv_cache_gib",
            field="kv_cache_gib",
        )
    return blocks


def _beside_transfer_buffer(model: LoadedModel, args: TorchArgs, kv_memory_bytes: int) -> int:
    """Return the most blocks that leave enough memory for the transfer buffer."""
    bytes_per_block = block_bytes(model.info.layout)
    if args.kv_staging_gib is not None:
        buffer_bytes = int(args.kv_staging_gib * (1 << 30))
        return (kv_memory_bytes - buffer_bytes) // bytes_per_block
    # The transfer buffer needs space for the KV of the longest request.
    longest_bytes = most_bytes(model.info.layout, model.windows, model.info.context_length)
    blocks_beside_longest = (kv_memory_bytes - longest_bytes) // bytes_per_block
    # If the blocks hold fewer tokens than the longest request, they limit the longest request, and
    # the transfer buffer is at most as large as the blocks. So half of the memory can always be
    # blocks.
    half_of_blocks = kv_memory_bytes // (2 * bytes_per_block)
    # The transfer buffer has at least one part for every _TRANSFER_BUFFER_SHARE parts of blocks.
    blocks_beside_share = (
        kv_memory_bytes * _TRANSFER_BUFFER_SHARE // ((_TRANSFER_BUFFER_SHARE + 1) * bytes_per_block)
    )
    return min(max(blocks_beside_longest, half_of_blocks), blocks_beside_share)
