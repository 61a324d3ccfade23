"""Read from the executor's statistics what each step computed, and how long it took."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from dynamo_trtllm.engines.capabilities import MAX_STEPS
from dynamo_trtllm.protocol.cost_model import StepSample


class _Iteration:
    """One iteration of the executor, as its row tells it.

    Times are seconds of the executor's clock.

    Raises:
        KeyError, TypeError, ValueError: the row lacks a value, or a count is negative.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        batch = row["inflightBatchingStats"]
        self.number = int(row["iter"])
        self.rank = int(row.get("attentionDpRank") or 0)
        self.num_ranks = 1  # ranks that have reported
        # The time after it had fetched requests.
        self.begun = (
            datetime.strptime(row["timestamp"], "%m-%d-%Y %H:%M:%S.%f") - _EPOCH
        ).total_seconds()
        # When its results were read, or later by as long as it waited for requests.
        self.read = self.begun + float(row["iterLatencyMS"]) / 1000
        # No request was active before: it may have waited for one.
        self.was_idle = row["numNewActiveRequests"] >= row["numActiveRequests"]
        # GPU time of the forward pass; 0: unknown
        self.forward_s = float(row.get("gpuForwardTimeMS") or 0.0) / 1000
        self.requests = int(batch["numGenRequests"])  # decode requests
        # Tokens of these requests; 0: not reported.
        self.context = int(batch.get("numGenKvTokens") or 0)
        self.tokens = int(batch["numCtxTokens"])  # prompt tokens
        self.prompts = int(batch["numContextRequests"])
        cached = batch.get("numCtxKvTokens")
        # prompt tokens before those; None: not reported
        self.cached = None if cached is None else int(cached)
        if min(self.requests, self.context, self.tokens, self.cached or 0, self.prompts) < 0:
            raise ValueError("a count is negative")

    def add_rank(self, other: _Iteration) -> None:
        """Add what another rank computed in this iteration."""
        for name in ("num_ranks", "requests", "context", "tokens", "prompts"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if self.cached is not None:
            self.cached += other.cached or 0


# In local time, as the rows are. Only differences count.
_EPOCH = datetime(2020, 1, 1)
# An iteration that fetches requests for longer has waited for one.
_SLACK_S = 0.002


class StepReader:
    """Reads from rows of statistics what each step computed, and how long it took.

    Used on one thread.

    From copies of _torch/pyexecutor/py_executor.py that have no release tag, of about 1.2 and of
    main of 2026-10. It was never run with TensorRT-LLM. Each iteration that computed something has
    a row. No field is the time of the step:

    * `iterLatencyMS` is the time from the begin of the iteration until its results were read. That
      includes a wait for requests at its begin. With the overlap scheduler, the next iteration
      reads the results: it spans two steps.
    * `hostStepTimeMS` (1.3 candidates), with the overlap scheduler, is mostly the time of the step
      before.
    * `gpuForwardTimeMS` (likewise) is without sampling and the executor's own work.

    So a step begins when it is launched and the step before has ended. It ends when its results are
    read. That is the earlier of two times: `timestamp`, which follows the wait, plus the latency,
    which includes the wait; and the begin of the iteration after the read, which includes the wait
    after the step. These give no samples:

    * steps next to a gap: rows are missing or damaged, or an iteration computed nothing;
    * steps between two waits, and with the overlap scheduler steps before one. If there is a
      `gpuForwardTimeMS`, steps with prompt tokens take it instead;
    * with the overlap scheduler, decode steps before one with prompt tokens, whose launch can delay
      the read. The next step is assumed to begin as if this one had taken as long as the decode
      step before;
    * steps of the warm-up.

    What rows of 1.2 do not have is approximated: the context of decode requests by the mean of
    those that run when the rows are read (KV blocks would count a shared prefix once), and the
    place of a chunk in its prompt by the full steps before it; tokens in the prefix cache are not
    counted there. Several prompts of one step count as equally long. Attention-DP ranks without
    rows are assumed to compute what the others do.

    Args:
        steps: receives the samples.
        running: returns the mean number of context tokens of the requests in the batch, and the
            number of tokens of the longest prompt; 0 without any.
        num_ranks: attention-DP ranks; 1 without attention DP.
        full_step: returns the tokens from which a step of a rank cuts its last prompt; 0: prompts
            are not cut.
    """

    def __init__(
        self,
        steps: deque[StepSample],
        running: Callable[[], tuple[float, int]],
        num_ranks: int = 1,
        full_step: Callable[[], int] = lambda: 0,
    ) -> None:
        self._steps = steps
        self._running = running
        self._num_ranks = num_ranks
        self._full_step = full_step
        # tokens computed of the prompt that the last step cut, if rows do not report them
        self._cut = 0.0
        self._overlaps = True  # the overlap scheduler is on, by the last two rows that show it
        self._context = 0.0  # the last mean
        self._longest = 0  # the longest prompt of the last two polls
        self._longest_now = 0  # the value of the last one
        self._pending: list[_Iteration] = []  # the oldest is the next one to become a sample
        # When the step before the oldest pending one ended; None: not known.
        self._ended: float | None = None
        self._decode_s = 0.0  # time of the last decode step; 0: not known
        self._is_warm_up = True

    def read(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take the rows of one poll, the oldest first."""
        context, longest = self._running()
        self._context = context or self._context
        self._longest = max(longest, self._longest_now)
        self._longest_now = longest
        for row in rows[-MAX_STEPS:]:
            try:
                self._add(_Iteration(row))
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                self._restart()
        if self._is_warm_up:
            self._steps.clear()
            self._restart()
        self._is_warm_up = False

    def _restart(self) -> None:
        self._pending = []
        self._ended = None
        self._cut = 0.0

    def _add(self, new: _Iteration) -> None:
        last = self._pending[-1] if self._pending else None
        if last is not None and new.number == last.number and new.rank != last.rank:
            last.add_rank(new)
            return
        if last is not None and (new.number != last.number + 1 or new.begun <= last.begun):
            self._restart()
        elif last is not None:
            overlaps = self._overlap(last, new)
            has_changed = overlaps is not self._overlaps
            self._overlaps = overlaps
            # The executor's first two rows show the state for the first time: that is no change.
            if has_changed and len(self._pending) > 1:
                self._restart()
        self._pending.append(new)
        while len(self._pending) > (3 if self._overlaps else 1):
            seconds = self._overlapped_s() if self._overlaps else self._seconds()
            step = self._pending.pop(0)
            if not seconds and step.tokens:
                seconds = step.forward_s
            cached = self._cached(step)
            if seconds > 0:
                self._take(step, seconds, cached)

    def _overlap(self, last: _Iteration, new: _Iteration) -> bool:
        """Return whether the overlap scheduler is on.

        With it, an iteration reads the results of the one before.

        A change of the clock can look like the other scheduler, until the next two rows.
        """
        if last.read < new.begun:
            return False
        # The latency of an iteration that has waited for requests says nothing: it includes the
        # wait.
        return self._overlaps or (not last.was_idle and last.read - new.begun > _SLACK_S)

    def _seconds(self) -> float:
        """Return how long the oldest pending step took, without the overlap scheduler. 0: not
        known.
        """
        step, after = self._pending[:2]
        # 1.2 repeats the counts of the last step in an iteration that computes nothing, as one that
        # waits for KV.
        if step.was_idle and (after.was_idle or not step.tokens):
            return 0.0
        return min(step.read, after.begun) - step.begun

    def _overlapped_s(self) -> float:
        """Return the same, with the overlap scheduler. Remember when the step ended."""
        # `reader` is the iteration that read the results of `step`
        step, reader, after, last = self._pending[:4]
        before = self._ended
        ended = min(step.read, after.begun)
        self._ended = None if step.was_idle and after.was_idle else ended
        # it waited, while the results were there
        if reader.was_idle or reader.read - last.begun > _SLACK_S:
            self._ended = reader.begun
            return 0.0
        if before is None or self._ended is None:
            return 0.0
        started = max(before, step.begun)
        if reader.tokens and not step.tokens:
            self._ended = min(ended, started + (self._decode_s or ended - started))
            return 0.0
        if not step.tokens:
            self._decode_s = ended - started
        return ended - started

    def _cached(self, step: _Iteration) -> float:
        """Return the number of prompt tokens before those of a step.

        Each step is passed once, in order.
        """
        if step.cached is not None:
            return step.cached
        before = (
            self._cut if self._cut + step.tokens / max(1, step.prompts) <= self._longest else 0.0
        )
        self._cut = 0.0
        if step.tokens + step.requests >= (self._full_step() or math.inf):
            self._cut = step.tokens / max(1, step.prompts) + (before if step.prompts <= 1 else 0.0)
        return before

    def _take(self, step: _Iteration, seconds: float, cached: float) -> None:
        """Add a sample, unless it is not known what the step computed."""
        context = step.context or step.requests * self._context
        if not (step.requests or step.tokens) or (step.requests and not context):
            return
        share = self._num_ranks / step.num_ranks
        pairs = step.tokens * (cached + step.tokens / 2) / max(1, step.prompts)
        requests, context, tokens = (
            round(count * share) for count in (step.requests, context, step.tokens)
        )
        self._steps.append(StepSample(seconds, requests, context, tokens, pairs * share))
