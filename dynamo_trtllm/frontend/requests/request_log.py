"""Log one line for each request that has ended."""

from __future__ import annotations

import logging

from dynamo_trtllm.errors import DynamoError, RequestError
from dynamo_trtllm.frontend.requests.answer import Answer, tokens_per_s
from dynamo_trtllm.frontend.requests.timeline import (
    RequestEnd,
    RequestTimeline,
    TimelineSubscriber,
    seconds_by_phase,
)
from dynamo_trtllm.sanitize import shorten

log = logging.getLogger(__name__)

_MESSAGE_CHARS = 300  # longest error message in the log line
_SHOWN_S = 0.0001  # shorter times are not in the log line


class RequestLog(TimelineSubscriber):
    """Writes the log line of each request."""

    def ended(self, timeline: RequestTimeline, end: RequestEnd) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        # Unlike `log.info`, this does not look for the line of code, which takes CPU time.
        args = (timeline.facts.unique_id[:8], _summary(timeline, end))
        text = "request %s ended: %s"
        log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, text, args, None))


def _summary(timeline: RequestTimeline, end: RequestEnd) -> str:
    """Return the known facts of the request as name=value, without empty values."""
    phases = seconds_by_phase(end.phases)
    shown = [f"{name}:{seconds:.4f}s" for name, seconds in phases.items() if seconds >= _SHOWN_S]
    known = {
        "status": end.status,
        "path": timeline.facts.path,
        "id": None,
        "model": timeline.model,
        "prefill": None,
        "decode": None,
        "isl": end.usage.prompt_tokens,
        "osl": end.usage.completion_tokens,
        "cached_tokens": end.usage.cached_tokens,
        "queued": _seconds(phases.get("frontend_queue", 0.0)),
        "ttft": None,
        "tpot": None,
        "phases": ",".join(shown),
        "finish": _finish_text(end.outcome, timeline.answer),
    }
    answer = timeline.answer
    if answer is not None:
        known["id"] = answer.id
        known["prefill"] = answer.prefill_ids()
        known["decode"] = answer.decode_ids()
        first_s = answer.first_s()
        if first_s is not None:
            known["ttft"] = _seconds(first_s - timeline.begun_s)
        rate = tokens_per_s(answer.choices)
        if rate:
            known["tpot"] = _seconds(len(answer.choices) / rate)
    return " ".join(f"{name}={value}" for name, value in known.items() if value)


def _finish_text(outcome: str | DynamoError, answer: Answer | None) -> str:
    """Return how the request ended, for the log line."""
    if isinstance(outcome, DynamoError):
        param = ""
        if isinstance(outcome, RequestError) and outcome.field:
            param = f" param={outcome.field}"
        # The message may quote the client, so it is shortened.
        return f"{outcome.code}{param}: {shorten(outcome.message, _MESSAGE_CHARS)}"
    if outcome == "ok" and answer is not None:
        return answer.finish_reasons() or "ok"
    return outcome


def _seconds(value: float) -> str | None:
    """Format a time in seconds; None if it rounds to zero."""
    return f"{value:.4f}s" if value >= _SHOWN_S else None
