"""Format recorded events as text for people."""

from __future__ import annotations

from typing import Final

from dynamo_trtllm.observability.recorded_shares import unpacked_shares
from dynamo_trtllm.observability.recorder import NO_COST, RecordedEvent
from dynamo_trtllm.observability.recordings import Entry, ProcessRecording, RequestRecording
from dynamo_trtllm.protocol.counted import counted

HIDDEN = (RecordedEvent.PROMPT_HASHES,)  # events with data that only a trace shows
_OF_ALL_CHOICES = (RecordedEvent.RECEIVED, RecordedEvent.FINISHED)


def describe(entry: Entry, request: RequestRecording) -> str:
    """Return an event and its values as text."""
    text = entry.name
    is_of_request = bool(entry.key)
    has_choices = any(step.entry.choice for step in request.steps)
    if is_of_request and has_choices and entry.event not in _OF_ALL_CHOICES:
        text += f" (choice {entry.choice})"
    return text + _values(entry)


# What the numbers and the reason of an event mean, for `str.format`.
_MEANINGS: Final[dict[int, str]] = {
    RecordedEvent.TOKENIZED: ": {prompt_tokens}, at most {output_tokens}",
    RecordedEvent.RESERVING_SLOT: ": at {a:x}",
    RecordedEvent.CALL_SENT: ": {reason} at {a:x}",
    RecordedEvent.PROGRESS: ": {tokens}",
    RecordedEvent.LAST_TOKEN: ": {tokens}, {reason}",
    RecordedEvent.CALL_ENDED: ": {tokens}, {reason}",
    RecordedEvent.CALL_RECEIVED: ": {reason} of {prompt_tokens}",
    RecordedEvent.KV_PUBLISHED: ": {a} bytes",
    RecordedEvent.CONNECTION_LOST: ": {reason}",
    RecordedEvent.PEER_LOST: ": {reason}",
    RecordedEvent.CONNECTION_AWAITED: ": {reason}",
    RecordedEvent.CONNECTED: ": {reason}",
}


def _values(entry: Entry) -> str:
    # The comments of `RecordedEvent` say what `a` and `b` mean.
    a, b = entry.a, entry.b
    reason = entry.reason
    match entry.event:
        case RecordedEvent.PLACED:
            shares = unpacked_shares(entry.c)
            decode = f"{b:x}{_share(shares.decode)}"
            if not a:
                return f": {decode}"
            return f": prefill {a:x}{_share(shares.prefill)}, decode {decode}"
        case RecordedEvent.PLACED_BY_COST:
            next_cost = "none" if entry.c == NO_COST else entry.c
            return f": {reason}, {a:x} costs {b} (next {next_cost})"
        case RecordedEvent.PATH_CHOSEN:
            outcome = f"requests that miss a limit: {entry.c}" if entry.c else "within the limits"
            times = f"first token after {a / 1e3:.0f} ms, gaps of {b / 1e3:.0f} ms"
            return f": {reason}, predicted {times}, {outcome}"
        case RecordedEvent.WAITING_FOR_WORKERS:
            return f": {quarantined(entry)}" if b else ""
        case RecordedEvent.CALL_FAILED:
            outcome = "going on" if b else "the request ends"
            return f": {reason} at {a:x}, {outcome}"
        case RecordedEvent.SHARES_CHANGED:
            return f": revision {b} of epoch {a}" if b else ": those that workers registered"
        case RecordedEvent.FINISHED:
            return (
                f": HTTP {a}, {counted(b, 'token')}, {reason}" if a else f": no response, {reason}"
            )
        case RecordedEvent.KV_FETCH_STARTED:
            return f": {b} bytes from {a:x}" if b else f": from {a:x}"
    return _MEANINGS.get(entry.event, "").format(
        a=a,
        reason=reason,
        tokens=counted(a, "token"),
        prompt_tokens=counted(a, "prompt token"),
        output_tokens=counted(b, "output token"),
    )


def _share(share: float | None) -> str:
    """Return the share of an elastic worker as text; "" for one of a fixed role."""
    return "" if share is None else f" (elastic, share {share:g})"


def quarantined(waiting: Entry) -> str:
    """Return the quarantined pair for which a request waits, as text."""
    prefill_id = waiting.a
    decode_id = waiting.b
    name = f"instance {decode_id:x}"
    if prefill_id:
        name = f"pair {prefill_id:x} -> {decode_id:x}"
    return f"{name} is quarantined, because its KV transfers failed"


def clock_error(process: ProcessRecording) -> str:
    """Return the error of the times of a process on another machine, as text."""
    return f"its times are exact to ±{process.clock_error_s * 1e3:.2f} ms"
