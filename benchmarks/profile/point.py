"""Measures one point with the built-in load client."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial

from .. import client_shards
from ..load_client import Load
from ..stream import RequestRecord
from . import PROG, phases
from .result import Point
from .shapes import Shape
from .steady import steady

log = logging.getLogger(PROG)
_ALL_DAY_S = 24 * 3600.0
_STREAMS_PER_CLIENT = 512  # streams that one client process can handle at the guides' rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The measured server."""

    url: str
    model: str
    timeout_s: float  # longest wait for one response


def load_of(shape: Shape, target: Target, concurrency: int, repetition: int) -> Load:
    """Return the load of a point.

    Each repetition has other prompts, because servers cache prefixes.
    """
    return Load(
        url=target.url,
        model=target.model,
        concurrency=concurrency,
        requests=shape.requests_at(concurrency),
        seconds=_ALL_DAY_S,
        isl=shape.isl,
        osl=shape.osl,
        timeout_s=target.timeout_s,
        extra={"min_tokens": shape.osl} | shape.extra,
        seed=shape.seed * 1_000_003 + concurrency * 1009 + repetition * 101,
    )


def _report(wanted: int, begun_s: float, tally: client_shards.SharedCounters) -> None:
    ended = tally.ok + tally.failed
    spent_s = time.monotonic() - begun_s
    log.info("  %d of %d requests done, %d failed, %.0f s", ended, wanted, tally.failed, spent_s)


def measure(
    shape: Shape, target: Target, concurrency: int, repetition: int
) -> tuple[Point, list[RequestRecord]]:
    """Measure a point after a warm-up.

    Raises:
        EOFError: a client process failed.
        AllRequestsFailed: the first requests all failed.
    """
    warmup = shape.warmup_at(concurrency)
    load = load_of(shape, target, concurrency, repetition)
    before = phases.read_totals(target.url)
    found, records = client_shards.measure_shards(
        load,
        processes=-(-concurrency // _STREAMS_PER_CLIENT),
        warmup=warmup,
        pids={},
        on_progress=partial(_report, warmup + load.requests, time.monotonic()),
    )
    point = Point(
        concurrency=concurrency,
        repetition=repetition,
        origin_s=min((record.planned_s for record in records), default=0.0),
        figures=found,
        steady=steady(records, concurrency),
        phase_s=phases.means(before, phases.read_totals(target.url)),
    )
    return point, records
