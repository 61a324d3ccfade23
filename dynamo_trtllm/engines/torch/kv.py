"""Hold the KV cache of one engine in a pool of blocks, and map blocks to the rows that a KV transfer moves.

Every layer stores all tokens of a sequence. A layer with sliding-window attention reads only its window, so only the
blocks of that window are transferred. The scheduler's thread owns the pool.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from dynamo_trtllm.engines.torch.attention import first_block
from dynamo_trtllm.messages import KvLayout

_CHECKED_BYTES = 64 << 20  # upper bound of what `is_finite` copies at once
_WIDTHS = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)  # 16 bytes down to 1


class KvPool:
    """The KV blocks of one engine, in one tensor.

    Its shape is [layers, 2, blocks, block_tokens, kv_heads, head_dim]; the second dimension has keys at index 0 and
    values at index 1. A row is one block of the keys, or of the values, of one layer: `row_bytes` bytes. `all_rows`
    views the same memory as [layers * 2 * blocks, elements], with elements of type `width`.

    The most recently freed block is allocated first, so that the operating system maps no more memory than was used.
    """

    def __init__(
        self, layout: KvLayout, num_blocks: int, *, windows: Sequence[int | None], device: torch.device
    ) -> None:
        shape = (layout.num_layers, 2, num_blocks, layout.block_tokens, layout.num_kv_heads, layout.head_dim)
        self.dtype: torch.dtype = getattr(torch, layout.dtype)
        memory = zeros(math.prod(shape) * self.dtype.itemsize, device)
        self._pool = memory.view(self.dtype).view(shape)
        # Each is [layers, blocks, block_tokens, kv_heads, head_dim].
        self.keys, self.values = self._pool[:, 0], self._pool[:, 1]
        self.device = device
        self.num_blocks = num_blocks
        self.block_tokens = layout.block_tokens
        self.row_bytes: int = math.prod(shape[3:]) * self.dtype.itemsize
        # The widest dtype that divides a row. Narrower elements make `index_select` slower than the memory.
        self.width = next(wide for wide in _WIDTHS if self.row_bytes % wide.itemsize == 0)
        self.all_rows = memory.view(self.width).view(-1, self.row_bytes // self.width.itemsize)
        self._groups = _groups(windows, num_blocks, device)
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def used(self) -> int:
        """Return the number of reserved blocks."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens need."""
        return -(-tokens // self.block_tokens)

    def reserve(self, tokens: int) -> Tensor | None:
        """Reserve blocks for `tokens` tokens.

        Returns:
            Their block numbers, int64 [blocks], or None if too few blocks are free.
        """
        count = self.blocks_for(tokens)
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        return torch.tensor(taken, dtype=torch.long, device=self.device)

    def free(self, blocks: Tensor) -> None:
        """Return `blocks`, int64 [blocks], to the pool."""
        self._free.extend(reversed(blocks.tolist()))

    def scrub(self, blocks: Tensor) -> None:
        """Queue a write of zeros to `blocks`, int64 [blocks], in all layers."""
        self._pool.index_fill_(2, blocks, 0)

    def is_finite(self, blocks: Tensor, tokens: int) -> bool:
        """Return whether all KV that the next token can see is finite. Blocks until the device has computed it.

        Args:
            blocks: The block numbers of the sequence, int64 [blocks].
            tokens: The number of tokens whose KV is in the blocks.
        """
        parts = torch.split(self.rows(blocks, tokens), max(1, _CHECKED_BYTES // self.row_bytes))
        ends = [torch.stack(torch.aminmax(self.all_rows[some].view(self.dtype))) for some in parts]
        return bool(torch.stack(ends).isfinite().all())

    def finite_keys(self, slots: Tensor) -> Tensor:
        """Return for each slot whether its keys are finite in all layers. Does not wait for the device.

        The logits do not reveal every infinite key: the score of such a token may be -inf, and attention then skips it.

        Args:
            slots: Token slots, int64 [tokens]: block number * block_tokens + offset in the block.

        Returns:
            bool [tokens], on the device.
        """
        return self.keys.flatten(1, 2)[:, slots].flatten(2).abs().amax(dim=(0, 2)).isfinite()

    def num_rows(self, tokens: int) -> int:
        """Return how many rows the token after `tokens` tokens can see. Thread-safe."""
        return sum(len(bases) * self._span(window, tokens)[1] for window, bases in self._groups)

    def moved_bytes(self, tokens: int) -> int:
        """Return how many bytes of KV are transferred for a prompt of `tokens` tokens. Thread-safe."""
        return self.num_rows(tokens) * self.row_bytes

    def rows(self, blocks: Tensor, tokens: int) -> Tensor:
        """Return the rows that the token after `tokens` tokens can see.

        The order is the same in every pool of this layout, whatever its number of blocks.

        Args:
            blocks: The block numbers of the sequence, int64 [blocks].
            tokens: The number of tokens whose KV is in the blocks.

        Returns:
            Indices into `all_rows`, int64 [rows].
        """
        parts = []
        for window, bases in self._groups:
            first, count = self._span(window, tokens)
            parts.append((bases[:, None] + blocks[None, first : first + count]).flatten())
        return torch.cat(parts)

    def _span(self, window: int | None, tokens: int) -> tuple[int, int]:
        """Return the index of the first visible block of a sequence, and the number of visible blocks."""
        first = first_block(tokens, window, self.block_tokens)
        return first, self.blocks_for(tokens) - first


def _groups(windows: Sequence[int | None], num_blocks: int, device: torch.device) -> list[tuple[int | None, Tensor]]:
    """Group the layers by window, in order of appearance.

    Returns:
        For each group its window in tokens (None: full attention), and the row of block 0 for the keys and the values
        of each of its layers, int64 [2 * layers of the group].
    """
    groups = []
    for window in dict.fromkeys(windows):
        layers = [layer for layer, other in enumerate(windows) if other == window]
        bases = [(2 * layer + half) * num_blocks for layer in layers for half in (0, 1)]
        groups.append((window, torch.tensor(bases, dtype=torch.long, device=device)))
    return groups


def most_bytes(layout: KvLayout, windows: Sequence[int | None], tokens: int) -> int:
    """Return the most bytes of KV that a prompt of up to `tokens` tokens can transfer."""
    block = layout.block_tokens
    whole = -(-tokens // block)
    blocks = sum(whole if window is None else min(whole, -(-window // block) + 1) for window in windows)
    itemsize: int = getattr(torch, layout.dtype).itemsize
    return 2 * blocks * block * layout.num_kv_heads * layout.head_dim * itemsize


def zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Return `num_bytes` zero bytes, uint8 [num_bytes].

    On CPU they take no physical memory until they are written. torch.zeros (torch 2.13) would write all of them.
    """
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)
