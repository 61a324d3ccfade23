"""Compute the rates of frontends that `dynamo-trtllm status --watch` shows, from their metrics."""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from dynamo_trtllm.cli.status_view import DeploymentReport, FrontendRates, ProcessStatus
from dynamo_trtllm.launch.process_specs import FRONTEND
from dynamo_trtllm.observability.metrics import PREFIX

_WINDOW_S: Final = 60.0  # the time for which percentiles are computed
_RATE_S: Final = 10.0  # the time for which tokens and requests per second are computed
_TTFT_BUCKET: Final = re.compile(
    rf'^{PREFIX}ttft_seconds_bucket\{{(?:[^\n]*,)?le="([^"]+)"[^\n]*\}} (\S+)$', re.MULTILINE
)


class _Counters(NamedTuple):
    """The counters of one frontend at one time."""

    at_s: float
    tokens: float
    requests: float
    ttft_buckets: Mapping[float, float]  # as the function `ttft_buckets` returns them


def ttft_buckets(page: str) -> dict[float, float]:
    """Return how many requests had their first token within a time, by this time in seconds.

    `page` is a page of metrics. As in Prometheus, each number includes those of shorter times.
    """
    buckets: defaultdict[float, float] = defaultdict(float)
    for limit, count in _TTFT_BUCKET.findall(page):
        limit_s = math.inf if limit == "+Inf" else float(limit)
        buckets[limit_s] += float(count)
    return dict(buckets)


class RateMeter:
    """The counters of frontends during the last minute."""

    def __init__(self) -> None:
        self._samples: defaultdict[tuple[str, str], deque[_Counters]] = defaultdict(deque)

    def add(self, reports: Iterable[DeploymentReport], now_s: float) -> None:
        """Take the counters of reports. From the second call on, set the rates of their frontends.

        Args:
            reports: the latest reports.
            now_s: the time in seconds on any clock.
        """
        for report in reports:
            for process in report.processes:
                if process.role == FRONTEND and process.load:
                    self._measure(report, process, now_s)

    def _measure(self, report: DeploymentReport, process: ProcessStatus, now_s: float) -> None:
        sample = _Counters(
            at_s=now_s,
            tokens=process.load.get("output_tokens_total", 0.0),
            requests=process.load.get("requests_total", 0.0),
            ttft_buckets=process.ttft_buckets,
        )
        samples = self._samples[report.name or report.url, process.name]
        # If the frontend was started again, its counters began at 0.
        if samples and _began_again(samples[-1], sample):
            samples.clear()
        while samples and samples[0].at_s < now_s - _WINDOW_S:
            samples.popleft()
        if samples:
            # The oldest sample within _RATE_S, or else the latest one.
            recent = next((each for each in samples if _is_recent(each, now_s)), samples[-1])
            seconds = max(now_s - recent.at_s, 1e-3)
            times = _difference(samples[0].ttft_buckets, sample.ttft_buckets)
            process.rates = FrontendRates(
                tokens_per_s=(sample.tokens - recent.tokens) / seconds,
                requests_per_s=(sample.requests - recent.requests) / seconds,
                ttft_p50_s=percentile(times, 0.5),
                ttft_p99_s=percentile(times, 0.99),
            )
        samples.append(sample)


def _began_again(before: _Counters, after: _Counters) -> bool:
    return after.requests < before.requests or after.tokens < before.tokens


def _is_recent(sample: _Counters, now_s: float) -> bool:
    return sample.at_s >= now_s - _RATE_S


def _difference(before: Mapping[float, float], after: Mapping[float, float]) -> dict[float, float]:
    return {limit: count - before.get(limit, 0.0) for limit, count in after.items()}


def percentile(buckets: Mapping[float, float], part: float) -> float | None:
    """Estimate a percentile from a histogram, as Prometheus does: evenly within a bucket.

    Args:
        buckets: cumulative counts by upper limit.
        part: 0.99 for the 99th percentile.

    Returns:
        The percentile, or the largest finite limit if the percentile is higher. None: there are no
        observations.
    """
    limits = sorted(buckets)
    total = buckets[limits[-1]] if limits else 0.0
    if total <= 0:
        return None
    wanted = part * total
    lower = 0.0
    below = 0.0
    for limit in limits:
        count = buckets[limit]
        if count >= wanted:
            if math.isinf(limit):
                return lower
            return lower + (limit - lower) * (wanted - below) / (count - below)
        lower = limit
        below = count
    return lower
