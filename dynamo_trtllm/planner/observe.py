"""Observe the workers of a namespace: their reports, and the rates of the last seconds.

The module reads no clock: callers pass the time.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.pairs import pairing_key
from dynamo_trtllm.frontend.routing.worker_load import STALE_S, ClusterLoad, cost_of_equals
from dynamo_trtllm.planner.decide import GROWTH_S, Observation, WorkerState
from dynamo_trtllm.planner.frontend_queues import FrontendQueue, FrontendQueues
from dynamo_trtllm.protocol.frontend_usage import FrontendUsage
from dynamo_trtllm.protocol.messages import Instance, LoadReport, Role
from dynamo_trtllm.protocol.shares import DECODE_ONLY, PREFILL_ONLY, Shares

WINDOW_S: Final = 10.0  # rates are means over this time
# Rates over a shorter time would depend on chance. Until this time has passed since the start, a
# rate is what has arrived divided by this time, and the growth of streams is 0.
MIN_WINDOW_S: Final = 2.0
_MAX_PAUSE_S: Final = 2.0  # longest time between two samples of the queues at frontends
# Idle workers report every 10 s. If no worker of a pool has reported for this time, no report
# arrives, as when NATS is away. It ends before the first of these workers alone seems silent.
_SILENT_S: Final = STALE_S / 2
# How long the first report of a worker, or the first one after a silence of all, may take: longer
# than those 10 s.
_FIRST_REPORT_S: Final = STALE_S / 2


class PoolKey(NamedTuple):
    """The workers of a model that can transfer KV to each other."""

    model: str
    pairing_key: str


class _Counts(NamedTuple):
    """The counts of a worker in one report."""

    at_s: float
    computed_prompts: int
    computed_tokens: int
    queued_tokens: int
    streams: int
    context_tokens: int


class _Increase(NamedTuple):
    """By how much the counts of a worker have grown in the last seconds."""

    prompts: int = 0  # number of prompts that were computed
    tokens: int = 0  # number of tokens of these prompts
    queued_tokens: int = 0  # by how many the waiting prompt tokens have grown; negative: fallen


class _Means(NamedTuple):
    """Means of the last seconds."""

    streams: float = 0.0
    context_tokens: float = 0.0
    more_streams_per_s: float = 0.0


class ReportWindow:
    """The reports of one worker in the last seconds.

    Args:
        role: the role of the worker.
    """

    def __init__(self, role: Role) -> None:
        self._role = role
        # The counts of the reports, in the order of their arrival. The first report may be older
        # than the window. Its counts are those with which the window begins.
        self._counts: deque[_Counts] = deque()

    def add(self, report: LoadReport, now: float) -> None:
        """Add a report that has arrived now."""
        work = report.work(self._role)
        counts = _Counts(
            at_s=now,
            computed_prompts=report.computed_prompts,
            computed_tokens=report.computed_tokens,
            queued_tokens=report.queued_prefill_tokens,
            streams=work.decode_requests,
            context_tokens=work.context_tokens,
        )
        self._counts.append(counts)
        self._drop(now)

    def increase(self, now: float) -> _Increase:
        """Return by how much the counts have grown in the window."""
        self._drop(now)
        if len(self._counts) < 2:
            return _Increase()
        first = self._counts[0]
        last = self._counts[-1]
        return _Increase(
            prompts=last.computed_prompts - first.computed_prompts,
            tokens=last.computed_tokens - first.computed_tokens,
            queued_tokens=last.queued_tokens - first.queued_tokens,
        )

    def means(self, now: float) -> _Means:
        """Return the means over the window. The counts of a report hold until the next report."""
        self._drop(now)
        begins = [max(counts.at_s, now - WINDOW_S) for counts in self._counts]
        durations_s = [end - begin for begin, end in pairwise([*begins, now])]
        total_s = sum(durations_s)
        if total_s <= 0:
            return _Means()
        streams = 0.0
        context = 0.0
        for counts, duration_s in zip(self._counts, durations_s, strict=True):
            streams += counts.streams * duration_s
            context += counts.context_tokens * duration_s
        return _Means(
            streams=streams / total_s,
            context_tokens=context / total_s,
            more_streams_per_s=self._more_streams_per_s(now),
        )

    def _more_streams_per_s(self, now: float) -> float:
        """Return how many streams per second have been added, as a mean over GROWTH_S."""
        before = self._counts[0]
        for counts in self._counts:
            if counts.at_s > now - GROWTH_S:
                break
            before = counts
        # If `before` is older than GROWTH_S, its number of streams still held GROWTH_S ago.
        seconds = min(GROWTH_S, now - before.at_s)
        if seconds < MIN_WINDOW_S:
            return 0.0
        return (self._counts[-1].streams - before.streams) / seconds

    def _drop(self, now: float) -> None:
        """Drop the reports that are older than the window, except the newest of these."""
        while len(self._counts) > 1 and self._counts[1].at_s <= now - WINDOW_S:
            self._counts.popleft()


class _QueueSample(NamedTuple):
    at_s: float
    tokens: int


class QueueWindow:
    """The numbers of prompt tokens that waited at frontends for a pool in the last seconds."""

    def __init__(self) -> None:
        self._samples: deque[_QueueSample] = deque()

    def increase(self, tokens: int, now: float) -> int:
        """Return how many more tokens wait now than at the begin of the window."""
        self._samples.append(_QueueSample(now, tokens))
        # The window begins with the oldest sample that stays, which may be older than the window.
        begin_s = now - WINDOW_S
        while len(self._samples) > 1 and self._samples[1].at_s <= begin_s:
            self._samples.popleft()
        # A planner takes no samples while it does not lead. Then the oldest sample may be too old.
        if self._samples[0].at_s < begin_s - _MAX_PAUSE_S:
            self._samples.popleft()
        return tokens - self._samples[0].tokens


class Observer:
    """What a planner knows of the workers of a namespace.

    Args:
        view: the workers, and their shares.
        started_at: the time at which observing begins, in seconds of a monotonic clock.
    """

    def __init__(self, view: ClusterView, started_at: float) -> None:
        self._view = view
        self._loads = ClusterLoad()
        self._windows: dict[int, ReportWindow] = {}
        self._queues = FrontendQueues()
        self._queue_windows: dict[PoolKey, QueueWindow] = {}
        # Since when the report of a worker is awaited: when it was observed first, or when all of
        # its pool were silent last.
        self._awaited_since: dict[int, float] = {}
        self._started_at = started_at

    def on_report(self, report: LoadReport, now: float) -> None:
        """Take the report of a worker. `now` is in seconds of a monotonic clock."""
        instance = self._view.instance(report.instance_id)
        if instance is None:
            return
        self._loads.on_report(report, now)
        # `ClusterLoad` stores only the newest report. A late report is ignored.
        is_newest = self._loads.get(report.instance_id).report is report
        if is_newest:
            window = self._windows.get(report.instance_id)
            if window is None:
                window = ReportWindow(instance.role)
                self._windows[report.instance_id] = window
            window.add(report, now)

    def on_usage(self, usage: FrontendUsage, now: float) -> None:
        """Take the report of a frontend process. `now` is in seconds of a monotonic clock."""
        self._queues.on_report(usage, now)

    def remove(self, instance_id: int) -> None:
        """Drop a worker that has left. Unknown ids are ignored."""
        self._loads.remove(instance_id)
        self._windows.pop(instance_id, None)
        self._awaited_since.pop(instance_id, None)

    def observations(self, now: float) -> dict[PoolKey, Observation]:
        """Return what is known of each pool that has an elastic worker."""
        pools: defaultdict[PoolKey, list[Instance]] = defaultdict(list)
        for instance in self._view.instances():
            if instance.role is not Role.AGGREGATED:
                pools[PoolKey(instance.card.name, pairing_key(instance))].append(instance)
        num_workers = Counter(instance.card.name for instance in self._view.instances())
        elastic_pools = {
            key: instances
            for key, instances in pools.items()
            if any(instance.role is Role.ELASTIC for instance in instances)
        }
        # This drops the windows of pools that are gone.
        self._queue_windows = {
            key: self._queue_windows.get(key) or QueueWindow() for key in elastic_pools
        }
        observations: dict[PoolKey, Observation] = {}
        for key, instances in elastic_pools.items():
            # Frontends report by model. A pool gets a part of the queue in proportion to its
            # workers.
            part = len(instances) / num_workers[key.model]
            queue = self._queues.of_model(key.model, now).part(part)
            observations[key] = self._observation(key, instances, queue, now)
        return observations

    def _observation(
        self, key: PoolKey, instances: Sequence[Instance], queue: FrontendQueue, now: float
    ) -> Observation:
        shares = self._view.model(key.model).shares
        is_silent = self._is_silent(instances, now)
        workers = [
            self._state(instance, shares, now, is_silent=is_silent) for instance in instances
        ]
        fresh = [worker.id for worker in workers if worker.is_fresh]
        windows = [self._windows[id_] for id_ in fresh if id_ in self._windows]
        increases = [window.increase(now) for window in windows]
        seconds = max(MIN_WINDOW_S, min(WINDOW_S, now - self._started_at))
        prompts = sum(increase.prompts for increase in increases)
        tokens = sum(increase.tokens for increase in increases)
        # The tokens that have arrived are those that were computed, and those that wait in addition
        # to the ones that waited before.
        more_queued = sum(increase.queued_tokens for increase in increases)
        more_queued += self._queue_windows[key].increase(queue.tokens, now)
        arrived_tokens = max(0, tokens + more_queued)
        num_known = prompts + queue.choices
        prompt_tokens = (tokens + queue.tokens) / num_known if num_known else 0.0
        arrived_prompts = arrived_tokens / prompt_tokens if prompt_tokens else 0.0
        reports = [self._loads.get(id_).report for id_ in fresh]
        block_tokens = instances[0].layout.block_tokens
        return Observation(
            at_s=now,
            workers=workers,
            cost=cost_of_equals(self._loads.get(id_) for id_ in fresh),
            prompts_per_s=arrived_prompts / seconds,
            prompt_tokens=prompt_tokens,
            queue=queue,
            lacks_pairs=self._queues.lacks_pairs(key.model, now),
            max_streams=_least(instance.limits.max_batch_size for instance in instances),
            kv_tokens=block_tokens * _least(report.kv_blocks_total for report in reports if report),
        )

    def _is_silent(self, instances: Sequence[Instance], now: float) -> bool:
        """Return whether all workers of a pool have stopped reporting."""
        loads = [self._loads.get(instance.id) for instance in instances]
        newest = max((load.reported_at for load in loads if load.report), default=now)
        return now - newest > _SILENT_S

    def _state(
        self, instance: Instance, shares: Mapping[int, Shares], now: float, *, is_silent: bool
    ) -> WorkerState:
        if is_silent:
            self._awaited_since[instance.id] = now
        awaited_since = self._awaited_since.setdefault(instance.id, now)
        load = self._loads.get(instance.id)
        report = load.report
        own_shares = shares.get(instance.id)
        if own_shares is None:
            # Only elastic workers have an entry in `shares`, so this worker has a fixed role.
            own_shares = PREFILL_ONLY if instance.role is Role.PREFILL else DECODE_ONLY
        streams = 0
        context = 0
        queued = 0
        if report is not None:
            work = report.work(instance.role)
            streams = work.decode_requests
            if not own_shares.prefill:
                # The calls that wait at this worker are decode calls, except calls from before its
                # shares changed. Decode calls become streams once the batch and the KV cache have
                # space, so they count as streams.
                streams += work.queued_requests
            context = work.context_tokens
            queued = report.queued_prefill_tokens
        has_fresh_report = load.is_fresh(now) and not is_silent
        window = self._windows.get(instance.id)
        means = _Means() if window is None else window.means(now)
        return WorkerState(
            id=instance.id,
            shares=own_shares,
            is_elastic=instance.role is Role.ELASTIC,
            streams=streams,
            context_tokens=context,
            queued_tokens=queued,
            is_fresh=has_fresh_report,
            is_awaited=not has_fresh_report and now - awaited_since <= _FIRST_REPORT_S,
            mean_streams=means.streams,
            mean_context_tokens=means.context_tokens,
            more_streams_per_s=means.more_streams_per_s,
        )


def _least(counts: Iterable[int]) -> int:
    """Return the least of the counts that are reported, or 0 if none is reported."""
    return min((count for count in counts if count), default=0)
