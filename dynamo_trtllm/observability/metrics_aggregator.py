"""Aggregate the metrics of several processes of one frontend.

Counters and histograms are summed and never decrease: the last values of ended processes stay in the sum. Gauges are
summed over running processes. Metrics of an operating system process (`process_*`) are not summed; they get the name of
the process as a label.

The multiprocess mode of prometheus_client does not replace this. It lacks `process_*` and histograms that add
several observations at once, and gauges that are read at the scrape are always 0. Its files also make each observation
about twice as slow: 1.6 instead of 0.7 µs of CPU time for a counter, 3.6 instead of 2.0 µs for a histogram, 48 instead
of 27 µs for all observations of a request (prometheus_client 0.26, Python 3.11). Only a scrape is cheaper: 11 instead
of 22 ms for four processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

PROCESS_LABEL = "process"
_OF_ONE_PROCESS = "process_"  # cpu seconds, memory, open files, start time
_CUMULATIVE = ("counter", "histogram")


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One sample of a metric."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class Family(msgspec.Struct, frozen=True, array_like=True):
    """The samples of one metric."""

    name: str
    help: str
    kind: str
    samples: tuple[Sample, ...]


Snapshot = tuple[Family, ...]


def snapshot_of(registry: CollectorRegistry) -> Snapshot:
    """Return the current metrics of a registry."""
    return tuple(
        Family(
            family.name,
            family.documentation,
            family.type,
            tuple(Sample(each.name, tuple(each.labels.items()), each.value) for each in family.samples),
        )
        for family in registry.collect()
    )


class SnapshotCollector(Collector):
    """Collector of a stored snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        for family in self._snapshot:
            collected = Metric(family.name, family.help, family.kind)
            for sample in family.samples:
                collected.add_sample(sample.name, dict(sample.labels), sample.value)
            yield collected


class MetricsAggregator:
    """Aggregator of the latest metrics of each running process and the counters of ended ones."""

    def __init__(self) -> None:
        self._last: dict[str, Snapshot] = {}
        self._past: Snapshot = ()

    def update(self, process: str, snapshot: Snapshot) -> None:
        """Set the latest metrics of a running process."""
        self._last[process] = tuple(_label_process(family, process) for family in snapshot)

    def ended(self, process: str) -> None:
        """Remove a process. Its counters stay in the sum. A new process may have the same name."""
        self._past = merged([self._past, [family for family in self._last.pop(process, ()) if _is_cumulative(family)]])

    def total(self) -> Snapshot:
        """Return the metrics of all processes."""
        return merged([*(self._last[name] for name in sorted(self._last)), self._past])


def merged(parts: Iterable[Iterable[Family]]) -> Snapshot:
    """Sum the samples with the same name and labels. Return one family per name, in order of appearance."""
    first: dict[str, Family] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for part in parts:
        for family in part:
            first.setdefault(family.name, family)
            samples = sums.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, sample.labels)
                samples[key] = samples.get(key, 0.0) + sample.value
    return tuple(
        Family(name, family.help, family.kind, tuple(Sample(*key, value) for key, value in sums[name].items()))
        for name, family in first.items()
    )


def _is_cumulative(family: Family) -> bool:
    return family.kind in _CUMULATIVE and not family.name.startswith(_OF_ONE_PROCESS)


def _label_process(family: Family, process: str) -> Family:
    if not family.name.startswith(_OF_ONE_PROCESS):
        return family
    label = (PROCESS_LABEL, process)
    samples = tuple(Sample(each.name, (*each.labels, label), each.value) for each in family.samples)
    return Family(family.name, family.help, family.kind, samples)


def sum_samples(text: str, prefix: str) -> dict[str, float]:
    """Return the samples of a `/metrics` page by name after `prefix`, each summed over its labels, without buckets."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(prefix) and not sample.name.endswith("_bucket"):
                name = sample.name.removeprefix(prefix)
                sums[name] = sums.get(name, 0.0) + sample.value
    return sums
