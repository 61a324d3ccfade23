"""Choose how many prompt tokens a step of an elastic engine may have while streams run.

A step with a long prompt is a gap in all streams of the engine, and one with few prompt tokens
takes nearly as long: with vLLM 0.26 on an H200 and 64 streams, a step with 128 takes 32 ms, one
with 512 takes 41, one with 2,048 takes 81, and one with 8,000 takes 202. So the best size depends
on the engine, on its streams and on their limits. It is steered by the measured times of such
steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from dynamo_trtllm.protocol.mixed_steps import least_chunk_tokens, mixed_step_target_s

# The first steps have this part of the tokens of a step without streams.
_FIRST_DIVISOR: Final = 16
# One step changes the size at most by these factors: a single time may be wrong. With 1.25, a time
# that was too short made steps of 90 to 110 ms on an H200, in place of 60.
_LEAST_FACTOR: Final = 0.5
_LARGEST_FACTOR: Final = 1.1


class ChunkSize:
    """The prompt tokens that a step with streams may have.

    Args:
        max_tokens: how many prompt tokens a step may have without streams.
    """

    def __init__(self, max_tokens: int) -> None:
        self._least_tokens = least_chunk_tokens(max_tokens)
        self._max_tokens = max_tokens
        self._target_s = mixed_step_target_s(None)
        # The size without its bounds, so that it is the same again after a change of the target
        # and back.
        self._unbounded = max(self._least_tokens, max_tokens / _FIRST_DIVISOR)

    @property
    def tokens(self) -> int:
        """Return how many prompt tokens the next step may have."""
        return max(self._least_tokens, min(self._max_tokens, math.ceil(self._unbounded)))

    def follow(self, limits_s: Iterable[float | None]) -> None:
        """Set the target time of steps by the streams that run now: the shortest of their targets.

        The size changes with the target at once. A stricter stream does not wait for a step that is
        too long for it, and when it has ended, the size is as before.

        Args:
            limits_s: the limits of the streams' times between two tokens. None: the stream has no
                limit.
        """
        target_s = min(map(mixed_step_target_s, limits_s), default=mixed_step_target_s(None))
        self._unbounded *= target_s / self._target_s
        self._target_s = target_s

    def measured(self, seconds: float, planned_tokens: int, *, is_full: bool) -> None:
        """Take the time of a step with streams.

        Args:
            seconds: the time of the step.
            planned_tokens: how many prompt tokens the step might have had. Later steps may be
                planned already.
            is_full: the step had as many prompt tokens as it might have had.
        """
        factor = _LARGEST_FACTOR
        if seconds > 0:
            factor = max(_LEAST_FACTOR, min(_LARGEST_FACTOR, self._target_s / seconds))
        measured_tokens = max(self._least_tokens, factor * planned_tokens)
        # A step that was not full says nothing about larger steps.
        is_too_small = factor >= 1 and is_full and measured_tokens > self.tokens
        is_too_large = factor < 1 and measured_tokens < self.tokens
        if is_too_large or (is_too_small and self.tokens < self._max_tokens):
            self._unbounded = measured_tokens
