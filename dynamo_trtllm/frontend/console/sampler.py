"""Sample what this process does, once a second while a console is open at any frontend."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field
from operator import sub

from dynamo_trtllm.frontend.console.activity import MAX_SENT_REQUESTS, RequestActivity
from dynamo_trtllm.frontend.requests.concurrency_limiter import ConcurrencyLimiter
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.protocol.frontend_samples import FrontendSample

TTFT = "ttft_seconds"
GAPS = "itl_seconds"


@dataclass(eq=False)
class ProcessSampler:
    """The samples of this process.

    Args:
        activity: counts what the requests of this process do.
        metrics: the metrics of this process.
        limiter: has the requests that wait.
    """

    _activity: RequestActivity
    _metrics: FrontendMetrics
    _limiter: ConcurrencyLimiter
    process: int = field(init=False)  # a random number, which no other process has
    name: str = field(init=False)
    _number: int = field(default=0, init=False)  # the number of samples since `begin`
    # The observations in each bucket at the last sample, by the name of the histogram.
    _counts: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.process = secrets.randbits(62) + 1
        # A container counts its own process ids, so the host is needed, too.
        self.name = f"frontend {os.getpid()}@{socket.gethostname()}"

    def begin(self) -> None:
        """Count from now on."""
        self._number = 0
        self._activity.begin()
        for name in (TTFT, GAPS):
            self._new_counts(name)

    def stop(self) -> None:
        """Count nothing any more."""
        self._activity.stop()

    def sample(self, interval_s: float, *, has_readers: bool) -> FrontendSample:
        """Return what happened since the last sample, or since `begin`.

        Args:
            interval_s: seconds since the last sample, or since `begin`.
            has_readers: a console is open at this process.
        """
        activity = self._activity.take()
        self._number += 1
        rows = activity.requests
        if self._number == 1:
            # A console has just opened. It also shows requests that ended before.
            rows = self._activity.latest()[-2 * MAX_SENT_REQUESTS :]
        return FrontendSample(
            process=self.process,
            name=self.name,
            number=self._number,
            has_readers=has_readers,
            interval_s=interval_s,
            inflight=self._metrics.num_inflight,
            queued=self._limiter.queued,
            codes=activity.codes,
            ttft_counts=self._new_counts(TTFT),
            gap_counts=self._new_counts(GAPS),
            workers=activity.workers,
            requests=rows,
        )

    def _new_counts(self, name: str) -> tuple[int, ...]:
        """Return the observations of a histogram by bucket, since the last call."""
        counts = self._metrics.bucket_counts(name)
        before = self._counts.get(name, (0,) * len(counts))
        self._counts[name] = counts
        return tuple(map(sub, counts, before))
