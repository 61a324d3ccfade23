"""Measures one point with the built-in load client."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from functools import partial

from .. import client_shards
from ..arguments import LONGEST_S
from ..interrupts import Interrupts
from ..load_client import Load
from ..stream import RequestRecord
from ..summary import LoadSummary
from . import PROG, phases
from .goodput import count_good
from .result import Point
from .shapes import Level, Shape
from .steady import steady

log = logging.getLogger(PROG)
_STREAMS_PER_CLIENT = 512  # streams that one client process can handle at the guides' rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The measured server."""

    url: str
    model: str
    timeout_s: float  # longest wait for one response
    goals_ms: dict[str, float] = field(default_factory=dict)  # of good requests, see goodput.py


def load_of(shape: Shape, target: Target, level: Level, repetition: int) -> Load:
    """Return the load of a point.

    Each repetition has other prompts, because servers cache prefixes.
    """
    return Load(
        url=target.url,
        model=target.model,
        concurrency=level.concurrency or 1,
        rate=level.request_rate,
        requests=shape.requests_at(level),
        seconds=LONGEST_S,
        isl=shape.isl,
        osl=shape.osl,
        timeout_s=target.timeout_s,
        extra={"min_tokens": shape.osl} | shape.extra,
        seed=shape.seed * 1_000_003 + round(level.value * 1009) + repetition * 101,
    )


def _report(wanted: int, begun_s: float, tally: client_shards.SharedCounters) -> None:
    ended = tally.ok + tally.failed
    spent_s = time.monotonic() - begun_s
    latest = f" (the latest: {tally.latest_error})" if tally.failed else ""
    log.info(
        "  %d of %d requests done, %d failed%s, %.0f s",
        ended,
        wanted,
        tally.failed,
        latest,
        spent_s,
    )


class PointInterrupted(Exception):
    """Ctrl-C ended a point early. It has what was measured until then."""

    def __init__(self, point: Point, records: list[RequestRecord]) -> None:
        super().__init__(f"interrupted after {len(records)} requests")
        self.point = point
        self.records = records


def measure(
    shape: Shape, target: Target, level: Level, repetition: int, interrupts: Interrupts
) -> tuple[Point, list[RequestRecord]]:
    """Measure a point after a warm-up. A Ctrl-C of `interrupts` ends it early.

    Raises:
        EOFError: a client process failed.
        AllRequestsFailed: the first requests all failed.
        PointInterrupted: Ctrl-C ended the load.
    """
    warmup = shape.warmup_at(level)
    load = load_of(shape, target, level, repetition)
    before = phases.read_totals(target.url)

    def point_of(found: LoadSummary, records: list[RequestRecord]) -> Point:
        return Point(
            level=level,
            repetition=repetition,
            origin_s=min((record.planned_s for record in records), default=0.0),
            figures=found,
            steady=steady(records, level.concurrency) if level.concurrency else None,
            good=count_good(records, target.goals_ms),
            phase_s=phases.means(before, phases.read_totals(target.url)),
        )

    streams = level.concurrency or math.ceil(level.request_rate)
    try:
        found, records = client_shards.measure_shards(
            load,
            processes=-(-streams // _STREAMS_PER_CLIENT),
            warmup=warmup,
            pids={},
            on_progress=partial(_report, warmup + load.requests, time.monotonic()),
            interrupts=interrupts,
        )
    except client_shards.LoadInterrupted as exc:
        raise PointInterrupted(point_of(exc.summary, exc.records), exc.records) from exc
    return point_of(found, records), records
