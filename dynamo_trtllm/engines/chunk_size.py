"""Choose how many prompt tokens a step of an elastic engine may have while streams run.

A step with a long prompt is a gap in all streams of the engine, and one with few prompt tokens
takes nearly as long: in a fit to vLLM 0.26 on an H200, a step with 341 takes 36 ms, one with 1,024
takes 75, and one with 8,192 takes 171. So the best size depends on the engine and on its streams.
It is steered by the measured times of such steps.
"""

from __future__ import annotations

import math
from typing import Final

from dynamo_trtllm.protocol.cost_model import MIXED_STEP_S, least_chunk_tokens

# The first steps have this part of the tokens of a step without streams.
_FIRST_DIVISOR: Final = 16
# One step changes the size at most by these factors: a single time may be wrong.
_LEAST_FACTOR: Final = 0.5
_LARGEST_FACTOR: Final = 1.25


class ChunkSize:
    """The prompt tokens that a step with streams may have.

    Args:
        max_tokens: how many a step may have without streams.

    Attributes:
        tokens: how many the next one may have.
    """

    def __init__(self, max_tokens: int) -> None:
        self._least_tokens = least_chunk_tokens(max_tokens)
        self._max_tokens = max_tokens
        self.tokens = max(self._least_tokens, max_tokens // _FIRST_DIVISOR)

    def measured(self, seconds: float, planned_tokens: int, *, is_full: bool) -> None:
        """Take the time of a step with streams.

        Args:
            seconds: the time.
            planned_tokens: how many prompt tokens it might have had. Later steps may be planned
                already.
            is_full: it had as many.
        """
        factor = _LARGEST_FACTOR
        if seconds > 0:
            factor = max(_LEAST_FACTOR, min(_LARGEST_FACTOR, MIXED_STEP_S / seconds))
        tokens = self.tokens
        if factor < 1:
            tokens = min(tokens, math.ceil(factor * planned_tokens))
        elif is_full:
            # A step that was not full says nothing about larger ones.
            tokens = max(tokens, math.ceil(factor * planned_tokens))
        self.tokens = max(self._least_tokens, min(self._max_tokens, tokens))
