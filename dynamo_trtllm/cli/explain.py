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
from dynamo_trtllm.config.base import format_table, recorder_folder
from dynamo_trtllm.config.commands import ExplainConfig
from dynamo_trtllm.config.load import command, process_environment
from dynamo_trtllm.config.parser import CONSOLE
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.observability.recorder import BLOCK_TOKENS, RecordedEvent, check_owner
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
        text, status = report.json() if config.json_output else report.text(), report.exit_status
    elif config.request is not None:
        text, status = "\n".join(map(timeline, requests)), 0
    else:
        text, status = _latest(requests), 0
    sys.stdout.write(text)
    return status


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
        local, reason = Recordings([]), f"{folder} can't be read ({exc.strerror or exc})"
    recordings = local
    if not config.local:
        # it loads the clients of etcd and NATS
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
    width = max(len(row[0]) for row in rows)
    lines += format_table([(row[0].rjust(width), *row[1:]) for row in rows]).splitlines()
    for process in request.processes():
        if process.num_overwritten and process.oldest_ns > first.entry.ns:
            lines.append(f"note: earlier events of {process.title} may be overwritten")
        if process.state is ProcessState.KILLED:
            lines.append(
                f"note: {process.title} (process {process.header.pid}) was killed or crashed"
            )
        elif not process.is_over and process.state is not ProcessState.RUNNING:
            lines.append(
                f"note: {process.title} (process {process.header.pid}) is {process.state.value}"
            )
        if process.clock_error_s:
            lines.append(
                f"note: {process.title} is on machine {process.host}; {_clock_error(process)}"
            )
    return "\n".join(lines) + "\n"


def _clock_error(process: ProcessRecording) -> str:
    return f"its times are exact to ±{process.clock_error_s * 1e3:.2f} ms"


def _with_process_events(request: RequestRecording) -> list[Step]:
    """Return the steps of a request, and what happened to its processes meanwhile."""
    begun_ns, ended_ns = request.steps[0].entry.ns, request.steps[-1].entry.ns
    steps = list(request.steps)
    for process in request.processes():
        steps += [
            Step(process, each)
            for each in process.entries
            if not each.key and begun_ns <= each.ns <= ended_ns
        ]
    return sorted(steps, key=lambda step: step.entry.ns)


def outcome(request: RequestRecording) -> str:
    """Return in a few words how the request ended, or that it runs."""
    ended = request.finished
    if ended is not None:
        took_s = (ended.entry.ns - request.steps[0].entry.ns) / 1e9
        status = f"HTTP {ended.entry.a}" if ended.entry.a else "no response"
        return (
            f"finished after {took_s:.3f} s, {status}, {ended.entry.b} tokens, {ended.entry.reason}"
        )
    frontends = [process for process in request.processes() if process.is_frontend]
    if not frontends:
        return "its frontend is gone, or was not asked or did not answer"
    return (
        f"not finished, its frontend was {frontends[0].state.value}"
        if frontends[0].is_over
        else "not finished"
    )


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

_LOW = (1 << 32) - 1
_FIRST_TRACK = 1 << 22  # more than any process id
_ENDS = (RecordedEvent.FINISHED, RecordedEvent.LAST_TOKEN)  # the second replaces the first


def perfetto(requests: Sequence[RequestRecording]) -> Iterator[str]:
    """Yield the parts of a Chrome trace (JSON): a track per process and request, a slice from event
    to event.
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
        if pid is None:  # containers have equal process ids
            pid = (
                process.header.pid
                if process.header.pid not in tracks.values()
                else _FIRST_TRACK + len(tracks)
            )
            tracks[id(process)] = pid
            title = (
                f"{process.title}, {_clock_error(process)}"
                if process.clock_error_s
                else process.title
            )
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": title}}
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": pid,
            "tid": number,
            "args": {"name": request.id},
        }
        own = [step for step in request.steps if step.process is process]
        own = [step for step in own if step.entry.event != RecordedEvent.PROMPT_HASHES]
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
    for request in sorted(requests, key=lambda each: each.steps[0].entry.ns):
        ends = {
            step.entry.choice: step.entry
            for end in _ENDS
            for step in request.steps
            if step.entry.event == end
        }
        arrived_ns = request.steps[0].entry.ns
        for step in request.steps:
            prompt = step.entry
            if prompt.event != RecordedEvent.TOKENIZED or prompt.choice not in ends:
                continue
            first_ns = arrived_ns if first_ns is None else first_ns
            ids, last = list[int](), -1
            for block_hash in itertools.islice(
                _hashes(request, prompt.choice), -(-prompt.a // BLOCK_TOKENS)
            ):
                last = block_ids.setdefault((last, block_hash), len(block_ids))
                ids.append(last)
            fields = {
                "timestamp": (arrived_ns - first_ns) // 1_000_000,
                "input_length": prompt.a,
                "output_length": _num_tokens(request, prompt.choice, ends[prompt.choice]),
                "hash_ids": ids,
            }
            yield f"{json.dumps(fields)}\n"


def _hashes(request: RequestRecording, choice: int) -> Iterator[int]:
    """Yield the hashes of a prompt's blocks, and then numbers that are no hashes and unique."""
    for step in request.steps:
        if step.entry.choice == choice and step.entry.event in (
            RecordedEvent.TOKENIZED,
            RecordedEvent.PROMPT_HASHES,
        ):
            entry = step.entry
            pairs = (
                (entry.c,)
                if entry.event == RecordedEvent.TOKENIZED
                else (entry.a, entry.b, entry.c)
            )
            yield from filter(None, (part for pair in pairs for part in (pair & _LOW, pair >> 32)))
    for number in itertools.count(1):
        yield -(request.key << 32 | choice << 20 | number)


def _num_tokens(request: RequestRecording, choice: int, end: Entry) -> int:
    if end.event == RecordedEvent.LAST_TOKEN:
        return end.a
    own = [step.entry for step in request.steps if step.entry.choice == choice]
    # an error ended it
    return max((entry.a for entry in own if entry.event == RecordedEvent.PROGRESS), default=0)
