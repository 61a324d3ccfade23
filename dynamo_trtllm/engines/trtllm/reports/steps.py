"""Read from the executor's statistics what each step computed, and how long it took."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from dynamo_trtllm.engines.capabilities import MAX_STEPS
from dynamo_trtllm.protocol.cost_model import StepSample


class _Iteration:
    """One iteration of the executor, as its row reports it. Times are of the executor's clock.

    Raises:
        KeyError, TypeError, ValueError: the row lacks a value, or a count is negative.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        batch = row["inflightBatchingStats"]
        self.number = int(row["iter"])
        self.rank = int(row.get("attentionDpRank") or 0)
        self.num_ranks = 1  # ranks that have reported
        # When the iteration had fetched its requests.
        begun = datetime.strptime(row["timestamp"], "%m-%d-%Y %H:%M:%S.%f")
        self.begun_s = (begun - _EPOCH).total_seconds()
        # When the results of the iteration were read. If the iteration waited for requests, this
        # time is later than that by the length of the wait.
        self.read_s = self.begun_s + float(row["iterLatencyMS"]) / 1000
        # No request was active before this iteration, so it may have waited for one.
        self.was_idle = row["numNewActiveRequests"] >= row["numActiveRequests"]
        # GPU time of the forward pass; 0: unknown
        self.forward_s = float(row.get("gpuForwardTimeMS") or 0.0) / 1000
        self.decode_requests = int(batch["numGenRequests"])
        # Context tokens of the decode requests; 0 if not reported.
        self.context_tokens = int(batch.get("numGenKvTokens") or 0)
        self.num_prompts = int(batch["numContextRequests"])
        self.prompt_tokens = int(batch["numCtxTokens"])
        # Tokens of the prompts before the tokens of this step; None if not reported.
        self.cached_tokens: int | None = None
        cached = batch.get("numCtxKvTokens")
        if cached is not None:
            self.cached_tokens = int(cached)
        counts = (
            self.decode_requests,
            self.context_tokens,
            self.num_prompts,
            self.prompt_tokens,
            self.cached_tokens or 0,
        )
        if min(counts) < 0:
            raise ValueError("a count is negative")

    def add_rank(self, other: _Iteration) -> None:
        """Add what another rank computed in this iteration."""
        self.num_ranks += other.num_ranks
        self.decode_requests += other.decode_requests
        self.context_tokens += other.context_tokens
        self.num_prompts += other.num_prompts
        self.prompt_tokens += other.prompt_tokens
        if self.cached_tokens is not None:
            self.cached_tokens += other.cached_tokens or 0


# The start of the executor's clock, in local time as the times in rows. Only differences of times
# are used.
_EPOCH = datetime(2020, 1, 1)
# Fetching requests takes less than this time, unless the iteration waits for a request.
_SLACK_S = 0.002


class StepReader:
    """Reads from rows of statistics what each step computed, and how long it took.

    Used on one thread.

    This class follows two copies of _torch/pyexecutor/py_executor.py without a release tag, of
    about 1.2 and of main of 2026-10. It was never run with TensorRT-LLM. Each iteration that
    computed something has a row. No field of a row is the time of the step:

    * `iterLatencyMS` is the time from the start of the iteration until its results were read. This
      time includes a wait for requests at the start of the iteration. With the overlap scheduler,
      the next iteration reads the results, so this time spans two steps.
    * `hostStepTimeMS` (1.3 candidates), with the overlap scheduler, is mostly the time of the step
      before.
    * `gpuForwardTimeMS` (1.3 candidates) leaves out sampling and the executor's own work.

    So a step is taken to start once it is launched and the step before has ended. A step is taken
    to end when its results are read. Two times are candidates for the time of this read. Waits for
    requests can make each of them too late, so the earlier one is used:

    * `timestamp` plus the latency. `timestamp` is after the wait at the start of the iteration, and
      the latency includes this wait again.
    * the start of the iteration after the read. This is after the wait that may follow the step.

    The following steps give no samples:

    * steps next to a gap: rows are missing or damaged, or an iteration computed nothing;
    * steps between two waits for requests, and with the overlap scheduler also steps before one
      wait. If the row has `gpuForwardTimeMS`, steps with prompt tokens use this time instead;
    * with the overlap scheduler, decode steps before a step with prompt tokens, because the launch
      of the prompts can delay the read. The start of the next step is computed as if the decode
      step had taken as long as the decode step before;
    * steps of the warm-up.

    Values that the rows of 1.2 do not have are approximated. The context of decode requests is the
    mean context of the requests that run when the rows are read (KV blocks would count a shared
    prefix once). The place of a chunk in its prompt is known from the full steps before it, without
    tokens from the prefix cache. Several prompts of one step count as equally long. Attention-DP
    ranks without rows are assumed to compute as much as the ranks with rows.

    Args:
        steps: receives the samples.
        request_lengths: returns the mean number of context tokens of the requests in the batch, and
            the number of tokens of the longest prompt; 0 without any.
        num_ranks: attention-DP ranks; 1 without attention DP.
        full_step: returns the number of tokens from which a step of a rank counts as full. A full
            step computes only a part of its last prompt. Returns 0 if prompts are never computed
            in parts.
    """

    def __init__(
        self,
        steps: deque[StepSample],
        request_lengths: Callable[[], tuple[float, int]],
        num_ranks: int = 1,
        full_step: Callable[[], int] = lambda: 0,
    ) -> None:
        self._steps = steps
        self._request_lengths = request_lengths
        self._num_ranks = num_ranks
        self._full_step = full_step
        # The computed tokens of the prompt of which the last step computed only a part, if rows do
        # not report them.
        self._cut_tokens = 0.0
        self._overlaps = True  # the overlap scheduler is on, by the last two rows that show it
        self._mean_context = 0.0  # tokens, of the last poll with requests
        self._longest_prompt = 0  # tokens of the longest prompt in the last two polls
        self._longest_of_poll = 0  # tokens of the longest prompt in the last poll
        self._pending: list[_Iteration] = []  # the oldest is the next one to become a sample
        # When the step before the oldest pending step ended; None if this is not known.
        self._ended_s: float | None = None
        self._decode_s = 0.0  # time of the last decode step; 0 if it is not known
        self._is_warm_up = True

    def read(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take the rows of one poll, the oldest first."""
        mean_context, longest_prompt = self._request_lengths()
        self._mean_context = mean_context or self._mean_context
        self._longest_prompt = max(longest_prompt, self._longest_of_poll)
        self._longest_of_poll = longest_prompt
        for row in rows[-MAX_STEPS:]:
            try:
                self._add_iteration(_Iteration(row))
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                self._restart()
        if self._is_warm_up:
            self._steps.clear()
            self._restart()
        self._is_warm_up = False

    def _restart(self) -> None:
        self._pending = []
        self._ended_s = None
        self._cut_tokens = 0.0

    def _add_iteration(self, new: _Iteration) -> None:
        """Add an iteration. Make samples of the steps whose end it shows."""
        last = self._pending[-1] if self._pending else None
        if last is not None and new.number == last.number and new.rank != last.rank:
            last.add_rank(new)
            return
        if last is not None and (new.number != last.number + 1 or new.begun_s <= last.begun_s):
            self._restart()
        elif last is not None:
            overlaps = self._is_overlapping(last, new)
            has_changed = overlaps is not self._overlaps
            self._overlaps = overlaps
            # The executor's first two rows show for the first time which scheduler runs. That is no
            # change.
            if has_changed and len(self._pending) > 1:
                self._restart()
        self._pending.append(new)
        # The number of iterations after a step that are needed to find out when the step ended.
        num_after = 3 if self._overlaps else 1
        while len(self._pending) > num_after:
            seconds = self._overlapped_s() if self._overlaps else self._seconds()
            step = self._pending.pop(0)
            if not seconds and step.prompt_tokens:
                seconds = step.forward_s
            cached_tokens = self._cached_tokens(step)
            if seconds > 0:
                self._add_sample(step, seconds, cached_tokens)

    def _is_overlapping(self, last: _Iteration, new: _Iteration) -> bool:
        """Return whether the overlap scheduler is on.

        With the overlap scheduler, an iteration reads the results of the iteration before.

        A change of the clock can look like a change of the scheduler, until the next two rows.
        """
        if last.read_s < new.begun_s:
            return False
        # The latency of an iteration that has waited for requests includes the wait, so it does not
        # show the scheduler.
        return self._overlaps or (not last.was_idle and last.read_s - new.begun_s > _SLACK_S)

    def _seconds(self) -> float:
        """Return how long the oldest pending step took, without the overlap scheduler; 0 if this is
        not known.
        """
        step, after = self._pending[:2]
        # 1.2 repeats the counts of the last step in an iteration that computes nothing, for example
        # because it waits for KV.
        if step.was_idle and (after.was_idle or not step.prompt_tokens):
            return 0.0
        return min(step.read_s, after.begun_s) - step.begun_s

    def _overlapped_s(self) -> float:
        """Return how long the oldest pending step took, with the overlap scheduler; 0 if this is
        not known. Remember when the step ended.
        """
        # `reader` is the iteration that read the results of `step`. Two iterations follow it.
        step, reader, after, last = self._pending[:4]
        step_before_ended_s = self._ended_s
        ended_s = min(step.read_s, after.begun_s)
        self._ended_s = None if step.was_idle and after.was_idle else ended_s
        # The reader has waited for requests, maybe while the results were ready. So it may have
        # read them long after the step had ended.
        if reader.was_idle or reader.read_s - last.begun_s > _SLACK_S:
            self._ended_s = reader.begun_s
            return 0.0
        if step_before_ended_s is None or self._ended_s is None:
            return 0.0
        started_s = max(step_before_ended_s, step.begun_s)
        seconds = ended_s - started_s
        if reader.prompt_tokens and not step.prompt_tokens:
            # The launch of the prompts can delay the read.
            self._ended_s = min(ended_s, started_s + (self._decode_s or seconds))
            return 0.0
        if not step.prompt_tokens:
            self._decode_s = seconds
        return seconds

    def _cached_tokens(self, step: _Iteration) -> float:
        """Return the number of prompt tokens before those of a step.

        Call this method once for each step, in the order of the steps.
        """
        if step.cached_tokens is not None:
            return step.cached_tokens
        chunk_tokens = step.prompt_tokens / max(1, step.num_prompts)
        before = 0.0
        # If both parts together are longer than any prompt, the step does not continue the prompt
        # of which the last step computed a part.
        if self._cut_tokens + chunk_tokens <= self._longest_prompt:
            before = self._cut_tokens
        self._cut_tokens = 0.0
        full_step = self._full_step()
        is_full = full_step != 0 and step.prompt_tokens + step.decode_requests >= full_step
        if is_full:
            self._cut_tokens = chunk_tokens
            if step.num_prompts <= 1:
                self._cut_tokens += before
        return before

    def _add_sample(self, step: _Iteration, seconds: float, cached_tokens: float) -> None:
        """Add a sample, if it is known what the step computed."""
        context_tokens = step.context_tokens or step.decode_requests * self._mean_context
        computes_nothing = not (step.decode_requests or step.prompt_tokens)
        lacks_context = step.decode_requests > 0 and not context_tokens
        if computes_nothing or lacks_context:
            return
        # Several prompts count as equally long, and each attends to its own tokens only.
        attention_pairs = step.prompt_tokens * (cached_tokens + step.prompt_tokens / 2)
        attention_pairs /= max(1, step.num_prompts)
        # Ranks without rows are assumed to compute as much as the ranks with rows.
        scale = self._num_ranks / step.num_ranks
        self._steps.append(
            StepSample(
                seconds,
                decode_requests=round(step.decode_requests * scale),
                context_tokens=round(context_tokens * scale),
                prefill_tokens=round(step.prompt_tokens * scale),
                attention_pairs=attention_pairs * scale,
            )
        )
