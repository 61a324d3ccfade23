"""Define what the frontend processes of a namespace send each other while a console is open."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from dynamo_trtllm.protocol.number_types import (
    MAX_SECONDS,
    Count,
    EpochSeconds,
    Number,
    Seconds,
)

_Interval: TypeAlias = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]


class RequestRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A request that has ended. It has no text of its prompt or output."""

    id: str  # by which `explain` finds it
    model: str
    endpoint: str
    code: str  # "ok", "cancelled" or an error code
    status: Count  # HTTP status; 0: no response was started
    finish: str  # the finish reasons of its choices; "": none has finished
    begun_at: EpochSeconds
    total_s: Seconds
    first_token_s: Seconds | None  # from the beginning; None: it had no token
    prefill: str  # ids of the prefill workers, in hexadecimal, joined by commas; "": none
    decode: str  # ids of the decode or aggregated workers
    prompt_tokens: Count
    cached_tokens: Count
    output_tokens: Count
    retries: Count
    migrations: Count
    kv_bytes: Number  # of KV that moved from the prefill to the decode worker
    kv_transfer_s: Seconds
    phases: tuple[tuple[str, str, Seconds], ...]  # role, phase, seconds
    # The part of the phases before the first token. Empty: it had none, or the frontend is older.
    ttft_phases: tuple[tuple[str, str, Seconds], ...] = ()


class WorkerProgress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The streams of one process on one worker, since the sample before."""

    instance_id: Number
    streams: Count  # that run now
    tokens: Count  # that came
    gap_s: Seconds  # the sum of the times between tokens
    num_gaps: Count
    silent_s: Seconds  # of the running stream whose last token is the oldest


class FrontendSample(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one frontend process did in a second. Counts are those since its sample before."""

    process: Number  # random
    name: str  # for people
    number: Number  # counts from 1; the requests of the first sample ended before it
    has_readers: bool  # a console is open at this process: all others send samples, too
    interval_s: _Interval
    inflight: Count  # HTTP requests in progress
    queued: Count  # those that wait for a permit
    codes: dict[str, Count]  # ended requests by code
    ttft_counts: tuple[Count, ...]  # by bucket of the metric `ttft_seconds`
    gap_counts: tuple[Count, ...]  # by bucket of the metric `itl_seconds`
    workers: tuple[WorkerProgress, ...]
    requests: tuple[RequestRow, ...]  # the newest ones that have ended


def frontend_samples_subject(namespace: str) -> str:
    """Return the subject at which the frontends of a namespace publish `FrontendSample`."""
    return f"{namespace}.frontend_samples"
