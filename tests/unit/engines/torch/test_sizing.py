"""How much memory KV and its way take, as arithmetic."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

from dynamo_trtllm.engines.torch.args import TorchArgs
from dynamo_trtllm.engines.torch.kv import block_bytes, most_bytes
from dynamo_trtllm.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_trtllm.engines.torch.load import LoadedModel

GIB = 1 << 30


@pytest.fixture
def load() -> ModuleType:
    from dynamo_trtllm.engines.torch import load  # takes seconds: it imports transformers

    return load


def model(device: str = "cuda", context_length: int = 131072) -> LoadedModel:
    """gpt-oss-120b's KV."""
    from dynamo_trtllm.engines.torch.load import LoadedModel  # takes seconds: it imports transformers

    return LoadedModel(
        module=torch.nn.Identity(),
        device=torch.device(device, 0) if device == "cuda" else torch.device(device),
        dtype="bfloat16",
        context_length=context_length,
        vocab_size=100,
        eos_token_ids=(1,),
        num_kv_heads=8,
        head_dim=64,
        windows=(128, None) * 18,
        renderer="harmony",
        files={},
        tokenizer=Path("none"),
    )


@pytest.mark.parametrize("room_gib", [1.0, 6.0, 20.0, 60.0])
@pytest.mark.parametrize("max_seq_len", [None, 2000, 131072])
def test_blocks_when_kv_is_handed_over_on_a_gpu_then_staging_fits_beside_them(
    load: ModuleType, room_gib: float, max_seq_len: int | None
) -> None:
    args = TorchArgs(kv_cache_gib=room_gib, max_seq_len=max_seq_len, max_batch_size=1000)
    made = model()
    layout = load.kv_layout(made, args)
    blocks = load.kv_blocks(made, args, layout, has_transfer_buffer=True)
    context = load.context_length(made, args, blocks * layout.block_tokens)
    transfer_buffer = load.transfer_buffer_bytes(made, args, layout, blocks, context)
    used = blocks * block_bytes(layout) + transfer_buffer
    assert 0.45 * room_gib * GIB < used <= room_gib * GIB + 4096  # or all that a thousand requests can use
    assert transfer_buffer >= most_bytes(layout, made.windows, context)
    assert load.kv_blocks(made, args, layout, has_transfer_buffer=False) >= blocks


def test_staging_when_set_then_it_is_that_and_must_hold_the_longest_request(load: ModuleType) -> None:
    made, args = model(), TorchArgs(kv_cache_gib=20, kv_staging_gib=5)
    layout = load.kv_layout(made, args)
    blocks = load.kv_blocks(made, args, layout, has_transfer_buffer=True)
    assert blocks == 15 * GIB // block_bytes(layout)
    assert load.transfer_buffer_bytes(made, args, layout, blocks, 131072) == 5 * GIB
    small = TorchArgs(kv_cache_gib=20, kv_staging_gib=1)
    with pytest.raises(ConfigError, match="raise it or lower max_seq_len"):
        load.transfer_buffer_bytes(made, small, layout, blocks, 131072)
    assert load.transfer_buffer_bytes(made, small, layout, blocks, 20000) == GIB


def test_blocks_when_staging_takes_all_room_then_config_error(load: ModuleType) -> None:
    args = TorchArgs(kv_cache_gib=2, kv_staging_gib=4)
    with pytest.raises(ConfigError, match="no space for one KV block"):
        load.kv_blocks(model(), args, load.kv_layout(model(), args), has_transfer_buffer=True)
