"""Define the Prometheus metrics of frontends and workers, and collect and render them.

Metrics are observed for each step or request, but not for each token. A label has only few possible
values. Clients can't choose them: even the names of API keys are chosen by the operator.
"""

from __future__ import annotations

import functools
import heapq
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.core import Metric as Collected
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from dynamo_trtllm.observability.outputs import OUTPUTS
from dynamo_trtllm.protocol.cost_model import CostModel
from dynamo_trtllm.protocol.messages import PhaseTimings
from dynamo_trtllm.protocol.phases import PHASES, PhaseSeconds
from dynamo_trtllm.protocol.shares import Shares

_PHASES = frozenset(PHASES)
_OBSERVED_TOGETHER = 64  # so many requests are observed together, see `observe_phases`


class HistogramChild:
    """The observations of a `Histogram` with one set of labels."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` observations of `value`."""
        self.counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count


class Histogram(Collector):
    """A histogram. Observe values with `labels(...).observe`, on one thread.

    An observation takes a tenth of the time that the histogram of prometheus_client needs.
    """

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], *, buckets: Sequence[float]
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._bounds = tuple(buckets)
        self._children: dict[tuple[str, ...], HistogramChild] = {}
        if not labels:
            self.labels()  # so that the histogram is shown before the first observation, too

    def labels(self, *values: object) -> HistogramChild:
        """Return the child of these label values. Create it at the first call."""
        texts = tuple(map(str, values))
        child = self._children.get(texts)
        if child is None:
            child = HistogramChild(self._bounds)
            self._children[texts] = child
        return child

    def bucket_counts(self) -> tuple[int, ...]:
        """Return the observations by bucket, of all label values together."""
        counts = [child.counts for child in self._children.values()]
        if not counts:
            return (0,) * (len(self._bounds) + 1)
        return tuple(map(sum, zip(*counts, strict=True)))

    def collect(self) -> Iterator[Collected]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        bounds = [*map(str, self._bounds), "+Inf"]
        for values, child in self._children.items():
            total = 0
            buckets: list[tuple[str, float]] = []
            for bound, number in zip(bounds, child.counts, strict=True):
                total += number
                buckets.append((bound, total))
            family.add_metric(values, buckets, child.sum)
        yield family


PREFIX = "dynamo_trtllm_"
MAX_WORKERS = 256  # most workers that have a label of their own
MAX_KEYS = 256  # most API keys that have a label of their own
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Kind = Literal["counter", "gauge", "histogram"]
Process = Literal["frontend", "worker", "planner"]

_BUCKETS = {
    "seconds": (
        0.001,
        0.0025,
        0.005,
        0.01,
        0.025,
        0.05,
        0.1,
        0.25,
        0.5,
        1.0,
        2.5,
        5.0,
        10.0,
        30.0,
        60.0,
        120.0,
        300.0,
    ),
    "ratios": (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, 2.0, 5.0),
    "step_seconds": (
        0.001,
        0.0025,
        0.005,
        0.0075,
        0.01,
        0.015,
        0.02,
        0.03,
        0.05,
        0.075,
        0.1,
        0.2,
        0.5,
        1.0,
        5.0,
    ),
    # From 64 KiB, the KV of one block of a small model, to 16 GiB. Each bound is four times the
    # bound before.
    "bytes": tuple(float(1 << exponent) for exponent in range(16, 35, 2)),
    # From 1 MB/s to 1 TB/s. A path through host memory has less than 1 GB/s, a network card 10 to
    # 50 GB/s, and NVLink hundreds of GB/s.
    "rates": (1e6, 3e6, 1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11, 3e11, 1e12),
}


_MAX_FIELDS = 100  # most ignored fields that are counted by their name


class Metric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of metrics.json. The exported name is PREFIX plus `name`; `help` is its help text.

    `meaning` is a longer text in Markdown, which docs/reference-metrics.md shows instead of `help`.
    """

    process: Process
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: Literal["seconds", "ratios", "step_seconds", "bytes", "rates"] = "seconds"
    meaning: str = ""


TABLE = msgspec.json.decode(
    Path(__file__).with_name("metrics.json").read_bytes(), type=tuple[Metric, ...]
)


class ClientLoad(NamedTuple):
    """How much of the workers one client uses, at one process of a frontend."""

    weight: float  # the share of the client, relative to the shares of others
    tokens: int  # tokens of the last minute, as they count for shares
    waiting: int  # number of requests that wait
    running: int  # number of choices that run


def read_client_loads(page: str) -> dict[str, ClientLoad]:
    """Read how much each API key uses, by name, from the metrics page of a frontend."""
    prefix = f"{PREFIX}key_"
    lines = [line for line in page.split("\n") if line.startswith(prefix)]
    loads: dict[str, ClientLoad] = {}
    values: dict[tuple[str, str], int] = {}  # the values, by metric and key
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            key = sample.labels["key"]
            values[sample.name.removeprefix(prefix), key] = int(sample.value)
            # Only samples of `key_tokens_last_minute` have this label.
            if "weight" in sample.labels:
                loads[key] = ClientLoad(float(sample.labels["weight"]), int(sample.value), 0, 0)
    return {
        key: load._replace(
            waiting=values.get(("waiting", key), 0), running=values.get(("running", key), 0)
        )
        for key, load in loads.items()
    }


class LearnedCosts(NamedTuple):
    """What a worker has learned of one kind of time."""

    num_samples: int  # 0: the worker has learned nothing, so the coefficients are its prior
    coefficients: dict[str, float]  # seconds, by term


def read_costs(page: str) -> dict[str, LearnedCosts]:
    """Read what a worker has learned, by kind of time, from its metrics page."""
    prefix = f"{PREFIX}cost_s"  # the prefix of `cost_samples` and `cost_seconds`
    lines = [line for line in page.split("\n") if line.startswith(prefix)]
    costs: dict[str, LearnedCosts] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            kind = sample.labels["kind"]
            learned = costs.get(kind, LearnedCosts(0, {}))
            if "term" in sample.labels:  # a sample of `cost_seconds`
                learned.coefficients[sample.labels["term"]] = float(sample.value)
            else:
                learned = learned._replace(num_samples=int(sample.value))
            costs[kind] = learned
    return costs


def bucket_bounds(process: Process, name: str) -> tuple[float, ...]:
    """Return the upper bounds of the buckets of a histogram. The last bucket has no bound."""
    rows = [row for row in TABLE if row.process == process and row.name == name]
    return _BUCKETS[rows[0].buckets]


class ProcessMetrics:
    """Metrics of one process, as metrics.json defines them."""

    def __init__(self, process: Process) -> None:
        # Without this, each counter also exports the time at which it was created.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        for row in TABLE:
            if row.process == process:
                self._metrics[row.name] = self._register(row)
        ProcessCollector(registry=self._registry)
        # The number of dropped lines that the metric includes.
        self._num_dropped_lines = OUTPUTS.num_dropped_lines
        # Returns the child of a metric by its name and label values. It has a cache, because
        # prometheus_client takes long to find a child.
        self.child: Callable[..., Any] = functools.cache(self._find_child)

    def _register(self, row: Metric) -> Any:
        """Create a metric, and add it to the registry."""
        name = PREFIX + row.name
        if row.kind == "histogram":
            histogram = Histogram(name, row.help, row.labels, buckets=_BUCKETS[row.buckets])
            self._registry.register(histogram)
            return histogram
        kind = Counter if row.kind == "counter" else Gauge
        return kind(name, row.help, row.labels, registry=self._registry)

    def _find_child(self, name: str, *labels: str) -> Any:
        return self._metrics[name].labels(*labels)

    def count(self, name: str, label: str) -> None:
        """Count an event in a metric with one label. `label` is the value of the label."""
        self.child(name, label).inc()

    def message_unreadable(self) -> None:
        """Count a message of the request plane that could not be read."""
        self._metrics["unreadable_messages_total"].inc()

    def render(self) -> bytes:
        """Return the metrics of this process in the Prometheus text format (CONTENT_TYPE)."""
        num_dropped_lines = OUTPUTS.num_dropped_lines
        self._metrics["dropped_log_lines_total"].inc(num_dropped_lines - self._num_dropped_lines)
        self._num_dropped_lines = num_dropped_lines
        return generate_latest(self._registry)

    def watch(self, **gauges: Callable[[], float]) -> None:
        """Set the functions that return the value of each gauge at a scrape."""
        for name, read in gauges.items():
            self._metrics[name].set_function(read)


class FrontendMetrics(ProcessMetrics):
    """Metrics of a frontend process.

    `model` is the name of a served model, or "" if the request named none.
    """

    def __init__(self) -> None:
        super().__init__("frontend")
        # Returns the page of all processes of this frontend. None: there is only this process.
        self.gather: Callable[[], Awaitable[bytes]] | None = None
        # The gauges that have a value for each worker, by name. Each function returns the values by
        # instance id.
        self.by_worker: dict[str, Callable[[], Mapping[int, int]]] = {}
        # Returns the shares of elastic workers, by instance id.
        self.shares: Callable[[], Mapping[int, Shares]] = dict
        # Returns the load of API keys, by name.
        self.by_key: Callable[[], Mapping[str, ClientLoad]] = dict
        self._num_inflight = 0
        # The models and phases of requests that are not observed yet.
        self._unobserved: list[tuple[str, PhaseSeconds]] = []
        self._fields: set[str] = set()  # the names of ignored fields that have a counter
        self.watch(inflight=self._read_inflight)

    def _read_inflight(self) -> float:
        return self._num_inflight

    @property
    def num_inflight(self) -> int:
        """The number of requests in progress, including queued ones."""
        return self._num_inflight

    def bucket_counts(self, name: str) -> tuple[int, ...]:
        """Return the observations of a histogram by bucket, of all label values together."""
        histogram: Histogram = self._metrics[name]
        return histogram.bucket_counts()

    def request_started(self) -> None:
        """Count a request in progress."""
        self._num_inflight += 1

    def request_finished(self, *, model: str, endpoint: str, code: str, seconds: float) -> None:
        """Count a finished request, once for each `request_started`.

        `code` is "ok", "cancelled" or the code of an error.
        """
        self._num_inflight -= 1
        self.child("requests_total", model, endpoint, code).inc()
        self.child("request_seconds", model).observe(seconds)

    def probe_finished(self, *, model: str, code: str) -> None:
        """Count a probe of a worker pair.

        `code` is one of these, or the code of an error:
            ok: the tokens are right.
            mismatch: the tokens differ from those of the decode worker alone, so the KV is wrong.
            failed: there were too few tokens, or they came too late, or no KV was read.
            gone: a worker of the pair has left.
        """
        self.child("probes_total", model, code).inc()

    def field_ignored(self, name: str) -> None:
        """Count a request with an ignored field.

        Clients choose the names of fields. So only the first _MAX_FIELDS names have a counter, and
        further fields are counted as "other".
        """
        if len(self._fields) < _MAX_FIELDS:
            self._fields.add(name)
        self.child("ignored_fields_total", name if name in self._fields else "other").inc()

    def kv_collected(self, outcome: str) -> None:
        """Count a collection of the KV of a cancelled request.

        `KvCollector` describes the outcomes.
        """
        self.child("kv_collections_total", outcome).inc()

    def query_of_death(self, outcome: str) -> None:
        """Count a request that ends workers. `outcome` is "given_up" or "rejected"."""
        self.child("queries_of_death_total", outcome).inc()

    def traces_dropped(self, count: int) -> None:
        """Count traces that were not sent."""
        self._metrics["dropped_traces_total"].inc(count)

    def observe_phases(self, *, model: str, phases: PhaseSeconds) -> None:
        """Observe the phases of one request.

        A phase that only a newer worker knows has the label "unknown".

        Requests are collected and observed together. This takes less time, because the caches of
        the CPU still have the code and data from the last request.
        """
        self._unobserved.append((model, phases))
        if len(self._unobserved) >= _OBSERVED_TOGETHER:
            self._observe_all()

    def _observe_all(self) -> None:
        for model, phases in self._unobserved:
            for (role, phase), seconds in phases.items():
                known = phase if phase in _PHASES else "unknown"
                self.child("phase_seconds", model, role, known).observe(seconds)
        self._unobserved.clear()

    def render(self) -> bytes:
        """Return the metrics of this process.

        If there are more than MAX_WORKERS workers, those with the highest values have gauges. If
        there are more than MAX_KEYS keys, those with the most tokens have gauges.
        """
        self._observe_all()
        for name, read in self.by_worker.items():
            gauge = self._metrics[name]
            values = read()
            gauge.clear()  # so that the values of workers that are gone disappear
            for instance_id in heapq.nlargest(MAX_WORKERS, values, key=values.__getitem__):
                gauge.labels(f"{instance_id:x}").set(values[instance_id])
        self._set_shares()
        self._set_keys()
        return super().render()

    def _set_shares(self) -> None:
        """Set the gauges of the shares of elastic workers."""
        shares = self.shares()
        gauge = self._metrics["worker_share"]
        gauge.clear()  # so that the values of workers that are gone disappear

        def total(instance_id: int) -> float:
            return shares[instance_id].prefill + shares[instance_id].decode

        for instance_id in heapq.nlargest(MAX_WORKERS, shares, key=total):
            name = f"{instance_id:x}"
            gauge.labels(name, "prefill").set(shares[instance_id].prefill)
            gauge.labels(name, "decode").set(shares[instance_id].decode)

    def _set_keys(self) -> None:
        """Set the gauges by key.

        The weight of a key is a label. As a value, it would be summed over several processes.
        """
        loads = self.by_key()
        tokens = self._metrics["key_tokens_last_minute"]
        waiting = self._metrics["key_waiting"]
        running = self._metrics["key_running"]
        for gauge in (tokens, waiting, running):
            gauge.clear()  # so that keys that use nothing any more disappear
        for name in heapq.nlargest(MAX_KEYS, loads, key=lambda name: loads[name].tokens):
            load = loads[name]
            tokens.labels(name, f"{load.weight:g}").set(load.tokens)
            waiting.labels(name).set(load.waiting)
            running.labels(name).set(load.running)

    async def render_all(self) -> bytes:
        """Return the metrics of all processes of this frontend like `render`.

        Raises the errors of `gather`.
        """
        if self.gather is None:
            return self.render()
        return await self.gather()


# The statistics of an engine that never fall. Their metrics are counters, whose names end with
# "_total".
_GROWING = frozenset({"kv_checksum_mismatches", "kv_event_gaps", "kv_events_unreadable"})


class WorkerMetrics(ProcessMetrics):
    """Metrics of a worker process."""

    def __init__(self) -> None:
        super().__init__("worker")
        self._counted = dict.fromkeys(_GROWING, 0)  # the counts of the engine at the last scrape

    def observe_prediction(self, kind: str, ratio: float, is_covered: bool) -> None:
        """Observe the ratio of a measured time to the predicted time.

        `is_covered` is True if the measured time was within the predicted interval.
        """
        outcome = "within" if is_covered else "outside"
        self.child("time_ratio", kind).observe(ratio)
        self.child("predictions_total", kind, outcome).inc()

    def observe_transfer(self, timings: PhaseTimings) -> None:
        """Observe the KV transfer of a decode call, if its time was measured."""
        seconds = timings.kv_transfer_s
        transport = timings.transport
        if not (seconds > 0 and timings.kv_bytes > 0):
            return
        self.child("kv_transfer_seconds", transport).observe(seconds)
        self.child("kv_transfer_bytes", transport).observe(timings.kv_bytes)
        self.child("kv_transfer_bytes_per_second", transport).observe(timings.kv_bytes / seconds)

    def transfer_rejected(self, reason: str) -> None:
        """Count a rejected KV transfer. `reason` is a `kv_transfer.rejections.Rejection`."""
        self.child("rejected_kv_transfers_total", reason).inc()

    def key_reload_failed(self) -> None:
        """Count a changed file of KV transfer keys that could not be read."""
        self._metrics["kv_key_reload_failures_total"].inc()

    def set_cost(self, cost: CostModel) -> None:
        """Set the coefficients of the cost model."""
        for kind, (terms, fit) in cost.fits().items():
            if fit is not None:
                self.child("cost_samples", kind).set(fit.num_samples)
                for term, seconds in zip(terms, fit.coefficients, strict=True):
                    self.child("cost_seconds", kind, term).set(seconds)

    def render(self, engine: Mapping[str, int] | None = None) -> bytes:
        """Return the metrics as `ProcessMetrics.render` does, with statistics of the engine.

        `engine` has the statistics by name. None: the statistics stay as they are.
        """
        for name, value in (engine or {}).items():
            if name in _GROWING:
                self._metrics[f"{name}_total"].inc(value - self._counted[name])
                self._counted[name] = value
            else:
                self._metrics[name].set(value)
        return super().render()


# The gauges of a plan. Use `labels` for them, and not `child`: the cache of `child` may return a
# child that `clear` has removed.
_PLAN = ("planner_workers", "planner_wanted_workers", "planner_predicted_seconds")


class PlannerMetrics(ProcessMetrics):
    """Metrics of a planner.

    An autoscaler may follow the gauges, so they have values only while this planner decides.
    """

    def __init__(self) -> None:
        super().__init__("planner")
        # The predicted times of the slowest pool, by model and name of the time.
        self._slowest_s: dict[tuple[str, str], float] = {}

    def set_leader(self, *, is_leader: bool) -> None:
        """Set whether this planner sets the shares."""
        self._metrics["planner_is_leader"].set(is_leader)

    def decided(self, model: str, outcome: str) -> None:
        """Count a decision."""
        self.child("planner_decisions_total", model, outcome).inc()

    def clear_plan(self) -> None:
        """Clear the gauges of the plan.

        This is called when this planner no longer decides. It is also called before each new plan,
        so that models that are gone disappear.
        """
        for name in _PLAN:
            self._metrics[name].clear()
        self._slowest_s.clear()

    def add_workers(
        self, model: str, workers: Mapping[str, int], wanted: Mapping[str, int]
    ) -> None:
        """Add the numbers of workers of a pool, by role: the present and the needed workers.

        A model has several pools while workers run that can't transfer KV to each other, for
        example during an update.
        """
        for role, count in workers.items():
            self._metrics["planner_workers"].labels(model, role).inc(count)
        for role, count in wanted.items():
            self._metrics["planner_wanted_workers"].labels(model, role).inc(count)

    def add_predicted(self, model: str, ttft_s: float, itl_s: float) -> None:
        """Add the times that are predicted for a pool with its present shares.

        The gauges show the times of the slowest pool of the model.
        """
        for time, seconds in (("ttft", ttft_s), ("itl", itl_s)):
            slowest_s = max(seconds, self._slowest_s.get((model, time), 0.0))
            self._slowest_s[model, time] = slowest_s
            self._metrics["planner_predicted_seconds"].labels(model, time).set(slowest_s)
