"""Build what the events and bodies of chat and text completions share. Pure: returns bytes and sends nothing."""

from __future__ import annotations

import math
from typing import Any

import orjson

from dynamo_trtllm.api.common import ResponseMeta, Stats
from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.frontend.generation.detokenizer import Usage
from dynamo_trtllm.http_server.errors import to_response

DONE = b"data: [DONE]\n\n"
PLACEHOLDER = "\x00"  # \u0000 in JSON, which no other value contains
LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity


def event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def split_at_placeholder(value: Any) -> tuple[bytes, bytes]:
    """Return the parts of the event before and after its only `PLACEHOLDER`."""
    before, after = event(value).split(b'"\\u0000"')
    return before, after


class SseEnvelope:
    """The parts of a stream that chat and text completions share: the object around a choice, and the end."""

    def __init__(self, kind: str, meta: ResponseMeta, *, include_usage: bool) -> None:
        self._base = {"id": meta.id, "object": kind, "created": meta.created, "model": meta.model}
        self._include_usage = include_usage

    def wrap(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._base | {"choices": [choice]}
        return chunk | {"usage": None} if self._include_usage else chunk

    def finish(self, usage: Usage, stats: Stats | None) -> bytes:
        if not self._include_usage and stats is None:
            return DONE
        totals: dict[str, Any] = self._base | {"choices": [], "usage": usage_object(usage)}
        return event(totals if stats is None else totals | {"dynamo_trtllm": stats}) + DONE

    @staticmethod
    def error(error: DynamoError) -> bytes:
        return event(to_response(error).body) + DONE


def whole_body(
    kind: str, meta: ResponseMeta, choices: list[dict[str, Any]], usage: Usage, stats: Stats | None
) -> dict[str, Any]:
    """Return the body of a complete response. `kind`: its `object`."""
    body = {"id": meta.id, "object": kind, "created": meta.created, "model": meta.model}
    body |= {"choices": choices, "usage": usage_object(usage)}
    return body if stats is None else body | {"dynamo_trtllm": stats}


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can express."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
