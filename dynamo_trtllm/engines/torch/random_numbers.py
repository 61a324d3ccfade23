"""Compute random numbers from a seed, the same in every process."""

from __future__ import annotations

MASK_64 = (1 << 64) - 1  # the largest unsigned number of 64 bits


def uniform(seed: int, index: int) -> float:
    """Return the random number in [0, 1) for output token `index` under `seed`.

    SplitMix64 generates the number. Its state begins with the seed, mixed by SplitMix64, too.
    """
    state = split_mix(seed & MASK_64) + index * 0x9E3779B97F4A7C15
    # A float has 53 bits.
    return (split_mix(state) >> 11) / (1 << 53)


def split_mix(state: int) -> int:
    """Return the number that SplitMix64 generates in this state, unsigned 64 bits."""
    state = (state + 0x9E3779B97F4A7C15) & MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK_64
    return state ^ (state >> 31)
