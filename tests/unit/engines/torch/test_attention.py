"""What attention reads beside a sequence's own tokens never reaches its output: freed, padded and
foreign blocks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamo_trtllm.engines.torch.kv import ForwardBatch, KvPool, SequenceSlice, paged_attention
from dynamo_trtllm.protocol.messages import KvLayout
from tests.kit.cases import each_case

LAYOUT = KvLayout(dtype="float32", block_tokens=4, num_layers=1, num_kv_heads=2, head_dim=8)
HEADS = 4
BAD = (torch.nan, torch.inf, -torch.inf)
# (tokens before it, tokens of it) by step: prompts in chunks that end within, at and beyond blocks,
# then tokens
PLANS = (
    ([(0, 5), (0, 8)], []),
    ([(5, 6), (8, 3)], []),
    ([], [(11, 1), (11, 1)]),
    ([(0, 1)], [(12, 1), (12, 1)]),
    ([(1, 2)], [(13, 1), (13, 1)]),
    ([], [(14, 1), (14, 1), (3, 1)]),
    ([], [(15, 1), (15, 1), (4, 1)]),
    ([], [(16, 1), (16, 1), (5, 1)]),
)


def outputs(kwargs: dict[str, Any], *, is_poisoned: bool) -> list[Tensor]:
    """Of each step.

    Poisoned: before it, all but the tokens of living sequences is, block 0 too, which is free.
    """
    pool = KvPool(LAYOUT, 20, windows=(kwargs["sliding_window"],), device=torch.device("cpu"))
    random = torch.Generator().manual_seed(1)
    tables = [
        torch.tensor(numbers) for numbers in ([7, 3, 9, 2, 5], [8, 1, 4, 6, 11], [10, 12, 13])
    ]
    written = torch.zeros(20 * 4, dtype=torch.bool)
    entered = torch.zeros(20, dtype=torch.bool)
    found = []
    for number, (chunks, decodes) in enumerate(PLANS):
        first = len(tables) - 1 if number in (3, 4) else 0
        step = ForwardBatch(
            pool.keys,
            pool.values,
            [SequenceSlice(tables[n], start, count) for n, (start, count) in enumerate(decodes)],
            [
                SequenceSlice(tables[n], start, count)
                for n, (start, count) in enumerate(chunks, start=first)
            ],
        )
        if is_poisoned:
            # a block that was entered is its owner's
            masked = (~written.view(20, 4) & ~entered[:, None]).flatten()
            for at, bad in enumerate(BAD):
                pool.keys.flatten(1, 2)[:, masked, :, at::3] = bad
                pool.values.flatten(1, 2)[:, masked, :, at::3] = bad
        if step.partial_blocks:
            pool.scrub(torch.cat(step.partial_blocks))
        written[step.slots] = True
        entered[step.slots // 4] = True
        rows = len(step.slots)
        query = torch.randn(1, HEADS, rows, 8, generator=random)
        key, value = (torch.randn(1, 2, rows, 8, generator=random) for _ in range(2))
        found.append(
            paged_attention(
                SimpleNamespace(layer_idx=0), query, key, value, None, step=step, **kwargs
            )[0]
        )
    return found


@each_case("window", [None, 3, 6])
@each_case("softcap", [None, 5.0])
@each_case("has_sinks", [False, True])
def test_batches_ignore_non_finite_kv_of_others(
    window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    sinks = torch.linspace(-1, 1, HEADS) if has_sinks else None
    kwargs = {"scaling": 0.35, "sliding_window": window, "softcap": softcap, "s_aux": sinks}
    clean = outputs(kwargs, is_poisoned=False)
    poisoned = outputs(kwargs, is_poisoned=True)
    assert all(torch.equal(*pair) for pair in zip(clean, poisoned, strict=True))


def test_finite_keys_names_only_the_slot_of_infinity() -> None:
    pool = KvPool(LAYOUT, 20, windows=(None,), device=torch.device("cpu"))
    pool.keys[0, 2, 1, 1, 3] = -torch.inf
    assert pool.finite_keys(torch.tensor([8, 9, 10, 40])).tolist() == [True, False, True, True]


@pytest.mark.parametrize("half", ["keys", "values"])
def test_is_finite_when_what_is_not_seen_is_not_then_still_true(half: str) -> None:
    pool = KvPool(LAYOUT, 20, windows=(4,), device=torch.device("cpu"))
    blocks = torch.tensor([3, 1, 5])
    getattr(pool, half)[0, 3] = torch.nan  # out of the window of token 8
    assert pool.is_finite(blocks, 8)
    getattr(pool, half)[0, 1, 3, 0, 0] = torch.inf
    assert not pool.is_finite(blocks, 8)
    pool.scrub(torch.tensor([1]))
    assert pool.is_finite(blocks, 8)
