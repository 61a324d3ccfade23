"""Blocks: reserved, freed, and the rows of them that move."""

from __future__ import annotations

import pytest
import torch

from dynamo_trtllm.engines.torch.kv import KvPool, most_bytes
from dynamo_trtllm.messages import KvLayout

LAYOUT = KvLayout(dtype="float32", block_tokens=4, num_layers=3, num_kv_heads=2, head_dim=3)
WINDOWS = (8, None, 8)


def make_pool(num_blocks: int = 20) -> KvPool:
    return KvPool(LAYOUT, num_blocks, windows=WINDOWS, device=torch.device("cpu"))


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


def test_rows_when_prompt_is_long_then_a_sliding_layer_moves_only_its_window() -> None:
    pool = make_pool()
    blocks = pool.reserve(40)
    assert blocks is not None
    assert len(pool.rows(blocks, 40)) == pool.num_rows(40) == 2 * (2 + 10 + 2)  # at 40, a sliding layer sees 33 to 39
    assert pool.moved_bytes(40) == 2 * 14 * 4 * 2 * 3 * 4


def test_rows_when_read_and_written_then_they_are_the_blocks_of_keys_and_values() -> None:
    pool = make_pool()
    blocks = pool.reserve(6)
    assert blocks is not None
    pool.all_rows[pool.rows(blocks, 6)] = torch.full((16,), 1, dtype=torch.uint8).view(pool.width)
    for half in (pool.keys, pool.values):
        for layer in range(3):
            changed = half[layer].flatten(1).ne(0).all(dim=1)
            assert changed.nonzero().flatten().tolist() == sorted(blocks.tolist())


@pytest.mark.parametrize("tokens", [1, 4, 7, 8, 9, 16, 40])
def test_most_bytes_when_prompts_are_shorter_then_none_moves_more(tokens: int) -> None:
    pool = make_pool()
    assert most_bytes(LAYOUT, WINDOWS, tokens) >= max(pool.moved_bytes(n) for n in range(1, tokens + 1))


@pytest.mark.parametrize(("head_dim", "width"), [(4, torch.complex128), (1, torch.complex128), (3, torch.int64)])
def test_pool_when_blocks_have_odd_sizes_then_rows_are_made_of_the_widest_elements(
    head_dim: int, width: torch.dtype
) -> None:
    block_tokens = 4 if head_dim != 3 else 1
    layout = KvLayout(dtype="float32", block_tokens=block_tokens, num_layers=1, num_kv_heads=2, head_dim=head_dim)
    pool = KvPool(layout, 3, windows=(None,), device=torch.device("cpu"))
    assert pool.width == width
    assert pool.all_rows.shape[0] == 6
