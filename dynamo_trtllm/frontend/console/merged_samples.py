"""Merge the samples of all frontend processes, and the loads of workers, into snapshots."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

import dynamo_trtllm
from dynamo_trtllm.frontend.console import health_reasons
from dynamo_trtllm.frontend.console.reader import encode_event
from dynamo_trtllm.frontend.console.sampler import GAPS, TTFT
from dynamo_trtllm.frontend.console.snapshot import (
    MAX_LISTED,
    ConsoleFrontend,
    ConsoleHello,
    ConsolePair,
    ConsolePoint,
    ConsoleSnapshot,
    ConsoleWorker,
    HealthReason,
    WorkerEvent,
    is_failure,
    mean_ttft_parts,
    points_of,
    quantile,
    request_object,
)
from dynamo_trtllm.frontend.console.worker_times import RecentTimes, slow_ratios
from dynamo_trtllm.frontend.routing.model_registry import ModelRegistry
from dynamo_trtllm.observability.metrics import bucket_bounds
from dynamo_trtllm.protocol.frontend_samples import FrontendSample, RequestRow
from dynamo_trtllm.protocol.messages import Instance, LoadReport, Role

MAX_POINTS: Final = 300  # five minutes
_MINUTE: Final = 60  # points
_MAX_REQUESTS: Final = 100
_MAX_EVENTS: Final = 20
_GONE_S: Final = 30.0  # for how long after its last sample a process is shown
_BOUNDS: Final = {name: bucket_bounds("frontend", name) for name in (TTFT, GAPS)}


@dataclass(slots=True)
class _Process:
    """The last sample of a frontend process, and when it came."""

    sample: FrontendSample
    at_s: float


class _Slowness(NamedTuple):
    """How much slower a worker is than the other workers of its role."""

    ratio: float  # the worker's time, divided by the usual time of the others
    is_of_prompts: bool  # the times are those of computing prompts, not of generating tokens


@dataclass(eq=False)
class MergedSamples:
    """What all frontend processes have sampled while a console was open.

    Args:
        models: the workers, their pairs and their readiness, as this process knows them.
        namespace: the namespace of the deployment.
        latest: returns the latest requests of this process, the oldest first.
        clock: returns seconds of a monotonic clock.
    """

    _models: ModelRegistry
    _namespace: str
    _latest: Callable[[], Sequence[RequestRow]]
    _clock: Callable[[], float] = time.monotonic
    _processes: dict[int, _Process] = field(default_factory=dict, init=False)
    # The samples that came since the last snapshot.
    _new_samples: list[FrontendSample] = field(default_factory=list, init=False)
    _loads: dict[int, LoadReport] = field(default_factory=dict, init=False)
    _times: RecentTimes = field(default_factory=RecentTimes, init=False)
    # When each slow worker began to be slow.
    _slow_since_s: dict[int, float] = field(default_factory=dict, init=False)
    _requests: deque[RequestRow] = field(init=False)
    _points: deque[ConsolePoint] = field(init=False)
    # Requests by outcome, of each point of the last minute.
    _code_counts: deque[Mapping[str, int]] = field(init=False)

    def __post_init__(self) -> None:
        self._requests = deque(maxlen=_MAX_REQUESTS)
        self._points = deque(maxlen=MAX_POINTS)
        self._code_counts = deque(maxlen=_MINUTE)

    def open_console(self) -> None:
        """Begin with the latest requests of this process.

        Nothing was sampled while no console was open.
        """
        self._processes.clear()
        self._new_samples.clear()
        self._code_counts.clear()
        self._times = RecentTimes()
        self._slow_since_s.clear()
        rows = self._latest()
        self._requests.clear()
        self._take_history(rows)
        first_new_at = 0.0
        if self._points:
            first_new_at = self._points[-1].at + 1
        self._points.extend(point for point in points_of(rows) if point.at >= first_new_at)

    def add(self, sample: FrontendSample) -> None:
        """Take a sample of any process."""
        self._processes[sample.process] = _Process(sample, self._clock())
        # The first sample of a process has requests that ended before it.
        if sample.number == 1:
            self._take_history(sample.requests)
        self._new_samples.append(sample)

    def add_load(self, report: LoadReport) -> None:
        """Take the load of a worker. A report may arrive after a newer one, and is ignored then."""
        before = self._loads.get(report.instance_id)
        if before is None or report.number > before.number:
            self._loads[report.instance_id] = report

    def hello(self) -> bytes:
        """Return the first event for a new reader."""
        snapshot = self._snapshot(self._point([]), list(self._requests))
        hello = ConsoleHello(
            namespace=self._namespace,
            version=dynamo_trtllm.__version__,
            points=list(self._points),
            snapshot=snapshot,
        )
        return encode_event("hello", hello)

    def snapshot(self) -> bytes:
        """Return the event of one second, with the samples that came since the last call."""
        samples = self._new_samples
        self._new_samples = []
        self._drop_gone()
        self._times.age()
        rows: list[RequestRow] = []
        codes: Counter[str] = Counter()
        for sample in samples:
            codes.update(sample.codes)
            for progress in sample.workers:
                self._times.add_progress(progress, sample.interval_s)
            if sample.number > 1:
                rows += sample.requests
        for row in rows:
            self._times.add_request(row, with_tokens=False)
        self._code_counts.append(codes)
        self._requests.extend(rows)
        point = self._point(samples, rows)
        self._points.append(point)
        # The earlier requests of a new process are older than some that the readers have got
        # already. So the readers get the whole list again.
        has_history = any(sample.number == 1 for sample in samples)
        shown = list(self._requests) if has_history else rows
        return encode_event("snapshot", self._snapshot(point, shown[-_MAX_REQUESTS:]))

    def _take_history(self, rows: Sequence[RequestRow]) -> None:
        """Take requests that ended before the samples begin."""
        known = {row.id for row in self._requests}
        unknown = [row for row in rows if row.id not in known]
        # No sample has counted the tokens of these requests.
        for row in unknown:
            self._times.add_request(row, with_tokens=True)
        merged = sorted([*self._requests, *unknown], key=lambda row: row.begun_at + row.total_s)
        self._requests.clear()
        self._requests.extend(merged)

    def _drop_gone(self) -> None:
        """Drop processes and workers that are gone."""
        now_s = self._clock()
        for process, last in list(self._processes.items()):
            if now_s - last.at_s > _GONE_S:
                del self._processes[process]
        ids = {instance.id for instance in self._models.instances()}
        self._times.keep_only(ids)
        self._loads = {key: load for key, load in self._loads.items() if key in ids}

    # --- one snapshot -----------------------------------------------------------------------------

    def _point(
        self, samples: Sequence[FrontendSample], rows: Sequence[RequestRow] = ()
    ) -> ConsolePoint:
        """Return the values of the charts from the samples that came since the last point.

        Usually, there is one sample of each process. If a sample was late, there may be two of one
        process. Then the point has the sum of their rates.
        """
        counts = {
            TTFT: _sums([sample.ttft_counts for sample in samples], len(_BOUNDS[TTFT]) + 1),
            GAPS: _sums([sample.gap_counts for sample in samples], len(_BOUNDS[GAPS]) + 1),
        }
        requests_per_s = 0.0
        failures_per_s = 0.0
        tokens_per_s = 0.0
        for sample in samples:
            for code, count in sample.codes.items():
                requests_per_s += count / sample.interval_s
                if is_failure(code):
                    failures_per_s += count / sample.interval_s
            num_tokens = sum(progress.tokens for progress in sample.workers)
            tokens_per_s += num_tokens / sample.interval_s
        last = [process.sample for process in self._processes.values()]
        return ConsolePoint(
            at=time.time(),
            tokens_per_s=tokens_per_s,
            requests_per_s=requests_per_s,
            failures_per_s=failures_per_s,
            inflight=sum(sample.inflight for sample in last),
            queued=sum(sample.queued for sample in last),
            ttft_p50_s=quantile(counts[TTFT], _BOUNDS[TTFT], 0.5),
            ttft_p99_s=quantile(counts[TTFT], _BOUNDS[TTFT], 0.99),
            gap_p50_s=quantile(counts[GAPS], _BOUNDS[GAPS], 0.5),
            gap_p99_s=quantile(counts[GAPS], _BOUNDS[GAPS], 0.99),
            ttft_split=mean_ttft_parts(rows),
        )

    def _snapshot(self, point: ConsolePoint, rows: Sequence[RequestRow]) -> ConsoleSnapshot:
        """Return the state of the deployment, with the newest point and these requests."""
        now = time.time()
        report = self._models.readiness(MAX_LISTED)
        instances = self._models.instances()
        workers = self._worker_rows(instances)
        frontends = self._frontend_rows()
        not_ready = list(dict.fromkeys(self._models.not_ready_reasons()))
        codes: Counter[str] = Counter()
        for counted in self._code_counts:
            codes.update(counted)
        reasons: list[HealthReason] = [
            *health_reasons.of_models(not_ready),
            *health_reasons.of_workers(workers),
            *health_reasons.of_pairs(report),
            *health_reasons.of_changes(list(self._models.worker_changes), now),
            *health_reasons.of_requests(codes, point.queued, frontends),
        ]
        # The worst reasons come first. Reasons of one severity stay in their order.
        reasons.sort(key=lambda reason: reason.severity != "bad")
        return ConsoleSnapshot(
            at=now,
            status=health_reasons.status_of(reasons, is_ready=not not_ready),
            reasons=reasons,
            models=self._models.names(),
            frontends=frontends,
            workers=workers[:MAX_LISTED],
            num_workers=len(instances),
            pairs=[
                ConsolePair(
                    prefill=pair["prefill"] or "",
                    decode=pair["decode"],
                    state=pair["state"],
                    reason=pair["reason"],
                    age_s=pair["age_s"],
                    bytes_per_s=self._bytes_per_s(pair["prefill"], pair["decode"]),
                )
                for pair in report["pairs"]
            ],
            num_pairs=report["num_pairs"],
            events=self._events(),
            point=point,
            requests=[request_object(row) for row in rows],
        )

    def _bytes_per_s(self, prefill: str | None, decode: str) -> float | None:
        if prefill is None:
            return None
        return self._times.bytes_per_s((int(prefill, 16), int(decode, 16)))

    def _frontend_rows(self) -> list[ConsoleFrontend]:
        now_s = self._clock()
        rows = [
            ConsoleFrontend(
                name=last.sample.name,
                inflight=last.sample.inflight,
                queued=last.sample.queued,
                requests_per_s=sum(last.sample.codes.values()) / last.sample.interval_s,
                silent_s=now_s - last.at_s,
            )
            for last in self._processes.values()
        ]
        return sorted(rows, key=lambda row: row.name)[:MAX_LISTED]

    def _worker_rows(self, instances: Sequence[Instance]) -> list[ConsoleWorker]:
        slow = self._slow_workers(instances)
        now_s = self._clock()
        self._slow_since_s = {id_: self._slow_since_s.get(id_, now_s) for id_ in slow}
        order = list(Role)
        in_order = sorted(
            instances,
            key=lambda instance: (instance.card.name, order.index(instance.role), instance.id),
        )
        rows = [
            self._worker_row(
                instance,
                slow=slow.get(instance.id),
                slow_s=now_s - self._slow_since_s.get(instance.id, now_s),
            )
            for instance in in_order
        ]
        # If not all workers can be listed, list those that need attention.
        if len(rows) > MAX_LISTED:
            rows.sort(key=_urgency)
        return rows

    def _slow_workers(self, instances: Sequence[Instance]) -> dict[int, _Slowness]:
        """Return the slow workers of each model and role, each with its larger ratio."""
        slow: dict[int, _Slowness] = {}
        groups: dict[tuple[str, Role], list[int]] = {}
        for instance in instances:
            groups.setdefault((instance.card.name, instance.role), []).append(instance.id)
        for (_, role), ids in groups.items():
            if role is not Role.PREFILL:
                token_times_s = _known({id_: self._times.token_s(id_) for id_ in ids})
                for id_, ratio in slow_ratios(token_times_s).items():
                    slow[id_] = _Slowness(ratio, is_of_prompts=False)
            if role is not Role.DECODE:
                prompt_times_s = _known({id_: self._times.prompt_token_s(id_) for id_ in ids})
                # The default least difference is for times per generated token. Times per prompt
                # token are far below it.
                for id_, ratio in slow_ratios(prompt_times_s, least_s=0.0).items():
                    if id_ not in slow or ratio > slow[id_].ratio:
                        slow[id_] = _Slowness(ratio, is_of_prompts=True)
        return slow

    def _worker_row(
        self, instance: Instance, *, slow: _Slowness | None, slow_s: float
    ) -> ConsoleWorker:
        load = self._loads.get(instance.id)
        times = self._times.workers.get(instance.id)
        token_s = self._times.token_s(instance.id)
        prompt_token_s = self._times.prompt_token_s(instance.id)
        shares = self._models.shares_of(instance)
        return ConsoleWorker(
            id=f"{instance.id:x}",
            role=str(instance.role),
            model=instance.card.name,
            engine=instance.engine,
            running=None if load is None else load.running,
            waiting=None if load is None else load.waiting,
            queued_prefill_tokens=None if load is None else load.queued_prefill_tokens,
            kv_blocks_used=None if load is None else load.kv_blocks_used,
            kv_blocks_total=None if load is None else load.kv_blocks_total,
            streams=0 if times is None else times.streams,
            tokens_per_s=0.0 if times is None else times.tokens_per_s,
            token_ms=None if token_s is None else token_s * 1e3,
            prompt_token_ms=None if prompt_token_s is None else prompt_token_s * 1e3,
            slow_ratio=None if slow is None else slow.ratio,
            is_slow_at_prompts=slow is not None and slow.is_of_prompts,
            slow_s=slow_s,
            silent_s=0.0 if times is None else times.silent_s,
            prefill_share=None if shares is None else shares.prefill,
            decode_share=None if shares is None else shares.decode,
            shares_at=self._models.shares_since(instance),
        )

    def _events(self) -> list[WorkerEvent]:
        """Return the latest changes of workers, the newest first."""
        return [
            WorkerEvent(
                at=change.at,
                id=f"{change.instance.id:x}",
                role=str(change.instance.role),
                model=change.instance.card.name,
                event="registered" if change.is_added else "left",
            )
            for change in islice(reversed(self._models.worker_changes), _MAX_EVENTS)
        ]


def _sums(counts: Sequence[Sequence[int]], size: int) -> list[int]:
    """Return the sums by bucket. Processes of another release may have other buckets."""
    sums = [0] * size
    for of_process in counts:
        if len(of_process) == size:
            sums = [total + count for total, count in zip(sums, of_process, strict=True)]
    return sums


def _urgency(worker: ConsoleWorker) -> tuple[bool, bool, float]:
    """Return a key that sorts workers: first silent workers, then slow workers, then all others."""
    is_silent = worker.silent_s >= health_reasons.SILENT_S
    is_slow = worker.slow_ratio is not None
    return not is_silent, not is_slow, -worker.silent_s


def _known(seconds: Mapping[int, float | None]) -> dict[int, float]:
    return {key: value for key, value in seconds.items() if value is not None}
