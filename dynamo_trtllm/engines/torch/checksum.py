"""The checksum of KV in a GPU's memory, computed on the GPU: only the result goes to the host.

The memory is read as 32-bit words, in rows. Each word is multiplied by an odd 64-bit constant that
depends on its column, and the products of a row are added up; the sums of the rows are then reduced in the same way.
Integer arithmetic wraps, so every device and every version of torch gives the same result. About one error in 2^33
would be missed.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_COLUMNS = 8192
_ROWS_AT_ONCE = 512  # 16 MiB: they and their products fit into the cache of a large GPU


def checksum(memory: Tensor) -> int:
    """Return the checksum of contiguous bytes. Waits for the current stream of its device."""
    words = _words(memory)
    while True:
        words = _row_sums(words)
        if len(words) == 1:
            return int(words.item())
        words = words.view(torch.int32)


def _words(memory: Tensor) -> Tensor:
    """Return the memory as 32-bit words, the last one padded with zeros."""
    if lacking := -len(memory) % 4:
        memory = torch.nn.functional.pad(memory, (0, lacking))
    elif memory.data_ptr() % 4:
        memory = memory.clone()
    return memory.view(torch.int32)


def _row_sums(words: Tensor) -> Tensor:
    """Return the weighted sum of each row; the last row may be shorter."""
    factors = _factors(words.device)
    whole = len(words) // _COLUMNS * _COLUMNS
    sums = [(some * factors).sum(1) for some in torch.split(words[:whole].view(-1, _COLUMNS), _ROWS_AT_ONCE)]
    if whole < len(words):
        sums.append((words[whole:] * factors[: len(words) - whole]).sum().view(1))
    return torch.cat(sums)


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Return odd pseudo-random numbers (SplitMix64), the same in every process."""
    mask, state, found = (1 << 64) - 1, 0, []
    for _ in range(_COLUMNS):
        state = (state + 0x9E3779B97F4A7C15) & mask
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
        odd = (mixed ^ (mixed >> 31)) | 1
        found.append(odd - (1 << 64) if odd >> 63 else odd)
    return torch.tensor(found, dtype=torch.int64).to(device)
