"""A load parted among several client processes, and their records put together."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import uvloop

from benchmarks.client import Load, Share, metered, run_share
from benchmarks.figures import Figures, ProcessMeter
from benchmarks.stream import Record


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


def measured(load: Load, *, processes: int, warmup: int, pids: dict[str, int]) -> tuple[Figures, list[Record]]:
    """As `client.measured`; records come process by process, numbered anew. Raises EOFError when a process fails."""
    parts = part(load, processes)
    context = multiprocessing.get_context("spawn")
    warm = context.Barrier(len(parts) + 1)
    meter = ProcessMeter(pids)
    children, results = [], []
    for each in parts:
        result, given = context.Pipe(duplex=False)
        child = context.Process(target=_run, args=(each, -(-warmup // len(parts)), warm, given), daemon=True)
        child.start()
        given.close()
        children.append(child)
        results.append(result)
    warm.wait(load.timeout_s)
    meter.start()
    shares: list[Share] = [result.recv() for result in results]
    found = metered(shares, meter, osl=load.osl)
    for child in children:
        child.join()
    records = [record for share in shares for record in share.records]
    for index, record in enumerate(records, 1):
        record.index = index
    return found, records


def _run(load: Load, warmup: int, warm: Barrier, given: Connection) -> None:
    given.send(uvloop.run(run_share(load, warmup, warm.wait)))
