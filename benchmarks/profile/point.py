"""One point of a sweep by the built-in client: warm-up, load, records, and what the server says of its phases."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial

from benchmarks import shares
from benchmarks.client import Load
from benchmarks.profile import PROG, phases
from benchmarks.profile.result import Point
from benchmarks.profile.shapes import Shape
from benchmarks.profile.steady import steady
from benchmarks.stream import Record

_LOG = logging.getLogger(PROG)
_ALL_DAY_S = 24 * 3600.0
_STREAMS_PER_CLIENT = 512  # a client process follows this many at a guide's pace without becoming the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the load goes."""

    url: str
    model: str
    timeout_s: float  # longest wait for one answer


def load_of(shape: Shape, target: Target, concurrency: int, repetition: int) -> Load:
    """Each repetition sends other prompts: a server's prefix cache must not answer for its engine."""
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


def _report(wanted: int, begun_s: float, tally: shares.Tally) -> None:
    ended, spent_s = tally.ok + tally.failed, time.monotonic() - begun_s
    _LOG.info("  %d of %d requests ended, %d failed, %.0f s", ended, wanted, tally.failed, spent_s)


def measure(shape: Shape, target: Target, concurrency: int, repetition: int) -> tuple[Point, list[Record]]:
    """Raises EOFError when a client process fails, NoAnswer when the first requests all failed."""
    warmup = shape.warmup_at(concurrency)
    load = load_of(shape, target, concurrency, repetition)
    before = phases.read_totals(target.url)
    found, records = shares.measured(
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
