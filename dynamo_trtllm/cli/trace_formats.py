"""Write recorded requests in formats of other tools: Chrome traces for Perfetto, and Mooncake's."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from dynamo_trtllm.observability.event_text import HIDDEN, clock_error
from dynamo_trtllm.observability.recorder import BLOCK_TOKENS, RecordedEvent
from dynamo_trtllm.observability.recordings import Entry, RequestRecording, Step
from dynamo_trtllm.protocol.number_types import ceil_div

_FIRST_TRACK = 1 << 22  # Linux gives no process this id or a higher one
# A choice may have both events. The last token counts then, because it has the number of tokens.
_ENDS = (RecordedEvent.FINISHED, RecordedEvent.LAST_TOKEN)


def perfetto(requests: Sequence[RequestRecording]) -> Iterator[str]:
    """Yield the parts of a Chrome trace (JSON).

    The trace has a track per process and request, and in each track a slice from event to event.
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

    `tracks` has the id of each track whose title was yielded, by `id` of its process.
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
                title += f", {clock_error(process)}"
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
            if step.process is process and step.entry.event not in HIDDEN
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
    # The last event of a track has no length.
    if following is None:
        return {"ph": "i", "s": "t", **event, "args": args}
    return {"ph": "X", "dur": (following.entry.ns - entry.ns) / 1e3, **event, "args": args}


def mooncake(requests: Sequence[RequestRecording]) -> Iterator[str]:
    """Yield a line per prompt that was answered, in the order of arrival, as in Mooncake's traces.

    The fields are `timestamp` in ms since the first request, `input_length` and `output_length` in
    tokens, and `hash_ids`: equal numbers stand for equal blocks of 512 tokens after equal blocks.
    Blocks of a prompt whose hashes were not recorded count as unique.
    """
    # The id of a block by the id of the block before it (-1: it is the first one) and its hash.
    block_ids: dict[tuple[int, int], int] = {}
    first_ns: int | None = None
    for request in sorted(requests, key=lambda request: request.began_epoch_ns):
        ends = _ends(request)
        arrived_ns = request.began_epoch_ns
        for step in request.steps:
            prompt = step.entry
            if prompt.event != RecordedEvent.TOKENIZED or prompt.choice not in ends:
                continue
            num_output_tokens = _num_tokens(request, prompt.choice, ends[prompt.choice])
            if num_output_tokens == 0:  # it failed before its first token
                continue
            if first_ns is None:
                first_ns = arrived_ns
            num_blocks = ceil_div(prompt.num_tokens, BLOCK_TOKENS)
            ids: list[int] = []
            last_id = -1
            for block_hash in itertools.islice(_hashes(request, prompt.choice), num_blocks):
                last_id = block_ids.setdefault((last_id, block_hash), len(block_ids))
                ids.append(last_id)
            fields = {
                "timestamp": (arrived_ns - first_ns) // 1_000_000,
                "input_length": prompt.num_tokens,
                "output_length": num_output_tokens,
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
    """Yield the hashes of a prompt's blocks, and then unique numbers that are no hashes."""
    for step in request.steps:
        entry = step.entry
        if entry.choice != choice:
            continue
        if entry.event == RecordedEvent.TOKENIZED:
            hashes = [entry.c]
        elif entry.event == RecordedEvent.PROMPT_HASHES:
            hashes = [entry.a, entry.b, entry.c]
        else:
            continue
        for block_hash in hashes:
            if block_hash:  # 0: the prompt has no further block
                yield block_hash
    # Hashes are not negative, so these numbers differ from all hashes. Each stands for one block.
    for number in itertools.count(1):
        yield -(request.key << 32 | choice << 20 | number)


def _num_tokens(request: RequestRecording, choice: int, end: Entry) -> int:
    """Return how many tokens the engine generated for a choice; 0: it was not answered."""
    if end.event == RecordedEvent.LAST_TOKEN:
        # The token that ends an answer is not part of the output, but takes a step.
        return max(end.num_tokens, 1)
    # An error ended the choice: only its progress was recorded.
    own = [step.entry for step in request.steps if step.entry.choice == choice]
    progress = [entry.num_tokens for entry in own if entry.event == RecordedEvent.PROGRESS]
    return max(progress, default=0)
