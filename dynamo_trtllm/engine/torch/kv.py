"""The bounded KV memory of one engine: blocks of tokens, reserved per request, gathered and scattered for hand-off.

Owned by the batcher's thread. Every layer keeps all its tokens here; a sliding layer reads only its window, and only
the blocks of that window travel.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from dynamo_trtllm.engine.torch.attention import first_block
from dynamo_trtllm.messages import KvLayout


class KvPool:
    """Free blocks are handed out last freed first, so that memory never touched stays untouched."""

    def __init__(
        self, layout: KvLayout, num_blocks: int, *, windows: Sequence[int | None], device: torch.device
    ) -> None:
        shape = (layout.num_layers, num_blocks, layout.block_tokens, layout.num_kv_heads, layout.head_dim)
        self.dtype: torch.dtype = getattr(torch, layout.dtype)
        self.keys = _zeros(shape, self.dtype, device)  # padding is read and masked, so it may never be NaN
        self.values = _zeros(shape, self.dtype, device)
        self.num_blocks = num_blocks
        self.block_tokens = layout.block_tokens
        self._windows = tuple(windows)
        self._block_shape = shape[2:]
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
        return torch.tensor(taken, dtype=torch.long, device=self.keys.device)

    def free(self, blocks: Tensor) -> None:
        self._free.extend(reversed(blocks.tolist()))

    def _spans(self, tokens: int) -> list[slice]:
        """Per layer, which of a sequence's blocks the token after `tokens` can see."""
        end = self.blocks_for(tokens)
        return [slice(first_block(tokens, window, self.block_tokens), end) for window in self._windows]

    def staging_bytes(self, tokens: int) -> int:
        """The size of the one piece that moves for a prompt of `tokens`. Safe from any thread."""
        return math.prod(self._staging_shape(tokens)) * self.dtype.itemsize

    def _staging_shape(self, tokens: int) -> tuple[int, ...]:
        total = sum(span.stop - span.start for span in self._spans(tokens))
        return (total, 2, *self._block_shape)

    def new_staging(self, tokens: int) -> Tensor:
        return torch.empty(self._staging_shape(tokens), dtype=self.dtype, device=self.keys.device)

    def gather(self, blocks: Tensor, tokens: int) -> Tensor:
        """A copy of what the token after `tokens` needs, in one contiguous tensor."""
        staging, at = self.new_staging(tokens), 0
        for layer, span in enumerate(self._spans(tokens)):
            chosen = blocks[span]
            staging[at : at + len(chosen), 0] = self.keys[layer, chosen]
            staging[at : at + len(chosen), 1] = self.values[layer, chosen]
            at += len(chosen)
        if staging.is_cuda:
            torch.cuda.synchronize(staging.device)  # a carrier reads the memory behind the stream's back
        return staging

    def scatter(self, staging: Tensor, blocks: Tensor, tokens: int) -> None:
        """The inverse of `gather`, into blocks of this pool."""
        at = 0
        for layer, span in enumerate(self._spans(tokens)):
            chosen = blocks[span]
            self.keys[layer, chosen] = staging[at : at + len(chosen), 0]
            self.values[layer, chosen] = staging[at : at + len(chosen), 1]
            at += len(chosen)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that on CPU take no memory until they are written: torch.zeros writes them all (torch 2.13)."""
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
