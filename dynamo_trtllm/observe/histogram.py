"""A histogram that counts one observation many times at once, which prometheus_client's own can't."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class WeightedHistogram(Collector):
    """`observe(labels, value, count)`. Used from one thread."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], *, buckets: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._bounds = tuple(buckets)
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def observe(self, labels: tuple[str, ...], value: float, count: int = 1) -> None:
        """`value` was seen `count` times."""
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
            self._sums[labels] = 0.0
        counts[bisect.bisect_left(self._bounds, value)] += count
        self._sums[labels] += value * count

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._documentation, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for labels, counts in self._counts.items():
            total = 0
            buckets: list[tuple[str, float]] = []
            for bound, number in zip([*map(str, self._bounds), "+Inf"], counts, strict=True):
                total += number
                buckets.append((bound, total))
            family.add_metric(labels, buckets, self._sums[labels])
        yield family
