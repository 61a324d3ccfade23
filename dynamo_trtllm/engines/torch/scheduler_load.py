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
    sequences: int = 0
    prompt_tokens: int = 0  # prompt tokens to compute

    def plus(self, seq: TorchSequence) -> _Submitted:
        return _Submitted(self.sequences + 1, self.prompt_tokens + seq.prefill_left)


class SchedulerLoad:
    """The statistics that the scheduler's thread publishes, and the sequences not taken yet.

    A step may take seconds, and the thread takes sequences between steps only. `submit` and `read`
    are for one other thread. No lock is needed: each attribute has one thread that writes it, and
    is replaced as a whole.
    """

    def __init__(self, stats: EngineStats) -> None:
        self._submitted = _Submitted()  # so far
        self._taken = _Submitted()  # so far
        self._published = (stats, self._taken)
        self.steps: deque[StepSample] = deque(maxlen=MAX_STEPS)
        self._is_behind = False  # a step was not awaited, and its time is in the next one

    def submit(self, seq: TorchSequence) -> None:
        """Count a sequence that the thread has not taken.

        Call this before the thread can take it.
        """
        self._submitted = self._submitted.plus(seq)

    def read(self) -> EngineStats:
        """Return the last statistics, with the sequences that were submitted and not in them."""
        stats, taken = self._published
        # Read this last, so that it never has fewer sequences.
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
        """Leave the sequence to the statistics that are published next."""
        self._taken = self._taken.plus(seq)

    def count_all_as_taken(self) -> None:
        """Leave out what was submitted, because no step follows."""
        self._taken = self._submitted

    def publish(self, stats: EngineStats) -> None:
        self._published = (stats, self._taken)

    def measured(self, step: ForwardBatch, seconds: float, *, is_awaited: bool) -> None:
        """Store the time of a step. A GPU may compute it later, unless the step was awaited."""
        is_awaited = is_awaited or step.keys.device.type == "cpu"
        if is_awaited and not self._is_behind:
            self.steps.append(step.measured(seconds))
        self._is_behind = not is_awaited
