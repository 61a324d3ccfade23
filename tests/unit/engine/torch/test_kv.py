"""Blocks: reserved, freed, gathered, scattered."""

from __future__ import annotations

import pytest
import torch

from dynamo_trtllm.engine.torch.kv import KvPool
from dynamo_trtllm.messages import KvLayout


def make_pool(num_blocks: int = 20) -> KvPool:
    layout = KvLayout(dtype="float32", block_tokens=4, num_layers=2, num_kv_heads=2, head_dim=3)
    return KvPool(layout, num_blocks, windows=(8, None), device=torch.device("cpu"))


def test_reserve_when_full_then_none_and_nothing_is_taken() -> None:
    pool = make_pool(4)
    first = pool.reserve(9)
    assert first is not None
    assert (len(first), pool.used) == (3, 3)
    assert pool.reserve(5) is None
    assert pool.used == 3
    pool.free(first)
    assert pool.used == 0


def test_reserve_when_blocks_were_freed_then_the_same_memory_is_used_again() -> None:
    pool = make_pool()
    first = pool.reserve(12)
    assert first is not None
    pool.free(first)
    again = pool.reserve(12)
    assert again is not None
    assert again.tolist() == first.tolist()


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 7, 8, 9, 12, 13, 40])
def test_gather_when_scattered_elsewhere_then_all_that_is_seen_is_there(tokens: int) -> None:
    source, target = make_pool(), make_pool()
    source.keys.copy_(torch.randn_like(source.keys))
    source.values.copy_(torch.randn_like(source.values))
    target.reserve(5)  # so that block numbers differ
    ours, theirs = source.reserve(tokens), target.reserve(tokens + 6)
    assert ours is not None
    assert theirs is not None
    staging = source.gather(ours, tokens)
    assert staging.nbytes == source.staging_bytes(tokens) == target.new_staging(tokens).nbytes
    target.scatter(staging, theirs, tokens)
    for layer, window in enumerate((8, None)):
        seen = range(0 if window is None else max(0, tokens - window + 1), tokens)
        for mine, other in ((source.keys, target.keys), (source.values, target.values)):
            for at in seen:
                assert torch.equal(mine[layer, ours[at // 4], at % 4], other[layer, theirs[at // 4], at % 4])


def test_staging_when_prompt_is_long_then_a_sliding_layer_moves_only_its_window() -> None:
    pool = make_pool()
    per_block = 2 * 4 * 2 * 3 * 4
    assert pool.staging_bytes(40) == (10 + 2) * per_block  # the token at 40 sees 33 to 39 in the sliding layer
