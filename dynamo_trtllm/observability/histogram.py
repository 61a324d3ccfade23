"""A histogram that counts one observation many times at once, which prometheus_client's own can't."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


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
    """`cell(labels)` is observed, not the histogram. Used from one thread."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], *, buckets: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._bounds = tuple(buckets)
        self._cells: dict[tuple[str, ...], HistogramChild] = {}

    def cell(self, labels: tuple[str, ...]) -> HistogramChild:
        """The same one whenever the labels are."""
        found = self._cells.get(labels)
        if found is None:
            found = self._cells[labels] = HistogramChild(self._bounds)
        return found

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._documentation, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for labels, cell in self._cells.items():
            total = 0
            buckets: list[tuple[str, float]] = []
            for bound, number in zip([*map(str, self._bounds), "+Inf"], cell.counts, strict=True):
                total += number
                buckets.append((bound, total))
            family.add_metric(labels, buckets, cell.sum)
        yield family
