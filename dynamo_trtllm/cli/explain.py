"""Explain where requests spent their time, and where they are stuck (`dynamo-trtllm explain`).

It reads the files that the flight recorders of this machine's processes write, so it also explains
requests of frozen and ended processes. It asks the running processes of other machines.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from dynamo_trtllm.cli.stuck import StuckReport, describe
from dynamo_trtllm.config.commands import ExplainConfig
from dynamo_trtllm.config.load import command, process_environment
from dynamo_trtllm.config.parser import CONSOLE
from dynamo_trtllm.config.text_table import format_table
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.observability.recorder import (
    BLOCK_TOKENS,
    RecordedEvent,
    check_owner,
    recorder_folder,
)
from dynamo_trtllm.observability.recordings import (
    Entry,
    ProcessRecording,
    ProcessState,
    Recordings,
    RequestRecording,
    Step,
)
from dynamo_trtllm.sanitize import escape_controls

PROG = f"{CONSOLE} explain"
_MOST_SHOWN = 20
_HIDDEN = (RecordedEvent.PROMPT_HASHES,)


class NotExplained(Exception):
    """There is nothing to show. The message says why, and what to do."""


@command(ExplainConfig, PROG, NotExplained)
def main(config: ExplainConfig) -> int:
    """Run the command.

    Exit with status 0; 1 if the request is unknown, nothing is recorded, or `--stuck` has found
    something; 2 for a bad command line.
    """
    recordings = _read(config)
    for problem in recordings.problems:
        sys.stderr.write(f"note: {escape_controls(problem)}\n")
    requests = list(recordings.requests.values())
    if config.request is not None:
        requests = recordings.find(config.request)
        if not requests:
            raise NotExplained(
                f"none of {len(recordings.processes)} processes has recorded a request"
                f" {config.request!r}; check the id, or list the latest requests with '{PROG}'"
            )
    if config.perfetto is not None:
        _write(config.perfetto, perfetto(requests))
    if config.trace is not None:
        _write(config.trace, mooncake(requests))
    if config.perfetto is not None or config.trace is not None:
        return 0
    if config.stuck:
        report = StuckReport.of(recordings, config.older_than_s)
        sys.stdout.write(report.json() if config.json_output else report.text())
        return report.exit_status
    if config.request is not None:
        sys.stdout.write("\n".join(map(timeline, requests)))
    else:
        sys.stdout.write(_latest(requests))
    return 0


def _read(config: ExplainConfig) -> Recordings:
    folder = recorder_folder(config.recorder_dir, process_environment())
    if folder is None:
        raise ConfigError("--recorder-dir off records nothing; pass the folder of the processes")
    reason = f"{folder} has no recording"
    try:
        if config.recorder_dir is None:
            check_owner(folder)
        local = Recordings.read(folder)
    except OSError as exc:
        local = Recordings([])
        reason = f"{folder} can't be read ({exc.strerror or exc})"
    recordings = local
    if not config.local:
        # Imported here, because it loads the clients of etcd and NATS.
        from dynamo_trtllm.cli.machines import with_other_machines

        recordings = with_other_machines(config, local)
    if not recordings.processes and not recordings.unanswered and not local.problems:
        others = "".join(f"; {problem}" for problem in recordings.problems)
        raise NotExplained(
            f"{reason}; start a worker or a frontend, or pass the --recorder-dir of the"
            f" processes{others}"
        )
    return recordings


def _write(path: Path, lines: Iterator[str]) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(lines)
    except OSError as exc:
        raise ConfigError(
            f"{path} can't be written: {exc.strerror or exc}; pass another path"
        ) from exc


# --- one request ----------------------------------------------------------------------------------


def timeline(request: RequestRecording) -> str:
    """Return the life of a request as text."""
    first = request.steps[0]
    began = datetime.fromtimestamp(first.process.epoch_s(first.entry.ns)).astimezone()
    lines = [
        f"request {request.id}, {began.isoformat(timespec='milliseconds')}: {outcome(request)}"
    ]
    rows = [("ms", "process", "event")]
    for step in _with_process_events(request):
        if step.entry.event not in _HIDDEN:
            since_ms = (step.entry.ns - first.entry.ns) / 1e6
            rows.append((f"{since_ms:.3f}", step.process.title, describe(step.entry, request)))
    width = max(len(ms) for ms, _, _ in rows)
    table = format_table([(ms.rjust(width), process, event) for ms, process, event in rows])
    lines += table.splitlines()
    for process in request.processes():
        lines += [f"note: {note}" for note in _notes(process, since_ns=first.entry.ns)]
    return "\n".join(lines) + "\n"


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
        yield f"{process.title} is on machine {process.host}; {_clock_error(process)}"


def _clock_error(process: ProcessRecording) -> str:
    return f"its times are exact to ±{process.clock_error_s * 1e3:.2f} ms"


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
        status = f"HTTP {end.a}" if end.a else "no response"
        return f"finished after {took_s:.3f} s, {status}, {end.b} tokens, {end.reason}"
    frontends = [process for process in request.processes() if process.is_frontend]
    if not frontends:
        return "its frontend is gone, or was not asked or did not answer"
    if frontends[0].is_over:
        return f"not finished, its frontend was {frontends[0].state.value}"
    return "not finished"


def _latest(requests: Sequence[RequestRecording]) -> str:
    """Return a table of the latest requests."""
    latest = sorted(requests, key=lambda request: request.steps[0].entry.ns)[-_MOST_SHOWN:]
    rows = [("request", "began", "processes", "outcome")]
    for request in latest:
        first = request.steps[0]
        ago_s = time.time() - first.process.epoch_s(first.entry.ns)
        titles = ", ".join(process.title for process in request.processes())
        rows.append((request.id, f"{ago_s:.1f} s ago", titles, outcome(request)))
    return format_table(rows)


# --- formats of other tools: Chrome traces for Perfetto, and Mooncake's request traces ------------

_LOW_HALF = (1 << 32) - 1
_FIRST_TRACK = 1 << 22  # more than any process id
_ENDS = (RecordedEvent.FINISHED, RecordedEvent.LAST_TOKEN)  # the second replaces the first


def perfetto(requests: Sequence[RequestRecording]) -> Iterator[str]:
    """Yield the parts of a Chrome trace (JSON).

    It has a track per process and request, and in a track a slice from event to event.
    """
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    separator = ""
    tracks: dict[int, int] = {}
    for number, request in enumerate(requests, start=1):
        for event in _trace_events(request, number, tracks):
            yield separator + json.dumps(event)
            separator = ",\n"
    yield "\n]}\n"


def _trace_events(
    request: RequestRecording, number: int, tracks: dict[int, int]
) -> Iterator[dict[str, Any]]:
    """Yield the trace events of a request.

    `tracks`: ids of tracks whose title was yielded, by process.
    """
    for process in request.processes():
        pid = tracks.get(id(process))
        if pid is None:
            pid = process.header.pid
            # Processes of two containers may have the same id.
            if pid in tracks.values():
                pid = _FIRST_TRACK + len(tracks)
            tracks[id(process)] = pid
            title = process.title
            if process.clock_error_s:
                title += f", {_clock_error(process)}"
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": title}}
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": pid,
            "tid": number,
            "args": {"name": request.id},
        }
        own = [
            step
            for step in request.steps
            if step.process is process and step.entry.event not in _HIDDEN
        ]
        for step, following in itertools.zip_longest(own, own[1:]):
            yield _slice(step, following, pid, number)


def _slice(step: Step, following: Step | None, pid: int, number: int) -> dict[str, Any]:
    entry = step.entry
    args = {"choice": entry.choice, "a": entry.a, "b": entry.b, "reason": entry.reason}
    event = {
        "name": entry.name,
        "cat": step.process.kind,
        "pid": pid,
        "tid": number,
        "ts": entry.ns / 1e3,
    }
    if following is None:
        return {"ph": "i", "s": "t", **event, "args": args}
    return {"ph": "X", "dur": (following.entry.ns - entry.ns) / 1e3, **event, "args": args}


def mooncake(requests: Sequence[RequestRecording]) -> Iterator[str]:
    """Yield a line per prompt that was answered, in the order of arrival, as in Mooncake's traces.

    The fields are `timestamp` in ms since the first request, `input_length` and `output_length` in
    tokens, and `hash_ids`: equal numbers stand for equal blocks of 512 tokens after equal blocks.
    Blocks of a prompt beyond those that were recorded count as unique.
    """
    block_ids: dict[tuple[int, int], int] = {}  # (id of the block before, hash) -> id
    first_ns: int | None = None
    for request in sorted(requests, key=lambda request: request.steps[0].entry.ns):
        ends = _ends(request)
        arrived_ns = request.steps[0].entry.ns
        for step in request.steps:
            prompt = step.entry
            if prompt.event != RecordedEvent.TOKENIZED or prompt.choice not in ends:
                continue
            if first_ns is None:
                first_ns = arrived_ns
            num_blocks = -(-prompt.a // BLOCK_TOKENS)  # rounded up
            ids: list[int] = []
            last_id = -1
            for block_hash in itertools.islice(_hashes(request, prompt.choice), num_blocks):
                last_id = block_ids.setdefault((last_id, block_hash), len(block_ids))
                ids.append(last_id)
            fields = {
                "timestamp": (arrived_ns - first_ns) // 1_000_000,
                "input_length": prompt.a,
                "output_length": _num_tokens(request, prompt.choice, ends[prompt.choice]),
                "hash_ids": ids,
            }
            yield f"{json.dumps(fields)}\n"


def _ends(request: RequestRecording) -> dict[int, Entry]:
    """Return the event that ended each choice, by choice."""
    ends: dict[int, Entry] = {}
    for event in _ENDS:
        for step in request.steps:
            if step.entry.event == event:
                ends[step.entry.choice] = step.entry
    return ends


def _hashes(request: RequestRecording, choice: int) -> Iterator[int]:
    """Yield the hashes of a prompt's blocks, and then numbers that are no hashes and unique."""
    for step in request.steps:
        entry = step.entry
        if entry.choice != choice:
            continue
        if entry.event == RecordedEvent.TOKENIZED:
            packed = [entry.c]
        elif entry.event == RecordedEvent.PROMPT_HASHES:
            packed = [entry.a, entry.b, entry.c]
        else:
            continue
        for pair in packed:
            # A number holds the hashes of two blocks, the first in its low half; 0 is none.
            for block_hash in (pair & _LOW_HALF, pair >> 32):
                if block_hash:
                    yield block_hash
    for number in itertools.count(1):
        yield -(request.key << 32 | choice << 20 | number)


def _num_tokens(request: RequestRecording, choice: int, end: Entry) -> int:
    if end.event == RecordedEvent.LAST_TOKEN:
        return end.a
    # An error ended the choice: only its progress was recorded.
    own = [step.entry for step in request.steps if step.entry.choice == choice]
    return max((entry.a for entry in own if entry.event == RecordedEvent.PROGRESS), default=0)
