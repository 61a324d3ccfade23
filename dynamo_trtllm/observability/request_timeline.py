"""Describe the life of a request from the recordings of its processes, in rows of text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final, NamedTuple

from dynamo_trtllm.observability.event_text import HIDDEN, clock_error, describe
from dynamo_trtllm.observability.recorder import RecordedEvent
from dynamo_trtllm.observability.recordings import (
    ProcessRecording,
    ProcessState,
    RequestRecording,
    Step,
)
from dynamo_trtllm.protocol.counted import counted

_MAX_LONGEST: Final = 3  # intervals
_LEAST_SHARE: Final = 0.05  # of the time of the request


class TimelineRow(NamedTuple):
    """One event of a request."""

    since_ms: float  # since its first event
    process: str
    event: str


def timeline_rows(request: RequestRecording) -> list[TimelineRow]:
    """Return the events of a request, and what happened to its processes meanwhile."""
    first_ns = request.steps[0].entry.ns
    rows: list[TimelineRow] = []
    for step in _with_process_events(request):
        if step.entry.event not in HIDDEN:
            since_ms = (step.entry.ns - first_ns) / 1e6
            rows.append(TimelineRow(since_ms, step.process.title, describe(step.entry, request)))
    return rows


def longest_intervals(request: RequestRecording) -> list[str]:
    """Return where most of the time of a finished request went, the longest interval first.

    Each is the time between two events, with the process of the second one. Empty: the request has
    not finished.
    """
    if request.finished is None:
        return []
    not_shown = {*HIDDEN, RecordedEvent.PROGRESS}  # progress divides the time of one phase
    steps = [step for step in request.steps if step.entry.event not in not_shown]
    total_ns = steps[-1].entry.ns - steps[0].entry.ns
    longest = sorted(pairwise(steps), key=lambda ends: ends[0].entry.ns - ends[1].entry.ns)
    texts: list[str] = []
    for begin, end in longest[:_MAX_LONGEST]:
        took_ns = end.entry.ns - begin.entry.ns
        if took_ns > _LEAST_SHARE * total_ns:
            took = f"{took_ns / 1e6:.3f} ms ({took_ns / total_ns:.0%})"
            texts.append(f"{took} {begin.entry.name} → {end.entry.name}, {end.process.title}")
    return texts


def timeline_notes(request: RequestRecording) -> list[str]:
    """Return what limits the recordings of a request, and where more is known of it."""
    begun_ns = request.steps[0].entry.ns
    notes: list[str] = []
    for process in request.processes():
        notes += _notes(process, since_ns=begun_ns)
    if any(
        step.entry.event == RecordedEvent.SHARES_CHANGED for step in _with_process_events(request)
    ):
        notes.append("why shares changed: dynamo-trtllm shares --history")
    return notes


def _notes(process: ProcessRecording, *, since_ns: int) -> Iterator[str]:
    """Yield what limits the recording of a process since the beginning of a request."""
    numbered = f"{process.title} (process {process.header.pid})"
    if process.num_overwritten and process.oldest_ns > since_ns:
        yield f"earlier events of {process.title} may be overwritten"
    if process.state is ProcessState.KILLED:
        yield f"{numbered} was killed or crashed"
    elif not process.is_over and process.state is not ProcessState.RUNNING:
        yield f"{numbered} is {process.state.value}"
    if process.clock_error_s:
        yield f"{process.title} is on machine {process.host}; {clock_error(process)}"


def _with_process_events(request: RequestRecording) -> list[Step]:
    """Return the steps of a request, and what happened to its processes meanwhile."""
    begun_ns = request.steps[0].entry.ns
    ended_ns = request.steps[-1].entry.ns
    steps = list(request.steps)
    for process in request.processes():
        for entry in process.entries:
            is_of_process = not entry.key
            if is_of_process and begun_ns <= entry.ns <= ended_ns:
                steps.append(Step(process, entry))
    return sorted(steps, key=lambda step: step.entry.ns)


def outcome(request: RequestRecording) -> str:
    """Return in a few words how the request ended, or that it runs."""
    finished = request.finished
    if finished is not None:
        end = finished.entry
        took_s = (end.ns - request.steps[0].entry.ns) / 1e9
        http_status = end.a
        num_tokens = end.b
        status = f"HTTP {http_status}" if http_status else "no response"
        return (
            f"finished after {took_s:.3f} s, {status}, {counted(num_tokens, 'token')}, {end.reason}"
        )
    frontends = [process for process in request.processes() if process.is_frontend]
    if not frontends:
        return "its frontend is gone, or was not asked or did not answer"
    if frontends[0].is_over:
        return f"not finished, its frontend was {frontends[0].state.value}"
    return "not finished"
