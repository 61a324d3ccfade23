"""A load parted among several client processes, and their records put together."""

from __future__ import annotations

import multiprocessing
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.synchronize import Barrier

import uvloop

from benchmarks.client import Load, Share, metered, run_share
from benchmarks.figures import Figures, ProcessMeter
from benchmarks.stream import Record

HOPELESS = 8  # requests that ended, warm-up included, without one that was answered
_BUSY = (429, 503)  # a later request may be answered
PROGRESS_S = 5.0  # between two reports


class NoAnswer(Exception):
    """The first requests all failed, and no more were sent."""


class Tally:
    """Requests of all client processes that have ended, in memory that they share."""

    def __init__(self, context: SpawnContext, processes: int) -> None:
        self._ok, self._failed = context.RawArray("q", processes), context.RawArray("q", processes)
        self._hopeless = context.RawArray("q", processes)  # failed for another reason than load

    def goes_on(self, process: int, record: Record) -> bool:
        """Count the record of this process. Return whether there is any use in sending more."""
        (self._ok if record.is_ok else self._failed)[process] += 1
        self._hopeless[process] += not record.is_ok and record.status not in _BUSY
        return self.ok > 0 or sum(self._hopeless) < HOPELESS

    @property
    def ok(self) -> int:
        return sum(self._ok)

    @property
    def failed(self) -> int:
        return sum(self._failed)


OnProgress = Callable[[Tally], None]


@contextmanager
def _reported(tally: Tally, on_progress: OnProgress | None) -> Iterator[None]:
    """Report every PROGRESS_S, from a thread, while the block runs."""
    done = threading.Event()

    def report() -> None:
        while not done.wait(PROGRESS_S):
            if on_progress is not None:
                on_progress(tally)

    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def part(load: Load, processes: int) -> list[Load]:
    """Loads that together are this one; as many as there are requests at most."""
    count = max(1, min(processes, load.requests, load.concurrency if load.rate == 0 else load.requests))
    return [
        replace(
            load,
            concurrency=_nth(load.concurrency, index, count),
            requests=_nth(load.requests, index, count),
            rate=load.rate / count,
            seed=load.seed + index if load.seed else 0,
        )
        for index in range(count)
    ]


def _nth(whole: int, index: int, count: int) -> int:
    return whole // count + (index < whole % count)


def measured(
    load: Load, *, processes: int, warmup: int, pids: dict[str, int], on_progress: OnProgress | None = None
) -> tuple[Figures, list[Record]]:
    """As `client.measured`; records come process by process, numbered anew.

    Raises EOFError when a process fails, and NoAnswer when the first HOPELESS requests that ended all failed for
    another reason than too much load.
    """
    parts = part(load, processes)
    context = multiprocessing.get_context("spawn")
    warm = context.Barrier(len(parts) + 1)
    meter = ProcessMeter(pids)
    tally = Tally(context, len(parts))
    children, results = [], []
    for index, each in enumerate(parts):
        result, given = context.Pipe(duplex=False)
        args = (each, -(-warmup // len(parts)), warm, given, tally, index)
        child = context.Process(target=_run, args=args, daemon=True)
        child.start()
        given.close()
        children.append(child)
        results.append(result)
    with _reported(tally, on_progress):
        warm.wait(load.timeout_s)
        meter.start()
        shares: list[Share] = [result.recv() for result in results]
    for child in children:
        child.join()
    records = [record for share in shares for record in share.records]
    if any(share.is_stopped for share in shares):
        errors = Counter(record.error for record in records if not record.is_ok)
        counts = ", ".join(f"{error} {count} times" for error, count in errors.most_common())
        raise NoAnswer(f"the first {HOPELESS} requests that ended all failed, so no more were sent ({counts})")
    found = metered(shares, meter, osl=load.osl)
    for index, record in enumerate(records, 1):
        record.index = index
    return found, records


def _run(load: Load, warmup: int, warm: Barrier, given: Connection, tally: Tally, index: int) -> None:
    given.send(uvloop.run(run_share(load, warmup, warm.wait, partial(tally.goes_on, index))))
