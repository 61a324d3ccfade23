"""The bounded KV memory of one engine: blocks of tokens, reserved per request, and where they lie as rows that move.

Owned by the scheduler's thread. Every layer keeps all its tokens here; a sliding layer reads only its window, and only
the blocks of that window travel. A row is one block of one layer's keys, or of its values.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from dynamo_trtllm.engines.torch.attention import first_block
from dynamo_trtllm.messages import KvLayout

_CHECKED_BYTES = 64 << 20  # the most that `is_finite` copies at once
_WIDTHS = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)  # 16 bytes and less


class KvPool:
    """The KV blocks. The most recently freed one is allocated first, so that memory never touched stays untouched."""

    def __init__(
        self, layout: KvLayout, num_blocks: int, *, windows: Sequence[int | None], device: torch.device
    ) -> None:
        shape = (layout.num_layers, 2, num_blocks, layout.block_tokens, layout.num_kv_heads, layout.head_dim)
        self.dtype: torch.dtype = getattr(torch, layout.dtype)
        memory = zeros(math.prod(shape) * self.dtype.itemsize, device)
        self._pool = memory.view(self.dtype).view(shape)
        self.keys, self.values = self._pool[:, 0], self._pool[:, 1]
        self.device = device
        self.num_blocks = num_blocks
        self.block_tokens = layout.block_tokens
        self.row_bytes: int = math.prod(shape[3:]) * self.dtype.itemsize
        # The widest elements that a row is made of: copies of many rows run at the speed of memory only with those.
        self.width = next(wide for wide in _WIDTHS if self.row_bytes % wide.itemsize == 0)
        self.all_rows = memory.view(self.width).view(-1, self.row_bytes // self.width.itemsize)
        self._groups = _groups(windows, num_blocks, device)
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def reserve(self, tokens: int) -> Tensor | None:
        """Blocks for that many tokens, or None when there are not enough free ones."""
        count = self.blocks_for(tokens)
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        return torch.tensor(taken, dtype=torch.long, device=self.device)

    def free(self, blocks: Tensor) -> None:
        self._free.extend(reversed(blocks.tolist()))

    def scrub(self, blocks: Tensor) -> None:
        """Queue writing zeros to these blocks, in all layers."""
        self._pool.index_fill_(2, blocks, 0)

    def is_finite(self, blocks: Tensor, tokens: int) -> bool:
        """Return whether all that the token after `tokens` can see in these blocks is finite. Waits for the device."""
        pieces = torch.split(self.rows(blocks, tokens), max(1, _CHECKED_BYTES // self.row_bytes))
        ends = [torch.stack(torch.aminmax(self.all_rows[some].view(self.dtype))) for some in pieces]
        return bool(torch.stack(ends).isfinite().all())

    def finite_keys(self, slots: Tensor) -> Tensor:
        """Return for each slot whether its keys are finite in all layers: a bool tensor. Does not wait for it.

        The logits don't show every infinite key: its token's score may be -inf, and attention then skips the token.
        """
        return self.keys.flatten(1, 2)[:, slots].flatten(2).abs().amax(dim=(0, 2)).isfinite()

    def num_rows(self, tokens: int) -> int:
        """How many rows the token after `tokens` can see. Safe from any thread."""
        return sum(len(bases) * self._span(window, tokens)[1] for window, bases in self._groups)

    def moved_bytes(self, tokens: int) -> int:
        """What moves for a prompt of `tokens`. Safe from any thread."""
        return self.num_rows(tokens) * self.row_bytes

    def rows(self, blocks: Tensor, tokens: int) -> Tensor:
        """Which rows of `all_rows` hold what the token after `tokens` can see of a sequence in `blocks`.

        In the same order in every pool of this layout, whatever its size.
        """
        parts = []
        for window, bases in self._groups:
            first, count = self._span(window, tokens)
            parts.append((bases[:, None] + blocks[None, first : first + count]).flatten())
        return torch.cat(parts)

    def _span(self, window: int | None, tokens: int) -> tuple[int, int]:
        """The first block that is seen, and how many."""
        first = first_block(tokens, window, self.block_tokens)
        return first, self.blocks_for(tokens) - first


def _groups(windows: Sequence[int | None], num_blocks: int, device: torch.device) -> list[tuple[int | None, Tensor]]:
    """Layers of equal windows, in order of appearance: the row of their block 0, keys and values of each layer."""
    groups = []
    for window in dict.fromkeys(windows):
        layers = [layer for layer, other in enumerate(windows) if other == window]
        bases = [(2 * layer + half) * num_blocks for layer in layers for half in (0, 1)]
        groups.append((window, torch.tensor(bases, dtype=torch.long, device=device)))
    return groups


def most_bytes(layout: KvLayout, windows: Sequence[int | None], tokens: int) -> int:
    """What moves at most for a prompt of up to that many tokens."""
    block = layout.block_tokens
    whole = -(-tokens // block)
    blocks = sum(whole if window is None else min(whole, -(-window // block) + 1) for window in windows)
    itemsize: int = getattr(torch, layout.dtype).itemsize
    return 2 * blocks * block * layout.num_kv_heads * layout.head_dim * itemsize


def zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Zeros that on CPU take no memory until they are written: torch.zeros writes them all (torch 2.13)."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)
