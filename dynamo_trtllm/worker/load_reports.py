"""Broadcast the load of a worker, by which frontends choose workers for requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from dynamo_trtllm.protocol.messages import LoadReport, encode
from dynamo_trtllm.worker.timing import TIMING, WorkerTiming


async def broadcast_load(
    load: Callable[[], LoadReport],
    called: asyncio.Event,
    publish: Callable[[bytes], bool],
    timing: WorkerTiming = TIMING,
) -> None:
    """Publish the load soon after each change, and from time to time while it does not change.

    This runs until it is cancelled. While no request runs, the task sleeps, so that thousands of
    idle workers cost little.

    Args:
        load: returns the load.
        called: is set by each call to the worker.
        publish: sends a report. Returns False if it can't be sent now. It is then tried again.
        timing: how long to wait between two reports.
    """
    clock = asyncio.get_running_loop().time
    last: LoadReport | None = None
    published_at = 0.0
    while True:
        was_called = called.is_set()
        called.clear()
        report = load()
        # Each report has a new number, which does not count as a change.
        is_same = last is not None and msgspec.structs.replace(last, number=report.number) == report
        if not is_same or clock() - published_at >= timing.unchanged_load_s:
            if not publish(encode(report)):
                await asyncio.sleep(timing.load_broadcast_s)
                continue
            published_at = clock()
        last = report
        if not is_same or was_called or report.running or report.waiting:
            await asyncio.sleep(timing.load_broadcast_s)
            continue
        with suppress(TimeoutError):
            async with asyncio.timeout(timing.unchanged_load_s):
                await called.wait()
            # Wait a moment, so that one report covers the calls that arrive together.
            await asyncio.sleep(timing.collect_calls_s)
