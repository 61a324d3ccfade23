"""Aggregate deltas into complete chat and text completions, and build the JSON that streamed responses share."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

from dynamo_trtllm.frontend.generation.api_adapter import PreparedRequest, ResponseMeta, Stats
from dynamo_trtllm.frontend.generation.detokenizer import ChoiceDelta, Usage
from dynamo_trtllm.messages import TokenLogprob, token_ids
from dynamo_trtllm.tokenization.base import Renderer

LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity
HALF_CHARACTER = "\ufffd"


class ChatAggregator:
    """Aggregate deltas into a `chat.completion` object."""

    def __init__(self, prepared: PreparedRequest[Any]) -> None:
        self._meta = prepared.meta
        self._choices = [_ChatChoiceAggregate(index, prepared.renderer) for index in range(prepared.answers)]

    def push(self, delta: ChoiceDelta) -> None:
        self._choices[delta.index].push(delta)

    def body(self, usage: Usage, stats: Stats | None) -> dict[str, Any]:
        return _whole("chat.completion", self._meta, [choice.body() for choice in self._choices], usage, stats)


class _ChatChoiceAggregate:
    def __init__(self, index: int, renderer: Renderer) -> None:
        self._index = index
        self._renderer = renderer
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[str, list[str]]] = {}
        self._logprobs: list[TokenLogprob] = []
        self._finish: str | None = None

    def push(self, delta: ChoiceDelta) -> None:
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        self._logprobs.extend(delta.logprobs)
        for call in delta.tool_calls:
            if call.name is not None:
                self._calls[call.index] = (call.name, [])
            self._calls[call.index][1].append(call.arguments)
        self._finish = delta.finish

    def body(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content), "refusal": None}
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = reasoning
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {"id": tool_call_id(), "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}
                for name, arguments in self._calls.values()
            ]
        logprobs = chat_logprobs(self._logprobs, self._renderer) if self._logprobs else None
        return {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": self._finish}


class TextAggregator:
    """Aggregate deltas into a `text_completion` object."""

    def __init__(self, prepared: PreparedRequest[Any]) -> None:
        self._meta = prepared.meta
        self._choices = [
            _TextChoiceAggregate(index, echo, prepared.renderer) for index, echo in enumerate(echoes(prepared))
        ]

    def push(self, delta: ChoiceDelta) -> None:
        self._choices[delta.index].push(delta)

    def body(self, usage: Usage, stats: Stats | None) -> dict[str, Any]:
        return _whole("text_completion", self._meta, [choice.body() for choice in self._choices], usage, stats)


class _TextChoiceAggregate:
    def __init__(self, index: int, echo: str, renderer: Renderer) -> None:
        self._index = index
        self._renderer = renderer
        self._text = [echo]
        self._logprobs: list[TokenLogprob] = []
        self._finish: str | None = None

    def push(self, delta: ChoiceDelta) -> None:
        self._text.append(delta.content)
        self._logprobs.extend(delta.logprobs)
        self._finish = delta.finish

    def body(self) -> dict[str, Any]:
        logprobs = text_logprobs(self._logprobs, self._renderer, 0)[0] if self._logprobs else None
        return {"index": self._index, "text": "".join(self._text), "logprobs": logprobs, "finish_reason": self._finish}


def _whole(
    kind: str, meta: ResponseMeta, choices: list[dict[str, Any]], usage: Usage, stats: Stats | None
) -> dict[str, Any]:
    body = {"id": meta.id, "object": kind, "created": meta.created, "model": meta.model}
    body |= {"choices": choices, "usage": usage_object(usage)}
    return body if stats is None else body | {"dynamo_trtllm": stats}


def echoes(prepared: PreparedRequest[Any]) -> list[str]:
    """Return the text with which each choice of the response begins; "" without `echo`."""
    plan = prepared.plan
    return [choice_request.echo for choice_request in plan.choices[:: plan.candidates] for _ in range(plan.keep)]


def tool_call_id() -> str:
    """Return a new id. It is unique, because clients send it back in later turns together with other ids."""
    return f"call-{secrets.token_hex(8)}"


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def chat_logprobs(logprobs: Sequence[TokenLogprob], renderer: Renderer) -> dict[str, Any]:
    content = []
    for each in logprobs:
        top = [_token(token_id, logprob, renderer) for token_id, logprob in each.top]
        content.append(_token(each.token_id, each.logprob, renderer) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _token(token_id: int, logprob: float, renderer: Renderer) -> dict[str, Any]:
    text = renderer.decode(token_ids((token_id,)))
    octets = None if HALF_CHARACTER in text else list(text.encode())  # null: the token is only part of a character
    return {"token": text, "logprob": _finite(logprob), "bytes": octets}


def text_logprobs(logprobs: Sequence[TokenLogprob], renderer: Renderer, offset: int) -> tuple[dict[str, Any], int]:
    """Return the `logprobs` object and the offset after its tokens, in characters from the start of the response."""
    tokens, offsets, top = [], [], []
    for each in logprobs:
        text = renderer.decode(token_ids((each.token_id,)))
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        top.append({renderer.decode(token_ids((token_id,))): _finite(logprob) for token_id, logprob in each.top})
    values = [_finite(each.logprob) for each in logprobs]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}, offset


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
