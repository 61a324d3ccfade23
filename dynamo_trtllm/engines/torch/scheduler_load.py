"""Publish the load of the scheduler's thread to the event loop."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import NamedTuple

from dynamo_trtllm.engines.capabilities import MAX_STEPS
from dynamo_trtllm.engines.engine_interface import EngineStats
from dynamo_trtllm.engines.torch.kv import ForwardBatch
from dynamo_trtllm.engines.torch.sequence import TorchSequence
from dynamo_trtllm.protocol.cost_model import StepSample


class _Submitted(NamedTuple):
    """The number of sequences that were submitted, and of their prompt tokens."""

    sequences: int = 0
    prompt_tokens: int = 0  # prompt tokens to compute

    def plus(self, seq: TorchSequence) -> _Submitted:
        return _Submitted(self.sequences + 1, self.prompt_tokens + seq.prefill_left)


class SchedulerLoad:
    """The statistics that the scheduler's thread publishes, and the sequences that were submitted
    and that the thread has not taken yet.

    The thread takes sequences only between steps, and a step may take seconds. Meanwhile the
    sequences should count as waiting.

    One other thread calls `submit` and `read`. No lock is needed, because only one thread writes
    each attribute, and replaces it as a whole.
    """

    def __init__(self, stats: EngineStats) -> None:
        self._submitted = _Submitted()  # all sequences submitted so far
        self._taken = _Submitted()  # all sequences that the thread has taken so far
        self._published = (stats, self._taken)
        self.steps: deque[StepSample] = deque(maxlen=MAX_STEPS)
        # True if the last step was not awaited. Then the time of the next step includes its time.
        self._is_behind = False

    def submit(self, seq: TorchSequence) -> None:
        """Count a sequence that the thread has not taken.

        Call this before the thread can take it.
        """
        self._submitted = self._submitted.plus(seq)

    def read(self) -> EngineStats:
        """Return the last statistics, with the sequences that were submitted after them."""
        stats, taken = self._published
        # This is read after `_published`, so that it never has fewer sequences than `taken`.
        submitted = self._submitted
        more_sequences = submitted.sequences - taken.sequences
        if more_sequences == 0:
            return stats
        more_tokens = submitted.prompt_tokens - taken.prompt_tokens
        return replace(
            stats,
            waiting=stats.waiting + more_sequences,
            queued_prefill_tokens=stats.queued_prefill_tokens + more_tokens,
        )

    def take(self, seq: TorchSequence) -> None:
        """Note that the thread has taken a sequence. The statistics that are published next have
        it.
        """
        self._taken = self._taken.plus(seq)

    def count_all_as_taken(self) -> None:
        """Stop adding submitted sequences to the statistics, because no step follows."""
        self._taken = self._submitted

    def publish(self, stats: EngineStats) -> None:
        self._published = (stats, self._taken)

    def measured(self, step: ForwardBatch, seconds: float, *, is_awaited: bool) -> None:
        """Store the time of a step. A GPU may compute it later, unless the step was awaited."""
        is_awaited = is_awaited or step.keys.device.type == "cpu"
        if is_awaited and not self._is_behind:
            self.steps.append(step.measured(seconds))
        self._is_behind = not is_awaited
