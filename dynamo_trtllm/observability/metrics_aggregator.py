"""The numbers of several processes as those of one. Pure: knows no Prometheus library and moves nothing.

Counters and histograms are added up and never go back: what a process that has ended was seen to have counted stays.
Gauges are added up over the processes that live. What tells of an operating system process is not added up: it gets
the name of its process as a label.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

PROCESS_LABEL = "process"
_OF_ONE_PROCESS = "process_"  # cpu seconds, memory, open files, start time
_CUMULATIVE = ("counter", "histogram")


class Sample(msgspec.Struct, frozen=True, array_like=True):
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


class MetricsAggregator:
    """The last numbers that each process reported, and the counters of processes that have ended."""

    def __init__(self) -> None:
        self._last: dict[str, Snapshot] = {}
        self._past: Snapshot = ()

    def update(self, process: str, snapshot: Snapshot) -> None:
        """The newest numbers of a process that lives."""
        self._last[process] = tuple(_label_process(family, process) for family in snapshot)

    def ended(self, process: str) -> None:
        """Its counters stay, its gauges go. Another process may come under the same name."""
        self._past = merged([self._past, [family for family in self._last.pop(process, ()) if _is_cumulative(family)]])

    def total(self) -> Snapshot:
        return merged([*(self._last[name] for name in sorted(self._last)), self._past])


def merged(parts: Iterable[Iterable[Family]]) -> Snapshot:
    """One family of each name, with the sum of the samples that have the same labels, in order of appearance."""
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
