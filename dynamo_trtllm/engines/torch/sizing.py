"""How much KV memory an engine takes and how long a request may be: pure arithmetic on a model and its arguments."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from dynamo_trtllm.engines.torch.args import TorchArgs
from dynamo_trtllm.engines.torch.kv import most_bytes
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.messages import KvLayout

if TYPE_CHECKING:
    from dynamo_trtllm.engines.torch.load import LoadedModel  # imports transformers: seconds

_log = logging.getLogger(__name__)
_CPU_KV_BYTES = 512 << 20
_GPU_KV_FRACTION = 0.5
_STAGING_SHARE = 8  # of the KV blocks' memory, one part in so many, if that is more than the longest request needs


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


def kv_blocks(model: LoadedModel, args: TorchArgs, layout: KvLayout, *, staged: bool) -> int:
    """Return the number of KV blocks. Raises ConfigError when not one block fits.

    `staged`: the engine has a transfer buffer, which on a GPU is taken from the same memory.
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
    if staged and model.device.type == "cuda":
        fitting = _beside_staging(model, args, layout, kv_memory_bytes)
    blocks = min(fitting, useful)
    if blocks < 1:
        raise ConfigError(
            f"{kv_memory_bytes >> 20} MiB hold no KV block of {block_bytes(layout) >> 20} MiB: raise kv_cache_gib",
            field="kv_cache_gib",
        )
    return blocks


def _beside_staging(model: LoadedModel, args: TorchArgs, layout: KvLayout, kv_memory_bytes: int) -> int:
    """Return the most blocks that leave enough memory for their `staging_bytes`."""
    each = block_bytes(layout)
    if args.kv_staging_gib is not None:
        return (kv_memory_bytes - int(args.kv_staging_gib * (1 << 30))) // each
    longest = min(model.context_length, args.max_seq_len or model.context_length)
    whole = (kv_memory_bytes - most_bytes(layout, model.windows, longest)) // each
    short = kv_memory_bytes // (
        2 * each
    )  # of fewer tokens than the longest request: staging takes no more than the blocks
    return min(max(whole, short), kv_memory_bytes * _STAGING_SHARE // ((_STAGING_SHARE + 1) * each))


def staging_bytes(model: LoadedModel, args: TorchArgs, layout: KvLayout, num_blocks: int, context_length: int) -> int:
    """Raises ConfigError when what was asked for can't hold the longest request: it would wait for ever."""
    least = most_bytes(layout, model.windows, context_length)
    least += -least % 4096
    if args.kv_staging_gib is None:
        return max(least, num_blocks * block_bytes(layout) // _STAGING_SHARE)
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
