"""Define what the console shows in one second, as the page gets it in JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec

from dynamo_trtllm.protocol.frontend_samples import RequestRow

MAX_LISTED: Final = 100  # workers, pairs, and requests of one second

Severity: TypeAlias = Literal["bad", "warning"]
HealthStatus: TypeAlias = Literal["healthy", "degraded", "not_ready"]


class HealthReason(msgspec.Struct, frozen=True):
    """Why something needs attention, in one sentence."""

    severity: Severity
    text: str


class ConsoleFrontend(msgspec.Struct, frozen=True, kw_only=True):
    """One frontend process."""

    name: str
    inflight: int
    queued: int
    requests_per_s: float
    silent_s: float  # seconds since its last sample


class ConsoleWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One registered worker. None: not known."""

    id: str
    role: str
    model: str
    engine: str
    running: int | None  # requests in the batch
    waiting: int | None  # in the engine's queue
    queued_prefill_tokens: int | None
    kv_blocks_used: int | None
    kv_blocks_total: int | None
    streams: int  # running streams of all frontends
    tokens_per_s: float
    token_ms: float | None  # time per output token
    prompt_token_ms: float | None  # time per prompt token that was computed
    # The worker's time, divided by the usual time of the others of its role. None: it is not slow.
    slow_ratio: float | None
    is_slow_at_prompts: bool  # the ratio is that of times per prompt token, not per output token
    slow_s: float  # for how long the worker has been slow while a console was open
    silent_s: float  # for how long no token of a running stream came
    # The shares of an elastic worker. None: it is no elastic worker.
    prefill_share: float | None = None
    decode_share: float | None = None
    # When its shares changed last, in seconds since the epoch. None: not since it registered.
    shares_at: float | None = None


class ConsolePair(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of a prefill and a decode worker."""

    prefill: str
    decode: str
    state: str
    reason: str
    age_s: float | None  # seconds since the last probe or request
    # Bytes of KV per second of transfer time. None: there was no transfer lately.
    bytes_per_s: float | None


class ConsolePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The values of the charts in one second. None: nothing was measured."""

    at: float  # seconds since the epoch
    tokens_per_s: float
    requests_per_s: float  # requests that ended
    failures_per_s: float  # requests that ended with an error
    inflight: int
    queued: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    gap_p50_s: float | None
    gap_p99_s: float | None
    # The mean seconds of the phases before the first token, of requests that ended.
    ttft_split: dict[str, float]


class WorkerEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that registered or left."""

    at: float
    id: str
    role: str
    model: str
    event: Literal["registered", "left"]


class ConsoleSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The deployment in one second."""

    at: float
    status: HealthStatus
    reasons: list[HealthReason]
    models: list[str]
    frontends: list[ConsoleFrontend]
    workers: list[ConsoleWorker]
    num_workers: int
    pairs: list[ConsolePair]
    num_pairs: int
    events: list[WorkerEvent]
    point: ConsolePoint
    requests: list[dict[str, Any]]  # requests that ended in this second


class ConsoleHello(msgspec.Struct, frozen=True, kw_only=True):
    """The first event of a stream: the points of the time before, and the present snapshot."""

    namespace: str
    version: str
    points: list[ConsolePoint]
    snapshot: ConsoleSnapshot


def request_object(row: RequestRow) -> dict[str, Any]:
    """Return a request as the page gets it: by the names of the fields."""
    return {name: getattr(row, name) for name in row.__struct_fields__}


# The parts of the time to first token, in their order, and the phases of which each consists.
_PARTS: Final = {
    "frontend": frozenset(
        {"receive", "tokenize_queue", "load", "tokenize", "frontend_queue", "select", "reserve"}
    ),
    "queue": frozenset({"queue", "submit", "grammar"}),
    "prefill": frozenset({"prefill", "export"}),
    "kv_transfer": frozenset({"kv_transfer"}),
    "retry": frozenset({"retry"}),
}
_NETWORK: Final = "network"  # the way to workers and back, and all phases that are in no other part


def ttft_parts(row: RequestRow) -> dict[str, float]:
    """Return the time to first token of a request in its parts, in seconds."""
    parts = dict.fromkeys([*_PARTS, _NETWORK], 0.0)
    for _, phase, seconds in row.ttft_phases:
        name = next((name for name, phases in _PARTS.items() if phase in phases), _NETWORK)
        parts[name] += seconds
    return parts


def mean_ttft_parts(rows: Sequence[RequestRow]) -> dict[str, float]:
    """Return the means of `ttft_parts` of the requests that had a first token; {} without any."""
    split = [ttft_parts(row) for row in rows if row.ttft_phases]
    if not split:
        return {}
    return {name: sum(parts[name] for parts in split) / len(split) for name in split[0]}


def quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float | None:
    """Return a quantile of a histogram, by interpolation within its bucket.

    Args:
        counts: observations by bucket. The last bucket has no upper bound.
        bounds: upper bounds of the other buckets.
        share: the share of the observations that are lower than the quantile, from 0 to 1.

    Returns:
        The quantile, or the last bound if the quantile is higher. None: there are no observations.
    """
    total = sum(counts)
    if not total:
        return None
    # How many observations are lower than the quantile, counted from the current bucket on.
    num_lower = share * total
    low = 0.0
    for count, bound in zip(counts, bounds, strict=False):
        if count and num_lower <= count:
            return low + (bound - low) * num_lower / count
        num_lower -= count
        low = bound
    return bounds[-1]


def points_of(rows: Sequence[RequestRow]) -> list[ConsolePoint]:
    """Return points of the charts for the time in which no console was open.

    They are made from requests that have ended. All tokens of a request count in the second in
    which it ended.
    """
    by_second: dict[int, list[RequestRow]] = {}
    for row in rows:
        by_second.setdefault(int(row.begun_at + row.total_s), []).append(row)
    points: list[ConsolePoint] = []
    for second, ended in sorted(by_second.items()):
        ttfts = sorted(row.first_token_s for row in ended if row.first_token_s is not None)
        gaps = sorted(
            (row.total_s - row.first_token_s) / (row.output_tokens - 1)
            for row in ended
            if row.first_token_s is not None and row.output_tokens > 1
        )
        points.append(
            ConsolePoint(
                at=float(second),
                tokens_per_s=float(sum(row.output_tokens for row in ended)),
                requests_per_s=float(len(ended)),
                failures_per_s=float(sum(is_failure(row.code) for row in ended)),
                inflight=0,
                queued=0,
                ttft_p50_s=_at_share(ttfts, 0.5),
                ttft_p99_s=_at_share(ttfts, 0.99),
                gap_p50_s=_at_share(gaps, 0.5),
                gap_p99_s=_at_share(gaps, 0.99),
                ttft_split=mean_ttft_parts(ended),
            )
        )
    return points


def is_failure(code: str) -> bool:
    """Return True if a request with this code ended with an error."""
    return code not in ("ok", "cancelled")


def _at_share(ordered: Sequence[float], share: float) -> float | None:
    """Return the value below which this share of the values is; None if there are no values."""
    if not ordered:
        return None
    place = min(len(ordered) - 1, int(share * len(ordered)))
    return ordered[place]
