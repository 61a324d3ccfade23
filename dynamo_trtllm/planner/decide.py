"""Decide which shares the elastic workers of a model should have: a pure function."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from dynamo_trtllm.planner.frontend_queues import FrontendQueue
from dynamo_trtllm.planner.predict import (
    MAX_PART,
    Demand,
    PredictedTimes,
    Predictor,
    RoleCounts,
    StreamGroup,
    TimeLimits,
)
from dynamo_trtllm.protocol.cost_model import CostModel
from dynamo_trtllm.protocol.counted import counted
from dynamo_trtllm.protocol.shares import ALL_WORK, DECODE_ONLY, PREFILL_ONLY, Shares

NO_ELASTIC_WORKERS: Final = (
    "there is no elastic worker; start some with --disaggregation-mode elastic"
)
# The shares of a worker that turns to prefill while it still runs streams. The worker gets no new
# streams, and fewer prompts until its streams have ended. With vLLM on an H200, a prompt takes 2.6
# times as long beside streams (see `engines.chunk_size`).
DRAINING: Final = Shares(0.25, 0.0)
# A change is made only if it lowers `PredictedTimes.largest_part` by this fraction.
MIN_GAIN: Final = 0.2
# The reason of a decision if frontends can use no pair.
_LACKS_PAIRS: Final = (
    "frontends have quarantined all pairs of workers, so each request runs on one worker"
)
HOLD_S: Final = 2.0  # a change is made only if it was better for this time
MIN_INTERVAL_S: Final = 10.0  # shortest time between two changes
# If the number of streams grows, the number that is expected after this time counts, because the
# next change is possible only then.
AHEAD_S: Final = MIN_INTERVAL_S
GROWTH_S: Final = 5.0  # `WorkerState.more_streams_per_s` is a mean over this time


class WorkerState(NamedTuple):
    """One worker, as it was last reported."""

    id: int
    shares: Shares  # a worker of a fixed role has all work of its role
    is_elastic: bool
    streams: int  # number of requests that generate tokens
    context_tokens: int  # sum over the contexts of these requests
    queued_tokens: int  # number of prompt tokens that are not computed yet
    is_fresh: bool  # the worker has reported its load lately
    # The next two are means of the last seconds. A worker with few requests may have no stream at
    # the moment of a report.
    mean_streams: float = 0.0
    mean_context_tokens: float = 0.0
    more_streams_per_s: float = 0.0  # growth, a mean over GROWTH_S; negative: they become fewer
    # The worker is not fresh, but a report is expected: its first one, or its next one after a time
    # in which no worker reported.
    is_awaited: bool = False

    @property
    def lasting_streams(self) -> float:
        """Return the number of streams to plan for: the present number, or the mean if higher."""
        return max(self.streams, self.mean_streams)


class Observation(NamedTuple):
    """What is known of the workers of a model that can transfer KV to each other."""

    at_s: float  # seconds of a monotonic clock
    workers: Sequence[WorkerState]
    # The cost model of the workers, which are equal. None: the workers have not learned it yet.
    cost: CostModel | None
    prompts_per_s: float = 0.0  # prompts that have arrived in the last seconds
    prompt_tokens: float = 0.0  # mean number of tokens of a prompt that have to be computed
    max_streams: int = 0  # most streams of one worker; 0: not reported
    kv_tokens: int = 0  # tokens that fit into the KV cache of one worker; 0: not reported
    queue: FrontendQueue = FrontendQueue()  # requests that wait at frontends
    lacks_pairs: bool = False  # frontends have quarantined all pairs: no KV can be transferred


class DecisionOutcome(StrEnum):
    """The kind of a decision. The values are labels of a metric."""

    CHANGE = "change"
    # A worker that turns to prefill has no streams any more, or has to compute all prompts.
    DRAINED = "drained"
    FITS = "fits"
    NOTHING_BETTER = "nothing_better"
    LACKS_PAIRS = "lacks_pairs"
    WAITING = "waiting"
    NO_ELASTIC_WORKERS = "no_elastic_workers"
    ONE_WORKER = "one_worker"
    NO_LOADS = "no_loads"
    NO_COST_MODEL = "no_cost_model"


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided for the workers of a model, and why."""

    outcome: DecisionOutcome
    reason: str  # a plain sentence
    changes: Mapping[int, Shares] = {}  # the shares to set, by id of the worker
    present: RoleCounts = RoleCounts()  # the workers before the change
    counts: RoleCounts = RoleCounts()  # the workers after the change
    before: PredictedTimes | None = None  # the times without the change
    after: PredictedTimes | None = None  # the times with the change
    wanted: RoleCounts | None = None  # how many workers of fixed roles would keep the limits
    unreachable: tuple[str, ...] = ()  # the limits that no number of workers keeps, as text


class ChangeTiming(NamedTuple):
    """What a decision needs to know of earlier decisions: the timing of changes."""

    changed_at_s: float = -math.inf  # when the shares were changed last
    better_since_s: float | None = None  # since when a change is better. None: no change is better


def decide(
    observation: Observation, limits: TimeLimits, timing: ChangeTiming
) -> tuple[Decision, ChangeTiming]:
    """Decide which shares elastic workers should have, from what is predicted for the next seconds.

    * The shares stay while they are predicted to keep both limits with headroom.
    * Otherwise the elastic workers are split: some get only decode calls, the others only prefill
      calls. Beginning with few workers for decode, the first split is taken that keeps both limits
      with headroom. Prompts that wait and prompts that arrive count. If the number of streams
      grows by more than chance explains, the number that is expected after AHEAD_S counts.
    * If no split keeps both limits with headroom, the one that comes nearest to them is taken.
    * If that split misses a limit, and undivided workers would keep both limits with headroom, the
      elastic workers are not split: all get both kinds of calls. This is the last resort, because
      once all workers have streams, a split becomes effective only as these streams end.
    * If frontends have quarantined all pairs, no KV can be transferred, and nothing is split.
    * A change has to lower `largest_part` by the fraction MIN_GAIN. It is made when it was better
      for HOLD_S, and MIN_INTERVAL_S have passed since the last change. Each kind of call has at
      least one worker: if one has none, a change is made at once.
    * The workers with the fewest streams turn to prefill, and those with the fewest prompt tokens
      turn to decode. Shares steer only new calls: running streams stay where they are. If other
      workers compute prompts, a worker that turns to prefill gets fewer prompts until its streams
      have ended.
    * Workers that have not reported lately keep their shares, and do not count. If a kind of call
      has only awaited workers, all shares stay. Fixed roles count.

    Args:
        observation: what is known of the workers.
        limits: the limits. If an idle worker needs more than MAX_PART of a limit for one request,
            twice this time replaces the limit; `Decision.unreachable` names those it can't keep.
        timing: the timing that the last decision returned, or `ChangeTiming()` at the start.

    Returns:
        The decision, and the timing for the next decision, if its changes are made.
    """
    decision = _decision_without_prediction(observation)
    if decision is not None:
        return decision, timing._replace(better_since_s=None)
    assert observation.cost is not None
    workers = [worker for worker in observation.workers if worker.is_fresh]
    present = _role_counts(workers)
    demand = _demand(observation, workers)
    predictor = Predictor(observation.cost, demand, limits, _stream_groups(workers))
    decision = _predicted_decision(observation, workers, present, predictor)
    if decision.outcome is DecisionOutcome.CHANGE:
        decision, timing = _unless_too_early(decision, observation.at_s, timing)
    else:
        timing = timing._replace(better_since_s=None)
    drained = {} if decision.changes else _drained(workers)
    if drained:
        decision = msgspec.structs.replace(
            decision,
            outcome=DecisionOutcome.DRAINED,
            changes=drained,
            reason=_drained_reason(workers, drained),
        )
    return decision, timing


def _decision_without_prediction(observation: Observation) -> Decision | None:
    """Return the decision if nothing can be predicted or chosen, and otherwise None."""
    elastic = [worker for worker in observation.workers if worker.is_elastic]
    fresh = [worker for worker in observation.workers if worker.is_fresh]
    present = _role_counts(observation.workers)
    if not elastic:
        return Decision(
            outcome=DecisionOutcome.NO_ELASTIC_WORKERS,
            present=present,
            reason=NO_ELASTIC_WORKERS,
        )
    if len(observation.workers) == 1:
        return Decision(
            outcome=DecisionOutcome.ONE_WORKER,
            present=present,
            reason="the only worker gets all calls",
        )
    no_loads = ""
    if len(fresh) < 2:
        no_loads = (
            f"{len(fresh)} of {len(observation.workers)} workers have reported their load lately,"
            " which is too few to choose between them"
        )
    elif not any(worker.is_elastic for worker in fresh):
        no_loads = "no elastic worker has reported its load lately"
    else:
        no_loads = _awaited_kind(observation.workers)
    if no_loads:
        return Decision(outcome=DecisionOutcome.NO_LOADS, present=present, reason=no_loads)
    cost = observation.cost
    if cost is None or cost.decode is None or cost.prefill is None or not cost.step_tokens:
        return Decision(
            outcome=DecisionOutcome.NO_COST_MODEL,
            present=present,
            reason="the workers have not measured the times of their steps yet",
        )
    return None


def _awaited_kind(workers: Sequence[WorkerState]) -> str:
    """Return a sentence if a kind of call has only workers that are awaited, and otherwise "".

    A planner that starts gets the reports of idle workers one after the other.
    """
    for kind in ("prefill", "decode"):
        with_share = [worker for worker in workers if getattr(worker.shares, kind)]
        is_awaited = any(worker.is_awaited for worker in with_share)
        if is_awaited and not any(worker.is_fresh for worker in with_share):
            return f"no worker with a share of {kind} calls has reported its load yet"
    return ""


def _role_counts(workers: Sequence[WorkerState]) -> RoleCounts:
    """Return how many of these workers get prefill calls, decode calls, or both now."""
    both = sum(bool(worker.shares.prefill and worker.shares.decode) for worker in workers)
    prefill = sum(not worker.shares.decode for worker in workers)
    return RoleCounts(prefill=prefill, decode=len(workers) - prefill - both, both=both)


def _stream_groups(workers: Sequence[WorkerState]) -> list[StreamGroup]:
    return [
        StreamGroup(worker.lasting_streams, beside_prompts=bool(worker.shares.prefill))
        for worker in workers
    ]


def _demand(observation: Observation, workers: Sequence[WorkerState]) -> Demand:
    """Return the work of all workers, with the number of streams that is expected after AHEAD_S."""
    queued_tokens = sum(worker.queued_tokens for worker in workers)
    streams = sum(worker.lasting_streams for worker in workers)
    context_tokens = sum(
        max(worker.context_tokens, worker.mean_context_tokens) for worker in workers
    )
    more_streams = AHEAD_S * _growth_per_s(workers, streams)
    if observation.queue.waits_for_decode:
        more_streams += observation.queue.choices
    else:
        queued_tokens += observation.queue.tokens
    if streams:
        # The additional streams are taken to have the mean context of the present streams.
        context_tokens *= 1 + more_streams / streams
    return Demand(
        prompts_per_s=observation.prompts_per_s,
        prompt_tokens=observation.prompt_tokens,
        queued_tokens=queued_tokens,
        streams=streams + more_streams,
        context_tokens=context_tokens,
        max_streams=observation.max_streams,
        kv_tokens=observation.kv_tokens,
    )


def _growth_per_s(workers: Sequence[WorkerState], streams: float) -> float:
    """Return by how many streams per second the load grows. 0: it does not grow.

    Requests that come at random times let the number of streams rise and fall although the load
    stays the same. The difference of two such numbers n and m has a standard deviation of √(n + m),
    as Poisson distributions have. Only what exceeds this counts as growth.

    Args:
        workers: the workers.
        streams: the present number of their streams.
    """
    more = GROWTH_S * sum(worker.more_streams_per_s for worker in workers)
    before = max(0.0, streams - more)
    by_chance = math.sqrt(streams + before)
    return max(0.0, more - by_chance) / GROWTH_S


def _predicted_decision(
    observation: Observation,
    workers: Sequence[WorkerState],
    present: RoleCounts,
    predictor: Predictor,
) -> Decision:
    """Return the decision, without regard to earlier decisions."""
    # A worker that gets both kinds of calls is counted in both numbers.
    has_both_kinds = present.num_prefill > 0 and present.num_decode > 0
    before = predictor.predict(present) if has_both_kinds else None
    wanted = predictor.wanted()
    unreachable = tuple(predictor.unreachable)

    def stay(outcome: DecisionOutcome, reason: str) -> Decision:
        return Decision(
            outcome=outcome,
            reason=reason,
            present=present,
            counts=present,
            before=before,
            after=before,
            wanted=wanted,
            unreachable=unreachable,
        )

    def change(reason: str, counts: RoleCounts, after: PredictedTimes) -> Decision:
        return Decision(
            outcome=DecisionOutcome.CHANGE,
            reason=reason,
            changes=_changes(workers, counts),
            present=present,
            counts=counts,
            before=before,
            after=after,
            wanted=wanted,
            unreachable=unreachable,
        )

    if observation.lacks_pairs:
        *_, counts = _candidates(workers)
        if not _changes(workers, counts):
            return stay(DecisionOutcome.LACKS_PAIRS, _LACKS_PAIRS)
        return change(_LACKS_PAIRS, counts, predictor.predict(counts))
    if before is not None and before.largest_part <= MAX_PART:
        return stay(DecisionOutcome.FITS, f"the shares keep both limits: {before}")
    counts, after = _best(workers, predictor)
    if before is None:
        is_better = True  # without a change, one kind of call has no worker
    else:
        is_better = after.largest_part <= (1 - MIN_GAIN) * before.largest_part
    if not is_better:
        return stay(
            DecisionOutcome.NOTHING_BETTER,
            f"no other shares are clearly better: {before}; {counts}: {after}",
        )
    return change(_reason(present, before, counts, after), counts, after)


def _candidates(workers: Sequence[WorkerState]) -> Iterator[RoleCounts]:
    """Yield the possible counts of workers, which include the workers of fixed roles.

    Splits of the elastic workers come first, beginning with few workers for decode. The last item
    is no split: with it, all elastic workers get both kinds of calls.
    """
    fixed = _role_counts([worker for worker in workers if not worker.is_elastic])
    num_elastic = sum(worker.is_elastic for worker in workers)
    for num_decode in range(num_elastic + 1):
        counts = RoleCounts(
            prefill=fixed.prefill + num_elastic - num_decode,
            decode=fixed.decode + num_decode,
            both=fixed.both,
        )
        if counts.num_prefill and counts.num_decode:
            yield counts
    yield fixed._replace(both=fixed.both + num_elastic)


class _Candidate(NamedTuple):
    """One way to divide the workers, and the times that are predicted for it."""

    counts: RoleCounts
    after: PredictedTimes


def _best(workers: Sequence[WorkerState], predictor: Predictor) -> _Candidate:
    """Return the best candidate, as `decide` describes."""
    *splits, both = [
        _Candidate(counts, predictor.predict(counts)) for counts in _candidates(workers)
    ]
    for split in splits:
        if split.after.largest_part <= MAX_PART:
            return split
    if not splits:
        return both
    split = min(splits, key=lambda candidate: candidate.after.largest_part)
    misses_limit = split.after.largest_part > 1
    if misses_limit and both.after.largest_part <= MAX_PART:
        return both
    return split


def _changes(workers: Sequence[WorkerState], counts: RoleCounts) -> dict[int, Shares]:
    """Return the shares that change, by id."""
    fixed = _role_counts([worker for worker in workers if not worker.is_elastic])
    num_decode = counts.decode - fixed.decode  # elastic workers that get only decode calls
    order = sorted((worker for worker in workers if worker.is_elastic), key=_decode_order)
    if counts.both > fixed.both:
        wanted = dict.fromkeys(order, ALL_WORK)
    else:
        wanted = dict.fromkeys(order[:num_decode], DECODE_ONLY)
        wanted |= _prefill_shares(order[num_decode:], has_others=fixed.prefill > 0)
    return {worker.id: shares for worker, shares in wanted.items() if shares != worker.shares}


def _prefill_shares(
    workers: Sequence[WorkerState], *, has_others: bool
) -> dict[WorkerState, Shares]:
    """Return the shares of workers for prefill.

    `has_others` is True if other workers compute prompts, too.
    """
    ready = [worker for worker in workers if not worker.streams or worker.shares == PREFILL_ONLY]
    if workers and not ready and not has_others:
        # One worker has to compute all prompts from now on. Take the one with the fewest streams.
        ready = [min(workers, key=lambda worker: worker.streams)]
    shares = dict.fromkeys(workers, DRAINING)
    for worker in ready:
        shares[worker] = PREFILL_ONLY
    return shares


def _drained(workers: Sequence[WorkerState]) -> dict[int, Shares]:
    """Return the new shares of workers that turn to prefill and need not drain any longer."""
    draining = [worker for worker in workers if worker.shares == DRAINING]
    has_others = any(worker.shares.prefill > DRAINING.prefill for worker in workers)
    new_shares = _prefill_shares(draining, has_others=has_others)
    return {worker.id: shares for worker, shares in new_shares.items() if shares != DRAINING}


def _drained_reason(workers: Sequence[WorkerState], drained: Mapping[int, Shares]) -> str:
    has_streams = any(worker.streams for worker in workers if worker.id in drained)
    if has_streams:
        # `_prefill_shares` has chosen one worker although its streams still run.
        return "no other worker computes prompts; the one with the fewest streams takes them all"
    return f"the streams of {counted(len(drained), 'worker')} for prefill have ended"


def _decode_order(worker: WorkerState) -> tuple[bool, bool, int, int, int]:
    """Return a sort key: the workers that suit decode calls best come first.

    First come workers without a share of prefill, then those with a share of decode, with more
    streams, and with fewer queued tokens.
    """
    shares = worker.shares
    return (
        bool(shares.prefill),
        not shares.decode,
        -worker.streams,
        worker.queued_tokens,
        worker.id,
    )


def _reason(
    present: RoleCounts, before: PredictedTimes | None, counts: RoleCounts, after: PredictedTimes
) -> str:
    if before is None:
        lacking = "decode" if present.num_prefill else "prefill"
        return f"no worker has a share of {lacking} calls; {counts}: {after}"
    if before.ttft_part < before.decode_part:
        shortage = "decode is short"
    elif before.transfer_s > before.ttft_s / 2:
        shortage = "KV transfers are slow"
    else:
        shortage = "prefill is short"
    return f"{shortage} with {present}: {before}; {counts}: {after}"


def _unless_too_early(
    decision: Decision, now_s: float, timing: ChangeTiming
) -> tuple[Decision, ChangeTiming]:
    """Return the change if it is due, and otherwise the decision to wait."""
    since_s = now_s if timing.better_since_s is None else timing.better_since_s
    held_s = now_s - since_s
    is_urgent = decision.before is None  # a kind of call has no worker
    is_due = held_s >= HOLD_S and now_s - timing.changed_at_s >= MIN_INTERVAL_S
    if is_urgent or is_due:
        return decision, ChangeTiming(changed_at_s=now_s)
    waiting = msgspec.structs.replace(
        decision,
        outcome=DecisionOutcome.WAITING,
        changes={},
        counts=decision.present,
        reason=f"a change is near, if it stays better: {decision.reason}",
    )
    return waiting, timing._replace(better_since_s=since_s)
