"""Bound the steps of an elastic engine that have prompt tokens and streams: mixed steps.

Engines, frontends and planners use the same bounds, so that frontends and planners can predict what
engines do.
"""

from __future__ import annotations

from typing import Final

MIXED_STEP_S: Final = 0.045
"""The target time of a step of an elastic engine that has prompt tokens and streams.

It is the target for streams without a limit, and the shortest one: steps that are shorter still
compute few prompt tokens for their time.
"""
# The same as a part of the limit of the time between two tokens. Steps may take longer than their
# target, and streams wait for a part of another step, too.
_MIXED_STEP_PART: Final = 0.6
# However long its steps take while streams run, an elastic engine computes some prompt tokens in
# each: 1/_CHUNK_DIVISOR of those that a step without streams may have, and at least _LEAST_CHUNK.
_CHUNK_DIVISOR: Final = 64
_LEAST_CHUNK: Final = 32


def mixed_step_target_s(itl_s: float | None) -> float:
    """Return the target time of a step of an elastic engine that has prompt tokens and streams.

    Args:
        itl_s: the shortest limit of the time between two tokens of these streams. None: they have
            no limit.
    """
    if itl_s is None:
        return MIXED_STEP_S
    return max(MIXED_STEP_S, _MIXED_STEP_PART * itl_s)


def least_chunk_tokens(max_tokens: int) -> int:
    """Return how many prompt tokens a step of an elastic engine has at least while streams run.

    Args:
        max_tokens: how many a step may have without streams.
    """
    return min(max_tokens, max(_LEAST_CHUNK, max_tokens // _CHUNK_DIVISOR))
