"""Define the samples that frontend processes send each other while a console is open."""

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
    """A request that has ended. The row has no text of prompt or output."""

    id: str  # `explain` finds the request by this id
    model: str
    endpoint: str
    code: str  # "ok", "cancelled" or an error code
    status: Count  # HTTP status; 0: no response was started
    finish: str  # the finish reasons of the choices; "": no choice has finished
    begun_at: EpochSeconds
    total_s: Seconds
    first_token_s: Seconds | None  # time to first token; None: there was no token
    prefill: str  # the hexadecimal ids of the prefill workers, joined by commas
    decode: str  # the ids of the decode or aggregated workers, in the same form
    prompt_tokens: Count
    cached_tokens: Count
    output_tokens: Count
    retries: Count
    migrations: Count
    kv_bytes: Number  # size of the KV that moved from the prefill to the decode worker
    kv_transfer_s: Seconds
    phases: tuple[tuple[str, str, Seconds], ...]  # role, phase, seconds
    # The parts of the phases before the first token. Empty: there was no token, or the frontend has
    # an earlier release.
    ttft_phases: tuple[tuple[str, str, Seconds], ...] = ()


class WorkerProgress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The streams of one process on one worker, since the last sample."""

    instance_id: Number
    streams: Count  # number of streams that run now
    tokens: Count  # number of tokens that have come
    gap_s: Seconds  # sum of the times between tokens
    num_gaps: Count
    silent_s: Seconds  # the longest time since the last token of a running stream


class FrontendSample(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The work of one frontend process in a second. Counts begin with the last sample."""

    process: Number  # a random id of the process
    name: str  # the name of the process, for people
    # The number of the sample, from 1. The requests of the first sample have ended before it.
    number: Number
    # True: a console is open at this process. So all other processes send samples, too.
    has_readers: bool
    interval_s: _Interval
    inflight: Count  # number of HTTP requests in progress
    queued: Count  # number of these requests that wait for a permit
    codes: dict[str, Count]  # number of ended requests, by code
    ttft_counts: tuple[Count, ...]  # observations by bucket of the metric `ttft_seconds`
    gap_counts: tuple[Count, ...]  # observations by bucket of the metric `itl_seconds`
    workers: tuple[WorkerProgress, ...]
    requests: tuple[RequestRow, ...]  # the requests that have ended last


def frontend_samples_subject(namespace: str) -> str:
    """Return the subject at which the frontends of a namespace publish `FrontendSample`."""
    return f"{namespace}.frontend_samples"
