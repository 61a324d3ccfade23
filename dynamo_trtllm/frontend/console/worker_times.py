"""Keep how long workers and pairs took lately, and find the workers that are slow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from dynamo_trtllm.protocol.frontend_samples import RequestRow, WorkerProgress
from dynamo_trtllm.protocol.messages import Role

# How much of a measurement's weight is left after a second. After ten seconds, half of it is left.
_KEPT_SHARE: Final = 0.5**0.1
# A mean is shown only if the weights of its tokens or transfers have at least this sum. Otherwise,
# there are too few of them, or all are old.
_LEAST_TOKENS: Final = 2.0
_LEAST_TRANSFERS: Final = 0.02
# A worker is slow if its time is this many times the median of the other workers of its role.
SLOW_RATIO: Final = 1.5
_NOTICED_S: Final = 0.001  # per output token: clients do not notice smaller differences
# The phases in which a decode worker generates tokens. After an early first token, the phases of
# the KV transfer come before these phases, and do not count.
_DECODE_PHASES: Final = ("decode_wait", "decode")


@dataclass(slots=True)
class RecentMean:
    """A mean in which older values count less. `add` takes a sum of values, and their number."""

    total: float = 0.0
    count: float = 0.0

    def add(self, total: float, count: float) -> None:
        self.total += total
        self.count += count

    def age(self) -> None:
        """Let a second pass."""
        self.total *= _KEPT_SHARE
        self.count *= _KEPT_SHARE

    def mean(self, least_count: float) -> float | None:
        """Return the mean; None if there are too few values, or only old ones."""
        return self.total / self.count if self.count >= least_count else None


@dataclass(slots=True)
class WorkerTimes:
    """What one worker took lately, as the clients of the frontends see it."""

    token: RecentMean = field(default_factory=RecentMean)  # seconds per output token
    prompt: RecentMean = field(default_factory=RecentMean)  # seconds per computed prompt token
    tokens_per_s: float = 0.0  # in the last second
    streams: int = 0
    silent_s: float = 0.0  # for how long no token of a running stream came


@dataclass(slots=True)
class TransferTimes:
    """The KV transfers of one pair lately."""

    rate: RecentMean = field(default_factory=RecentMean)  # bytes, and the seconds that they took
    transfers: RecentMean = field(default_factory=RecentMean)  # only its `count` is used


@dataclass(eq=False)
class RecentTimes:
    """The times of all workers and pairs."""

    workers: dict[int, WorkerTimes] = field(default_factory=dict)
    pairs: dict[tuple[int, int], TransferTimes] = field(default_factory=dict)

    def age(self) -> None:
        """Let a second pass, before the samples of that second are added."""
        for worker in self.workers.values():
            worker.token.age()
            worker.prompt.age()
            worker.tokens_per_s = 0.0
            worker.streams = 0
            worker.silent_s = 0.0
        for pair in self.pairs.values():
            pair.rate.age()
            pair.transfers.age()

    def keep_only(self, ids: Iterable[int]) -> None:
        """Drop the workers that are gone, and their pairs."""
        known = set(ids)
        self.workers = {key: times for key, times in self.workers.items() if key in known}
        self.pairs = {pair: times for pair, times in self.pairs.items() if known.issuperset(pair)}

    def add_progress(self, progress: WorkerProgress, interval_s: float) -> None:
        """Add what the streams of one process did on a worker."""
        worker = self._worker(progress.instance_id)
        worker.token.add(progress.gap_s, progress.num_gaps)
        worker.tokens_per_s += progress.tokens / interval_s
        worker.streams += progress.streams
        worker.silent_s = max(worker.silent_s, progress.silent_s)

    def add_request(self, row: RequestRow, *, with_tokens: bool) -> None:
        """Add a request that has ended.

        Args:
            row: the request. It is left out if several workers of a role ran it.
            with_tokens: add its tokens, because they were not counted while they came.
        """
        prefill = _single_id(row.prefill)
        decode = _single_id(row.decode)
        computed = row.prompt_tokens - row.cached_tokens
        for role, phase, seconds in row.phases:
            if phase != "prefill" or computed <= 0:
                continue
            instance_id = prefill if role == Role.PREFILL else decode
            if instance_id is not None:
                self._worker(instance_id).prompt.add(seconds, computed)
        if with_tokens and decode is not None and row.first_token_s is not None:
            gaps_s = sum(seconds for _, phase, seconds in row.phases if phase in _DECODE_PHASES)
            self._worker(decode).token.add(gaps_s, max(0, row.output_tokens - 1))
        if prefill is not None and decode is not None and row.kv_transfer_s > 0:
            times = self.pairs.setdefault((prefill, decode), TransferTimes())
            times.rate.add(row.kv_bytes, row.kv_transfer_s)
            times.transfers.add(1.0, 1.0)

    def _worker(self, instance_id: int) -> WorkerTimes:
        times = self.workers.get(instance_id)
        if times is None:
            times = WorkerTimes()
            self.workers[instance_id] = times
        return times

    def token_s(self, instance_id: int) -> float | None:
        """Return the seconds per output token of a worker; None: it generated none lately."""
        times = self.workers.get(instance_id)
        return None if times is None else times.token.mean(_LEAST_TOKENS)

    def prompt_token_s(self, instance_id: int) -> float | None:
        """Return the seconds per prompt token of a worker; None: it computed none lately."""
        times = self.workers.get(instance_id)
        return None if times is None else times.prompt.mean(_LEAST_TOKENS)

    def bytes_per_s(self, pair: tuple[int, int]) -> float | None:
        """Return the bytes of KV per second of transfer time; None: no KV was sent lately."""
        times = self.pairs.get(pair)
        if times is None or times.transfers.count < _LEAST_TRANSFERS or times.rate.count <= 0:
            return None
        return times.rate.total / times.rate.count


def slow_ratios(seconds: Mapping[int, float], least_s: float = _NOTICED_S) -> dict[int, float]:
    """Return the workers that are slow, each with its time divided by the median of the others.

    Args:
        seconds: the seconds per token by worker, for workers that do the same work.
        least_s: the least difference to the median of the others at which a worker is slow.
    """
    slow: dict[int, float] = {}
    for instance_id, own_s in seconds.items():
        others = [other_s for other, other_s in seconds.items() if other != instance_id]
        if not others:
            continue
        usual_s = median(others)
        if usual_s > 0 and own_s >= SLOW_RATIO * usual_s and own_s - usual_s >= least_s:
            slow[instance_id] = own_s / usual_s
    return slow


def _single_id(ids: str) -> int | None:
    """Return the id of the only worker; None if there are several or none."""
    try:
        return int(ids, 16)
    except ValueError:
        return None
