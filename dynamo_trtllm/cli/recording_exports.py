"""Convert recordings to the formats of other tools: Chrome traces for Perfetto, and Mooncake's request traces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from dynamo_trtllm.observability.recorder import BLOCK_TOKENS, RecordedEvent
from dynamo_trtllm.observability.recordings import Entry, RequestRecording, Step

_LOW = (1 << 32) - 1
_ENDS = (RecordedEvent.FINISHED, RecordedEvent.LAST_TOKEN)  # the second replaces the first


def perfetto(requests: Sequence[RequestRecording]) -> Iterator[str]:
    """Yield the parts of a Chrome trace (JSON): a track per process and request, a slice from event to event."""
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    separator = ""
    titles: set[int] = set()
    for number, request in enumerate(requests, start=1):
        for event in _trace_events(request, number, titles):
            yield separator + json.dumps(event)
            separator = ",\n"
    yield "\n]}\n"


def _trace_events(request: RequestRecording, number: int, titles: set[int]) -> Iterator[dict[str, Any]]:
    """Yield the trace events of a request. `titles`: processes whose title was yielded."""
    for process in request.processes():
        pid = process.header.pid
        if pid not in titles:
            titles.add(pid)
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process.title}}
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": number, "args": {"name": request.id}}
        own = [step for step in request.steps if step.process is process]
        own = [step for step in own if step.entry.event != RecordedEvent.PROMPT_HASHES]
        for step, following in itertools.zip_longest(own, own[1:]):
            yield _slice(step, following, pid, number)


def _slice(step: Step, following: Step | None, pid: int, number: int) -> dict[str, Any]:
    entry = step.entry
    args = {"choice": entry.choice, "a": entry.a, "b": entry.b, "reason": entry.reason}
    event = {"name": entry.name, "cat": step.process.kind, "pid": pid, "tid": number, "ts": entry.ns / 1e3}
    if following is None:
        return {"ph": "i", "s": "t", **event, "args": args}
    return {"ph": "X", "dur": (following.entry.ns - entry.ns) / 1e3, **event, "args": args}


def mooncake(requests: Sequence[RequestRecording]) -> Iterator[str]:
    """Yield a line per prompt that was answered, in the order of arrival, as in Mooncake's traces.

    The fields are `timestamp` in ms since the first request, `input_length` and `output_length` in tokens, and
    `hash_ids`: equal numbers stand for equal blocks of 512 tokens after equal blocks. Blocks of a prompt beyond those
    that were recorded count as unique.
    """
    block_ids: dict[tuple[int, int], int] = {}  # (id of the block before, hash) -> id
    first_ns: int | None = None
    for request in sorted(requests, key=lambda each: each.steps[0].entry.ns):
        ends = {step.entry.choice: step.entry for end in _ENDS for step in request.steps if step.entry.event == end}
        arrived_ns = request.steps[0].entry.ns
        for step in request.steps:
            prompt = step.entry
            if prompt.event != RecordedEvent.TOKENIZED or prompt.choice not in ends:
                continue
            first_ns = arrived_ns if first_ns is None else first_ns
            ids, last = list[int](), -1
            for block_hash in itertools.islice(_hashes(request, prompt.choice), -(-prompt.a // BLOCK_TOKENS)):
                last = block_ids.setdefault((last, block_hash), len(block_ids))
                ids.append(last)
            yield (
                json.dumps(
                    {
                        "timestamp": (arrived_ns - first_ns) // 1_000_000,
                        "input_length": prompt.a,
                        "output_length": _num_tokens(request, prompt.choice, ends[prompt.choice]),
                        "hash_ids": ids,
                    }
                )
                + "\n"
            )


def _hashes(request: RequestRecording, choice: int) -> Iterator[int]:
    """Yield the hashes of a prompt's blocks, and then numbers that are no hashes and unique."""
    for step in request.steps:
        if step.entry.choice == choice and step.entry.event in (RecordedEvent.TOKENIZED, RecordedEvent.PROMPT_HASHES):
            entry = step.entry
            pairs = (entry.c,) if entry.event == RecordedEvent.TOKENIZED else (entry.a, entry.b, entry.c)
            yield from filter(None, (part for pair in pairs for part in (pair & _LOW, pair >> 32)))
    for number in itertools.count(1):
        yield -(request.key << 32 | choice << 20 | number)


def _num_tokens(request: RequestRecording, choice: int, end: Entry) -> int:
    if end.event == RecordedEvent.LAST_TOKEN:
        return end.a
    own = [step.entry for step in request.steps if step.entry.choice == choice]
    return max((entry.a for entry in own if entry.event == RecordedEvent.PROGRESS), default=0)  # an error ended it
