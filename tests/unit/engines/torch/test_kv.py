"""The memory of KV blocks, and the rows of them that move."""

from __future__ import annotations

import pytest
import torch

from dynamo_trtllm.engines.torch.block_allocator import AwaitingFetch
from dynamo_trtllm.engines.torch.kv import KvPool, most_bytes
from dynamo_trtllm.engines.torch.sequence import TorchSequence
from dynamo_trtllm.protocol.messages import KvLayout, token_ids
from dynamo_trtllm.testing.engine_requests import ask
from tests.kit.cases import each_case
from tests.kit.torch_sequences import sequence_of

LAYOUT = KvLayout(dtype="float32", block_tokens=4, num_layers=3, num_kv_heads=2, head_dim=3)
WINDOWS = (8, None, 8)


def make_pool(num_blocks: int = 20) -> KvPool:
    return KvPool(LAYOUT, num_blocks, windows=WINDOWS, device=torch.device("cpu"))


def sequence() -> TorchSequence:
    return sequence_of(ask(token_ids(range(16))), max_new_tokens=9)


def test_rows_of_sliding_layer_move_only_its_window() -> None:
    pool = make_pool()
    blocks = torch.arange(10)
    # at 40, a sliding layer sees 33 to 39
    assert len(pool.rows(blocks, 40)) == pool.num_rows(40) == 2 * (2 + 10 + 2)
    assert pool.moved_bytes(40) == 2 * 14 * 4 * 2 * 3 * 4


def test_rows_are_the_blocks_of_keys_and_values() -> None:
    pool = make_pool()
    blocks = torch.tensor([0, 1])
    pool.all_rows[pool.rows(blocks, 6)] = torch.full((16,), 1, dtype=torch.uint8).view(
        pool.row_dtype
    )
    for half in (pool.keys, pool.values):
        for layer in range(3):
            changed = half[layer].flatten(1).ne(0).all(dim=1)
            assert changed.nonzero().flatten().tolist() == sorted(blocks.tolist())


@each_case("tokens", [1, 4, 7, 8, 9, 16, 40])
def test_most_bytes_bounds_shorter_prompts(tokens: int) -> None:
    pool = make_pool()
    assert most_bytes(LAYOUT, WINDOWS, tokens) >= max(
        pool.moved_bytes(n) for n in range(1, tokens + 1)
    )


@pytest.mark.parametrize(
    ("head_dim", "width"), [(4, torch.complex128), (1, torch.complex128), (3, torch.int64)]
)
def test_pool_of_odd_blocks_uses_widest_elements(head_dim: int, width: torch.dtype) -> None:
    block_tokens = 4 if head_dim != 3 else 1
    layout = KvLayout(
        dtype="float32", block_tokens=block_tokens, num_layers=1, num_kv_heads=2, head_dim=head_dim
    )
    pool = KvPool(layout, 3, windows=(None,), device=torch.device("cpu"))
    assert pool.row_dtype == width
    assert pool.all_rows.shape[0] == 6


def test_non_finite_key_is_found_in_its_block() -> None:
    pool = make_pool()
    pool.keys[2, 7, 3, 1, 2] = -torch.inf
    assert [bool(pool.keys_are_finite(torch.tensor(blocks))) for blocks in ([3, 6, 8], [3, 7])] == [
        True,
        False,
    ]


@pytest.mark.parametrize(("tokens", "is_whole"), [(4, True), (10, True), (11, False), (40, False)])
def test_transfers_all_rows_unless_a_window_hides_blocks(tokens: int, is_whole: bool) -> None:
    assert make_pool().transfers_all_rows(tokens) is is_whole


def test_shared_blocks_of_waiting_prompts_count_once() -> None:
    awaiting = AwaitingFetch()
    first = sequence()
    second = sequence()
    first.block_table.numbers = [1, 2, 3]
    second.block_table.numbers = [1, 2, 4]
    counts = []
    for change, seq in ((awaiting.add, first), (awaiting.add, second), (awaiting.discard, first)):
        change(seq)
        counts.append((len(awaiting.sequences), len(awaiting.blocks)))
    awaiting.discard(first)  # again
    awaiting.discard(second)
    assert [*counts, (len(awaiting.sequences), len(awaiting.blocks))] == [
        (1, 3),
        (2, 4),
        (1, 3),
        (0, 0),
    ]
