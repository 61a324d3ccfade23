"""How much memory KV and its way take, as arithmetic."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

from dynamo_trtllm.engines.engine_interface import EngineInfo
from dynamo_trtllm.engines.torch.args import TorchArgs
from dynamo_trtllm.engines.torch.kv import block_bytes, most_bytes
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import KvLayout, Limits

if TYPE_CHECKING:
    from dynamo_trtllm.engines.torch.load import LoadedModel

GIB = 1 << 30


@pytest.fixture
def load() -> ModuleType:
    from dynamo_trtllm.engines.torch import load  # takes seconds: it imports transformers

    return load


def model(device: str = "cuda", longest: int = 131072) -> LoadedModel:
    """gpt-oss-120b's KV."""
    # takes seconds: it imports transformers
    from dynamo_trtllm.engines.torch.load import LoadedModel

    return LoadedModel(
        module=torch.nn.Identity(),
        device=torch.device(device, 0) if device == "cuda" else torch.device(device),
        windows=(128, None) * 18,
        tokenizer=Path("none"),
        info=EngineInfo(
            engine="torch",
            context_length=longest,
            vocab_size=100,
            eos_token_ids=(1,),
            renderer="harmony",
            layout=KvLayout(
                dtype="bfloat16", block_tokens=32, num_layers=36, num_kv_heads=8, head_dim=64
            ),
            limits=Limits(),
        ),
    )


@pytest.mark.parametrize("memory_gib", [1.0, 6.0, 20.0, 60.0])
@pytest.mark.parametrize("max_seq_len", [None, 2000, 131072])
def test_blocks_for_gpu_transfer_leave_space_for_staging(
    load: ModuleType, memory_gib: float, max_seq_len: int | None
) -> None:
    args = TorchArgs(kv_cache_gib=memory_gib, max_seq_len=max_seq_len, max_batch_size=1000)
    made = model(longest=max_seq_len or 131072)
    layout = made.info.layout
    blocks, context, transfer_buffer = load.plan_memory(made, args, has_transfer_buffer=True)
    used = blocks * block_bytes(layout) + transfer_buffer
    # or all that a thousand requests can use
    assert 0.45 * memory_gib * GIB < used <= memory_gib * GIB + 4096
    assert transfer_buffer >= most_bytes(layout, made.windows, context)
    assert load.plan_memory(made, args, has_transfer_buffer=False).num_blocks >= blocks


def test_staging_when_set_holds_the_longest_request(load: ModuleType) -> None:
    made = model()
    args = TorchArgs(kv_cache_gib=20, kv_staging_gib=5)
    plan = load.plan_memory(made, args, has_transfer_buffer=True)
    assert plan == (15 * GIB // block_bytes(made.info.layout), 131072, 5 * GIB)
    small = TorchArgs(kv_cache_gib=20, kv_staging_gib=1)
    with pytest.raises(ConfigError, match="raise it or lower max_seq_len"):
        load.plan_memory(made, small, has_transfer_buffer=True)
    assert (
        load.plan_memory(
            model(longest=20000), small, has_transfer_buffer=True
        ).transfer_buffer_bytes
        == GIB
    )


def test_blocks_when_staging_takes_all_memory_then_config_error(load: ModuleType) -> None:
    args = TorchArgs(kv_cache_gib=2, kv_staging_gib=4)
    with pytest.raises(ConfigError, match="no space for one KV block"):
        load.plan_memory(model(), args, has_transfer_buffer=True)
