"""Runs a load in several client processes and merges their records."""

from __future__ import annotations

import multiprocessing
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.synchronize import Barrier

import uvloop

from dynamo_trtllm.protocol.counted import counted

from .interrupts import Interrupts, held_back
from .load_client import Load, ShardResult, run_shard, summarize_shards
from .stream import RequestRecord
from .summary import LoadSummary, ProcessMeter

# A load without any success is stopped after this many failed requests, warm-up included.
MAX_FAILURES = 8
_BUSY = (429, 503)  # status codes that are no such failures: a later request may succeed
PROGRESS_S = 5.0  # between two progress reports
_STOP = "stop"  # the message that ends the load of a client process


class AllRequestsFailed(Exception):
    """The first requests all failed, so no more were sent."""


class LoadInterrupted(KeyboardInterrupt):
    """Ctrl-C ended the load. This has what was measured until then, without requests in flight.

    It has no records if the load ended in its warm-up. It is a KeyboardInterrupt, so a caller that
    does not handle it ends as after any Ctrl-C.
    """

    def __init__(self, summary: LoadSummary, records: list[RequestRecord]) -> None:
        super().__init__()
        self.summary = summary
        self.records = records


_MAX_ERROR = 64  # bytes of an error's code


class SharedCounters:
    """Counts the finished requests of all client processes, in shared memory."""

    def __init__(self, context: SpawnContext, processes: int) -> None:
        self._ok = context.RawArray("q", processes)
        self._failed = context.RawArray("q", processes)
        self._errors = context.RawArray("q", processes)  # failures for another reason than overload
        self._latest_error = context.RawArray("c", _MAX_ERROR)

    def should_continue(self, process: int, record: RequestRecord) -> bool:
        """Count a finished request of a process.

        Return False if no request can be expected to succeed.
        """
        if record.is_ok:
            self._ok[process] += 1
        else:
            self._failed[process] += 1
            self._latest_error.value = record.error.encode()[: _MAX_ERROR - 1]
            if record.status not in _BUSY:
                self._errors[process] += 1
        return self.ok > 0 or sum(self._errors) < MAX_FAILURES

    @property
    def ok(self) -> int:
        return sum(self._ok)

    @property
    def failed(self) -> int:
        return sum(self._failed)

    @property
    def latest_error(self) -> str:
        """Return the code of a request that has failed lately; "" if none has."""
        code: bytes = self._latest_error.value
        return code.decode(errors="replace")


OnProgress = Callable[[SharedCounters], None]


@contextmanager
def _report_progress(counters: SharedCounters, on_progress: OnProgress | None) -> Iterator[None]:
    """Call `on_progress` every PROGRESS_S from a thread while the block runs."""
    done = threading.Event()

    def report() -> None:
        while not done.wait(PROGRESS_S):
            if on_progress is not None:
                on_progress(counters)

    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def split_load(load: Load, processes: int) -> list[Load]:
    """Split a load into at most `processes` loads with at least one request each."""
    # In a closed loop, each process needs a request that is active.
    is_closed_loop = load.rate == 0
    most = min(load.requests, load.concurrency) if is_closed_loop else load.requests
    count = max(1, min(processes, most))
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
    """Return one of `count` nearly equal parts of a number."""
    is_larger = index < whole % count
    return whole // count + is_larger


def measure_shards(
    load: Load,
    *,
    processes: int,
    warmup: int,
    pids: dict[str, int],
    on_progress: OnProgress | None = None,
    interrupts: Interrupts | None = None,
) -> tuple[LoadSummary, list[RequestRecord]]:
    """Run the load in several client processes, after a warm-up.

    Args:
        load: what to send.
        processes: number of client processes.
        warmup: requests before the load, not measured.
        pids: processes whose CPU time is measured, by name.
        on_progress: called every PROGRESS_S from another thread.
        interrupts: catches a Ctrl-C, which then ends the load early. None: nothing ends it early.

    Returns:
        The summary, and the records of all requests by process, numbered from 1.

    Raises:
        EOFError: a client process failed.
        AllRequestsFailed: the first MAX_FAILURES requests failed for another reason than overload.
        LoadInterrupted: Ctrl-C ended the load.
    """
    parts = split_load(load, processes)
    context = multiprocessing.get_context("spawn")
    warm = context.Barrier(len(parts) + 1)
    meter = ProcessMeter(pids)
    counters = SharedCounters(context, len(parts))
    children = []
    connections: list[Connection[str, ShardResult]] = []
    for index, part in enumerate(parts):
        mine, theirs = context.Pipe()
        args = (part, -(-warmup // len(parts)), warm, theirs, counters, index)
        child = context.Process(target=_run, args=args, daemon=True)
        # A terminal sends Ctrl-C to all processes. This one decides what it means for the client.
        with held_back():
            child.start()
        theirs.close()
        children.append(child)
        connections.append(mine)
    with ExitStack() as stack:
        stack.enter_context(_report_progress(counters, on_progress))
        if interrupts is not None:
            stack.enter_context(interrupts.stopping(partial(_stop_all, connections)))
        warm.wait(load.timeout_s)
        meter.start()
        shards = [connection.recv() for connection in connections]
    for child in children:
        child.join()
    records = [record for shard in shards for record in shard.records]
    # A Ctrl-C after the last request has ended changes nothing here.
    if any(shard.is_abandoned for shard in shards):
        raise LoadInterrupted(summarize_shards(shards, meter, osl=load.osl), _numbered(records))
    if any(shard.is_stopped for shard in shards):
        raise _all_failed(records)
    return summarize_shards(shards, meter, osl=load.osl), _numbered(records)


def _stop_all(connections: Sequence[Connection[str, ShardResult]]) -> None:
    """End the load of all client processes."""
    for connection in connections:
        with suppress(OSError):  # its process has already sent its results, and ended
            connection.send(_STOP)


def _all_failed(records: list[RequestRecord]) -> AllRequestsFailed:
    errors = Counter(record.error for record in records if not record.is_ok)
    counts = ", ".join(f"{error} {counted(count, 'time')}" for error, count in errors.most_common())
    return AllRequestsFailed(
        f"the first {MAX_FAILURES} requests all failed, so no more were sent ({counts})"
    )


def _numbered(records: list[RequestRecord]) -> list[RequestRecord]:
    for index, record in enumerate(records, 1):
        record.index = index
    return records


def _run(
    load: Load,
    warmup: int,
    warm: Barrier,
    parent: Connection[ShardResult, str],
    counters: SharedCounters,
    index: int,
) -> None:
    should_continue = partial(counters.should_continue, index)
    parent.send(
        uvloop.run(run_shard(load, warmup, warm.wait, should_continue, stop_fd=parent.fileno()))
    )
