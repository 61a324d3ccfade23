"""Prometheus metrics: one table of names, one registry per process. Observed per step or request, never per token.

Label values come from a small closed set (served models, error codes): never put what a client sent into one.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.core import Metric as Collected
from prometheus_client.registry import Collector

from dynamo_trtllm.messages import PhaseTimings
from dynamo_trtllm.observability.metrics_aggregator import Family, Sample, Snapshot


class HistogramChild:
    """What was observed with one set of labels."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int) -> None:
        """`value` was seen `count` times."""
        self.counts[bisect.bisect_left(self._bounds, value)] += count
        self.sum += value * count


class WeightedHistogram(Collector):
    """`child(labels)` is observed, not the histogram. Used from one thread."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], *, buckets: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._bounds = tuple(buckets)
        self._cells: dict[tuple[str, ...], HistogramChild] = {}

    def child(self, labels: tuple[str, ...]) -> HistogramChild:
        """The same one whenever the labels are."""
        found = self._cells.get(labels)
        if found is None:
            found = self._cells[labels] = HistogramChild(self._bounds)
        return found

    def describe(self) -> Iterator[Collected]:
        yield HistogramMetricFamily(self._name, self._documentation, labels=self._labels)

    def collect(self) -> Iterator[Collected]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for labels, child in self._cells.items():
            total = 0
            buckets: list[tuple[str, float]] = []
            for bound, number in zip([*map(str, self._bounds), "+Inf"], child.counts, strict=True):
                total += number
                buckets.append((bound, total))
            family.add_metric(labels, buckets, child.sum)
        yield family


PREFIX = "dynamo_trtllm_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Kind = Literal["counter", "gauge", "histogram", "weighted"]
Process = Literal["frontend", "worker"]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. Counters get Prometheus' `_total` from their name."""

    process: Process
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS


TABLE = (
    Metric("frontend", "requests_total", "counter", "finished HTTP requests", ("model", "endpoint", "code")),
    Metric("frontend", "inflight", "gauge", "HTTP requests being served, those that wait included"),
    Metric("frontend", "choices", "gauge", "choices being generated, of at most --max-inflight"),
    Metric("frontend", "queued", "gauge", "requests that wait for their turn, of at most --max-queued"),
    Metric("frontend", "body_bytes", "gauge", "request bodies being received or parsed, of --max-total-body-bytes"),
    Metric("frontend", "queue_seconds", "histogram", "that requests waited for their turn in the frontend"),
    Metric("frontend", "ttft_seconds", "histogram", "from request to first token", ("model",)),
    Metric("frontend", "itl_seconds", "weighted", "between two tokens of a request", ("model",), STEP_SECONDS),
    Metric("frontend", "request_seconds", "histogram", "from request to last byte", ("model",)),
    Metric("frontend", "prompt_tokens_total", "counter", "tokens of rendered prompts", ("model",)),
    Metric("frontend", "output_tokens_total", "counter", "tokens generated", ("model",)),
    Metric("frontend", "phase_seconds", "histogram", "queue, prefill, handoff, decode_wait", ("model", "phase")),
    Metric("frontend", "kv_bytes_total", "counter", "KV moved from prefill to decode", ("transport",)),
    Metric("frontend", "retries_total", "counter", "calls retried before the first token", ("model",)),
    Metric("frontend", "migrations_total", "counter", "requests migrated after the first token", ("model",)),
    Metric("frontend", "canaries_total", "counter", "canaries through idle pairs by outcome", ("model", "code")),
    Metric("frontend", "responses_not_stored_total", "counter", "responses that could not be stored", ("code",)),
    Metric("worker", "requests_total", "counter", "finished calls", ("phase", "code")),
    Metric("worker", "output_tokens_total", "counter", "tokens generated", ("phase",)),
    Metric("worker", "running", "gauge", "requests in the batch"),
    Metric("worker", "waiting", "gauge", "requests that wait for KV blocks or a slot"),
    Metric("worker", "kv_blocks_used", "gauge", "KV blocks in use, those under a ticket included"),
    Metric("worker", "kv_blocks_total", "gauge", "KV blocks there are"),
    Metric("worker", "tickets_held", "gauge", "hand-offs not yet released"),
    Metric("worker", "ticket_kv_blocks", "gauge", "KV blocks that hand-offs not yet released hold"),
    Metric("worker", "kv_checksum_mismatches_total", "counter", "KV fetches whose checksum was wrong; none was used"),
    Metric("worker", "legs", "gauge", "requests taken, those that wait in the engine included"),
    Metric("worker", "reserved", "gauge", "decode slots reserved while another worker processes the prompt"),
)


class EngineSnapshot(Protocol):
    """What an engine tells of itself at a scrape."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def kv_blocks_used(self) -> int: ...
    @property
    def kv_blocks_total(self) -> int: ...
    @property
    def tickets_held(self) -> int: ...
    @property
    def ticket_kv_blocks(self) -> int: ...
    @property
    def kv_checksum_mismatches(self) -> int: ...


_SNAPSHOT = ("running", "waiting", "kv_blocks_used", "kv_blocks_total", "tickets_held", "ticket_kv_blocks")


def _build(process: Process, registry: CollectorRegistry) -> dict[str, Any]:
    # Without this, each counter also exports the time at which it was created.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    made: dict[str, Any] = {}
    for row in TABLE:
        if row.process != process:
            continue
        name = PREFIX + row.name
        if row.kind == "counter":
            made[row.name] = Counter(name, row.help, row.labels, registry=registry)
        elif row.kind == "gauge":
            made[row.name] = Gauge(name, row.help, row.labels, registry=registry)
        elif row.kind == "histogram":
            made[row.name] = Histogram(name, row.help, row.labels, buckets=row.buckets, registry=registry)
        else:
            made[row.name] = WeightedHistogram(name, row.help, row.labels, buckets=row.buckets)
            registry.register(made[row.name])
    ProcessCollector(registry=registry)
    return made


class _Taken(Collector):
    """A snapshot, to be written as text."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Collected]:
        for family in self._snapshot:
            collected = Collected(family.name, family.help, family.kind)
            for sample in family.samples:
                collected.add_sample(sample.name, dict(sample.labels), sample.value)
            yield collected


class FrontendMetrics:
    """A frontend's numbers. `model` is always a served model's name, or "" when the request named none."""

    def __init__(self) -> None:
        self.gather: Callable[[], Awaitable[Snapshot]] | None = None  # the numbers of all processes of this frontend
        self._registry = CollectorRegistry()
        self._metrics = _build("frontend", self._registry)
        self._labelled = functools.cache(self._child)  # the values of labels are few; prometheus_client looks up slowly

    def _child(self, name: str, *labels: str) -> Any:
        return self._metrics[name].labels(*labels)

    def request_started(self) -> None:
        self._metrics["inflight"].inc()

    def request_finished(self, *, model: str, endpoint: str, code: str, seconds: float) -> None:
        """Once for each `request_started`. `code`: "ok", "cancelled" or an error's code."""
        self._metrics["inflight"].dec()
        self._labelled("requests_total", model, endpoint, code).inc()
        self._labelled("request_seconds", model).observe(seconds)

    def watch(
        self, *, choices: Callable[[], float], queued: Callable[[], float], body_bytes: Callable[[], float]
    ) -> None:
        """All are called at each scrape."""
        self._metrics["choices"].set_function(choices)
        self._metrics["body_bytes"].set_function(body_bytes)
        self._metrics["queued"].set_function(queued)

    def observe_queue(self, *, seconds: float) -> None:
        """Of one request, when its turn came or it left."""
        self._metrics["queue_seconds"].observe(seconds)

    def observe_tokens(self, *, model: str, prompt: int, output: int) -> None:
        """The tokens of one request, when it ends."""
        self._labelled("prompt_tokens_total", model).inc(prompt)
        self._labelled("output_tokens_total", model).inc(output)

    def observe_recovery(self, *, model: str, retries: int, migrations: int) -> None:
        """What one request needed, when it ends."""
        self._labelled("retries_total", model).inc(retries)
        self._labelled("migrations_total", model).inc(migrations)

    def probe_finished(self, *, model: str, code: str) -> None:
        """`code`: "ok", "inconclusive" (no fault found, but the check is incomplete), "mismatch" (other tokens than a
        worker alone gives: wrong KV), "canary" (too few tokens, too late, no KV read), "gone", or an error's code."""
        self._labelled("canaries_total", model, code).inc()

    def response_not_stored(self, code: str) -> None:
        """`code`: of the error that kept a finished response out of the store."""
        self._labelled("responses_not_stored_total", code).inc()

    def observe_ttft(self, *, model: str, seconds: float) -> None:
        self._labelled("ttft_seconds", model).observe(seconds)

    def itl(self, *, model: str) -> HistogramChild:
        """For the seconds between two tokens of a request, with how many were that far apart."""
        child: HistogramChild = self._metrics["itl_seconds"].child((model,))
        return child

    def observe_call(self, *, model: str, stats: PhaseTimings) -> None:
        """Observe the time of one call in each phase; phases that took no time were not part of it."""
        phases: Sequence[tuple[str, float]] = (
            ("queue", stats.queue_s),
            ("prefill", stats.prefill_s),
            ("handoff", stats.kv_transfer_s),
            ("decode_wait", stats.decode_queue_s),
        )
        for phase, seconds in phases:
            if seconds > 0:
                self._labelled("phase_seconds", model, phase).observe(seconds)
        if stats.kv_bytes and stats.kv_transfer_s > 0:
            self._labelled("kv_bytes_total", stats.transport).inc(stats.kv_bytes)

    def snapshot(self) -> Snapshot:
        """This process's numbers now."""
        return tuple(
            Family(
                family.name,
                family.documentation,
                family.type,
                tuple(Sample(each.name, tuple(each.labels.items()), each.value) for each in family.samples),
            )
            for family in self._registry.collect()
        )

    def render(self) -> bytes:
        """This process's numbers in the Prometheus text format, of type CONTENT_TYPE."""
        return generate_latest(self._registry)

    async def render_all(self) -> bytes:
        """As `render`, of all processes of this frontend. Raises as `gather`."""
        return self.render() if self.gather is None else generate_latest(_Taken(await self.gather()))


class WorkerMetrics:
    """A worker's numbers."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._metrics = _build("worker", self._registry)
        self._mismatches = 0  # of the engine's, those that were counted

    def call_finished(self, *, phase: str, code: str, output_tokens: int) -> None:
        """Count a call that ended. `code`: "ok", "cancelled" or an error's code."""
        self._metrics["requests_total"].labels(phase, code).inc()
        self._metrics["output_tokens_total"].labels(phase).inc(output_tokens)

    def watch(self, *, active: Callable[[], float], reserved: Callable[[], float]) -> None:
        """Both are called at each scrape."""
        self._metrics["legs"].set_function(active)
        self._metrics["reserved"].set_function(reserved)

    def render(self, engine: EngineSnapshot | None = None) -> bytes:
        """The Prometheus text format, of type CONTENT_TYPE. `engine`: taken now; None keeps the last one."""
        if engine is not None:
            for name in _SNAPSHOT:
                self._metrics[name].set(getattr(engine, name))
            self._metrics["kv_checksum_mismatches_total"].inc(engine.kv_checksum_mismatches - self._mismatches)
            self._mismatches = engine.kv_checksum_mismatches
        return generate_latest(self._registry)
