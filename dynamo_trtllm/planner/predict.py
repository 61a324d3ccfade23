"""Predict the times of requests for a number of workers of each kind.

All functions are pure. They compute the times of steps with the cost model that workers report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from dynamo_trtllm.protocol.cost_model import (
    CostModel,
    decode_step_s,
    prefill_step_s,
)
from dynamo_trtllm.protocol.mixed_steps import mixed_step_target_s

# A predicted time may take at most this part of its limit. The rest is headroom for what the
# prediction does not include.
MAX_PART: Final = 0.8
# If an idle worker needs more than MAX_PART of a limit, no number of workers keeps the limit with
# headroom. Then this multiple of the time on an idle worker replaces the limit.
_IDLE_FACTOR: Final = 2.0
# The 90th percentile of the time to first token is predicted. Waits in a queue are assumed to have
# an exponential distribution, so their 90th percentile is this multiple of their mean.
_P90_OF_MEAN: Final = math.log(10)
# If prompts need more than this part of a worker's time, or their KV more than this part of its
# network's time, its queue is taken to grow.
_MAX_BUSY: Final = 0.95
# The length that is predicted for a growing queue is the one after this time.
_GROWS_FOR_S: Final = 10.0
# Most rounds of an iteration. The number of streams of a worker and the time of its steps depend on
# each other, so both are found by iteration.
_MAX_ROUNDS: Final = 30
# At most this multiple of the present streams is predicted.
_MAX_GROWTH: Final = 8.0
_MAX_WANTED: Final = 1024  # most workers of a role
# How many decode workers beyond the fewest are tried, because they shorten KV transfers.
_MORE_DECODE: Final = 16
# The shortest time of a step. The cost model of a mock engine may have steps that take no time.
_SHORTEST_STEP_S: Final = 1e-6


class RoleCounts(NamedTuple):
    """Numbers of workers by the calls that they get."""

    prefill: int = 0  # only prefill calls
    decode: int = 0  # only decode calls
    both: int = 0  # calls of both kinds

    def __str__(self) -> str:
        parts = [
            f"{count} for {what}"
            for count, what in zip(self, ("prefill", "decode", "both"), strict=True)
            if count
        ]
        return ", ".join(parts)

    @property
    def num_prefill(self) -> int:
        """Return how many workers compute prompts."""
        return self.prefill + self.both

    @property
    def num_decode(self) -> int:
        """Return how many workers generate tokens."""
        return self.decode + self.both


class StreamGroup(NamedTuple):
    """The streams of one worker."""

    streams: float
    beside_prompts: bool  # the worker computes prompts, too


class TimeLimits(NamedTuple):
    """The limits of the times of requests, in seconds."""

    ttft_s: float  # time to first token
    itl_s: float  # longest time between two tokens


class Demand(NamedTuple):
    """The work of all workers of a model together."""

    prompts_per_s: float  # prompts that have arrived in the last seconds
    prompt_tokens: float  # mean number of tokens of a prompt that have to be computed
    queued_tokens: int  # number of prompt tokens that are not computed yet
    streams: float  # number of requests that generate tokens
    context_tokens: float  # sum over the contexts of these requests
    max_streams: int = 0  # most streams of one worker; 0: not reported
    kv_tokens: int = 0  # tokens that fit into the KV cache of one worker; 0: not reported

    @property
    def context_of_stream(self) -> float:
        """Return the mean context of a stream in tokens."""
        return self.context_tokens / self.streams if self.streams else 0.0


class PredictedTimes(NamedTuple):
    """The times that are predicted for some numbers of workers.

    If a part is 1, a time takes all of its limit, or a batch, a KV cache or a network is full.
    """

    ttft_s: float  # 90th percentile of the time to first token
    transfer_s: float  # how much of it is KV transfer
    gap_s: float  # longest time between two tokens
    ttft_part: float  # which part of its limit `ttft_s` takes
    # The largest of four parts: the part of its limit that `gap_s` takes, the parts of a batch and
    # of a KV cache that streams take, and the part of the time of a decode worker's network that KV
    # transfers take.
    decode_part: float

    @property
    def largest_part(self) -> float:
        """Return the larger of the two parts."""
        return max(self.ttft_part, self.decode_part)

    def __str__(self) -> str:
        ttft_limit_s = self.ttft_s / self.ttft_part if self.ttft_part else 0.0
        ttft = _as_text(self.ttft_s, most_s=max(_GROWS_FOR_S, ttft_limit_s))
        return f"first tokens after {ttft}, gaps of {_as_text(self.gap_s, most_s=_GROWS_FOR_S)}"


class TransferForecast(NamedTuple):
    """The KV transfers to a decode worker."""

    seconds: float = 0.0  # 90th percentile of the time of a transfer, with its wait
    busy: float = 0.0  # the part of the network's time that the transfers take


class PromptSteps(NamedTuple):
    """The steps in which a worker computes prompts."""

    # Time of one step. A step computes the prompts that have arrived during the step before.
    step_s: float
    prompt_s: float  # time of all steps of one prompt
    busy: float  # the part of a worker's time that these steps take
    # The part of the time that they would take if all steps were full. Above _MAX_BUSY, the queue
    # grows.
    full_busy: float


class Predictor:
    """Predicts the times of requests.

    Args:
        cost: the complete cost model of the workers, which are equal.
        demand: the work of the workers.
        limits: the limits.
        groups: the present streams of each worker.

    Attributes:
        unreachable: a sentence for each limit that no number of workers keeps, with the reason.
    """

    def __init__(
        self, cost: CostModel, demand: Demand, limits: TimeLimits, groups: Sequence[StreamGroup]
    ) -> None:
        assert cost.decode is not None
        assert cost.prefill is not None
        self._cost = cost
        self._decode = cost.decode
        self._prefill = cost.prefill
        self._demand = demand
        idle_prompt_s = self._idle_prompt_s()
        idle_token_s = decode_step_s(self._decode, 1, demand.context_of_stream)
        self._limits = TimeLimits(
            _reachable(limits.ttft_s, idle_prompt_s), _reachable(limits.itl_s, idle_token_s)
        )
        self.unreachable: list[str] = []
        if idle_prompt_s > limits.ttft_s:
            self.unreachable.append(
                f"a prompt of {demand.prompt_tokens:.0f} tokens takes {1000 * idle_prompt_s:.0f} ms"
                f" on an idle worker, and the TTFT limit is {1000 * limits.ttft_s:g} ms"
            )
        if idle_token_s > limits.itl_s:
            self.unreachable.append(
                f"a token takes {1000 * idle_token_s:.1f} ms on an idle worker, and the ITL limit"
                f" is {1000 * limits.itl_s:g} ms"
            )
        # The engines compute the same target time from the ITL limit of their streams.
        self._mixed_step_s = mixed_step_target_s(limits.itl_s)
        self._tokens_per_s = self._planned_tokens_per_s(groups)

    def predict(self, counts: RoleCounts) -> PredictedTimes:
        """Return the times for these numbers of workers. Each kind of call must have a worker."""
        streams = self._streams_per_worker(counts)
        # If some workers get both kinds of calls, it is assumed that all prompts are computed
        # beside streams.
        ttft_s = self._ttft_s(counts.num_prefill, streams if counts.both else 0.0)
        # Workers that get both kinds of calls can run whole requests, without a KV transfer.
        transfers = TransferForecast() if counts.both else self._transfers(counts.num_decode)
        ttft_s += transfers.seconds
        gap_s = self._gap_s(counts, streams)
        gap_part = gap_s / self._limits.itl_s
        return PredictedTimes(
            ttft_s=ttft_s,
            transfer_s=transfers.seconds,
            gap_s=gap_s,
            ttft_part=ttft_s / self._limits.ttft_s,
            decode_part=max(gap_part, self._full_part(streams), transfers.busy),
        )

    def wanted(self) -> RoleCounts:
        """Return how many workers of fixed roles this work needs to keep the limits.

        With more decode workers, KV transfers are shorter, which leaves more time for prefill. So
        several numbers of decode workers are tried, and the one is taken that needs the fewest
        workers of both roles together.
        """

        def decode_part(count: int) -> float:
            return self.predict(RoleCounts(prefill=_MAX_WANTED, decode=count)).decode_part

        def ttft_part(decode: int, prefill: int) -> float:
            return self.predict(RoleCounts(prefill=prefill, decode=decode)).ttft_part

        fewest = _fewest(decode_part)
        found = []
        for decode in range(fewest, min(fewest + _MORE_DECODE, _MAX_WANTED) + 1):
            prefill = _fewest(partial(ttft_part, decode))
            found.append(RoleCounts(prefill=prefill, decode=decode))
        return min(found, key=lambda counts: (counts.prefill + counts.decode, counts.decode))

    def _planned_tokens_per_s(self, groups: Sequence[StreamGroup]) -> float:
        """Return the tokens per second of the planned streams at the speed of present streams."""
        num_prefill = sum(group.beside_prompts for group in groups)
        tokens_per_s = 0.0
        for streams, beside_prompts in groups:
            num_sharing = num_prefill if beside_prompts else 0
            tokens_per_s += streams / self._mean_gap_s(num_sharing, streams)
        num_present = sum(group.streams for group in groups)
        if num_present:
            tokens_per_s *= self._demand.streams / num_present
        return tokens_per_s

    def _idle_prompt_s(self) -> float:
        """Return the time of a prompt on an idle worker."""
        tokens = self._demand.prompt_tokens
        step_tokens = min(tokens, self._cost.step_tokens)
        if not step_tokens:
            return 0.0
        num_steps = tokens / step_tokens
        return num_steps * self._prompt_step_s(step_tokens, 0.0)

    def _prompt_steps(self, num_workers: int, streams: float) -> PromptSteps | None:
        """Return the prompt steps of each worker. None: the size of a prompt is not known.

        The size is not known if no prompt was computed lately and no prompt waits at a frontend.

        The prompts that arrive during one step are computed together in the next step. So a longer
        step makes the next step longer. Therefore the tokens and the time of a step are found by
        iteration.

        Args:
            num_workers: the number of workers among which the prompts are divided.
            streams: the number of streams of each of these workers.
        """
        demand = self._demand
        if not demand.prompt_tokens:
            return None
        max_tokens = self._max_prompt_tokens(streams)
        tokens_per_s = demand.prompts_per_s * demand.prompt_tokens / num_workers
        # A step has at least one prompt, or as much of one prompt as fits.
        min_tokens = min(demand.prompt_tokens, max_tokens)
        tokens = min_tokens
        for _ in range(_MAX_ROUNDS):
            before = tokens
            arrived = tokens_per_s * self._prompt_step_s(tokens, streams)
            tokens = min(max_tokens, max(min_tokens, arrived))
            if abs(tokens - before) <= 0.01 * before:
                break
        step_s = self._prompt_step_s(tokens, streams)
        full_step_s = self._prompt_step_s(max_tokens, streams)
        return PromptSteps(
            step_s=step_s,
            prompt_s=max(1.0, demand.prompt_tokens / tokens) * step_s,
            busy=min(_MAX_BUSY, tokens_per_s * step_s / tokens),
            full_busy=tokens_per_s * full_step_s / max_tokens,
        )

    def _waiting_s(self, num_workers: int, streams: float) -> float:
        """Return the time until the prompts that wait now are computed, in full steps."""
        max_tokens = self._max_prompt_tokens(streams)
        full_step_s = self._prompt_step_s(max_tokens, streams)
        return self._demand.queued_tokens / num_workers * full_step_s / max_tokens

    def _max_prompt_tokens(self, streams: float) -> int:
        """Return the most prompt tokens that a step can have."""
        if not streams:
            return self._cost.step_tokens
        context_tokens = streams * self._demand.context_of_stream
        return self._cost.tokens_beside_streams(streams, context_tokens, self._mixed_step_s)

    def _prompt_step_s(self, tokens: float, streams: float) -> float:
        """Return the time of a step with some prompt tokens beside some streams."""
        demand = self._demand
        # A token attends to the tokens before it. On average, these are half of its prompt.
        attention_pairs = tokens * demand.prompt_tokens / 2
        context_tokens = streams * demand.context_of_stream
        step_s = prefill_step_s(self._prefill, streams, context_tokens, tokens, attention_pairs)
        return max(step_s, _SHORTEST_STEP_S)

    def _ttft_s(self, num_workers: int, streams: float) -> float:
        waiting_s = self._waiting_s(num_workers, streams)
        steps = self._prompt_steps(num_workers, streams)
        if steps is None:
            # The size of a prompt is not known, but prompts may wait at workers.
            return waiting_s
        # A new prompt waits for the end of the running step. `busy` is the chance that one runs.
        step_end_s = steps.busy * steps.step_s
        # The three waits are estimates of the same work that is ahead, so only the longest counts.
        wait_s = max(_queue_s(steps.prompt_s, steps.full_busy), step_end_s, waiting_s)
        return steps.prompt_s + wait_s + _growth_s(steps.full_busy)

    def _transfers(self, num_workers: int) -> TransferForecast:
        """Return the times of KV transfers to this number of decode workers."""
        cost = self._cost
        demand = self._demand
        prompt_tokens = demand.prompt_tokens
        # While one transfer takes its turn on the network of a worker, the next one waits. KV of
        # cached tokens is fetched, too, but workers do not report their number.
        turn_s = cost.kv_transfer_s(0, other_tokens=prompt_tokens) - cost.kv_transfer_s(0)
        busy = turn_s * demand.prompts_per_s / num_workers
        seconds = cost.kv_transfer_s(prompt_tokens) + _queue_s(turn_s, busy) + _growth_s(busy)
        return TransferForecast(seconds, busy)

    def _gap_s(self, counts: RoleCounts, streams: float) -> float:
        """Return the longest time between two tokens."""
        if not streams:
            return 0.0
        gap_s = self._step_s(streams)
        steps = self._prompt_steps(counts.num_prefill, streams) if counts.both else None
        if steps is not None and steps.busy:
            gap_s = max(gap_s, steps.step_s)
        return gap_s

    def _mean_gap_s(self, num_sharing: int, streams: float) -> float:
        """Return the mean time between two tokens of a stream of one worker.

        Args:
            num_sharing: the number of workers among which the prompts are divided, including this
                worker. 0: this worker computes no prompts.
            streams: the number of streams of this worker.
        """
        step_s = self._step_s(streams)
        steps = self._prompt_steps(num_sharing, streams) if num_sharing else None
        if steps is None:
            return step_s
        tokens_per_s = steps.busy / max(steps.step_s, step_s) + (1 - steps.busy) / step_s
        return 1 / tokens_per_s

    def _step_s(self, streams: float) -> float:
        """Return the time of a step that only generates tokens."""
        context_tokens = streams * self._demand.context_of_stream
        return max(decode_step_s(self._decode, streams, context_tokens), _SHORTEST_STEP_S)

    def _streams_per_worker(self, counts: RoleCounts) -> float:
        """Return how many streams each worker has.

        The tokens per second of all streams together are taken as given. If each token takes
        longer, streams last longer, so more streams run at once (Little's law).
        """
        demand = self._demand
        num_workers = counts.num_decode
        growth_limit = _MAX_GROWTH * demand.streams
        num_sharing = counts.num_prefill if counts.both else 0
        streams = demand.streams / num_workers
        for _ in range(_MAX_ROUNDS):
            before = streams
            gap_s = self._mean_gap_s(num_sharing, streams)
            streams = min(growth_limit, self._tokens_per_s * gap_s / num_workers)
            if abs(streams - before) <= 0.01 * before:
                break
        return streams

    def _full_part(self, streams: float) -> float:
        """Return which part of a worker's batch or KV cache is full, whichever is larger."""
        demand = self._demand
        parts = [0.0]
        if demand.max_streams:
            parts.append(streams / demand.max_streams)
        if demand.kv_tokens:
            parts.append(streams * demand.context_of_stream / demand.kv_tokens)
        return max(parts)


def _as_text(seconds: float, *, most_s: float) -> str:
    """Return a predicted time for people.

    Args:
        seconds: the time.
        most_s: a longer time is given only as "more than" this. It is the time for which a growing
            queue is predicted, or a limit if that is longer.
    """
    if seconds > most_s:
        return f"more than {most_s:g} s"
    return f"{1000 * seconds:.0f} ms"


def _queue_s(service_s: float, busy: float) -> float:
    """Return the 90th percentile of the wait in an M/D/1 queue, whose service times are equal.

    Args:
        service_s: the service time.
        busy: the part of the time in which the server would be busy. Above _MAX_BUSY, the queue
            grows: see `_growth_s`.
    """
    stable_busy = min(busy, _MAX_BUSY)
    mean_s = service_s * stable_busy / (2 * (1 - stable_busy))
    return _P90_OF_MEAN * mean_s


def _growth_s(busy: float) -> float:
    """Return the time for the work that is added to a growing queue within _GROWS_FOR_S.

    It is 0 if `busy` is at most _MAX_BUSY.
    """
    return (busy - min(busy, _MAX_BUSY)) * _GROWS_FOR_S


def _reachable(limit_s: float, idle_s: float) -> float:
    """Return the limit, or a longer limit if no worker can keep this one with headroom.

    `idle_s` is the time on an idle worker.
    """
    return limit_s if idle_s <= MAX_PART * limit_s else _IDLE_FACTOR * idle_s


def _fewest(part: Callable[[int], float]) -> int:
    """Return the smallest number of workers for which `part` is at most MAX_PART.

    With more workers, `part` is smaller. If no number is enough, the result is _MAX_WANTED.
    """
    low = 1
    high = _MAX_WANTED
    while low < high:
        middle = (low + high) // 2
        if part(middle) <= MAX_PART:
            high = middle
        else:
            low = middle + 1
    return low
