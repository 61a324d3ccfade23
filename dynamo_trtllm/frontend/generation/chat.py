"""Encode deltas as `chat.completion.chunk` events, and aggregate them into a `chat.completion` object. Pure.

Each engine step gives one event. The constant part of a choice's events is built once; per event only text is encoded.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import orjson

from dynamo_trtllm.api.common import Stats
from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.frontend.generation.api_adapter import PreparedRequest
from dynamo_trtllm.frontend.generation.detokenizer import ChoiceDelta, Usage
from dynamo_trtllm.frontend.generation.events import (
    PLACEHOLDER,
    SseEnvelope,
    event,
    finite,
    split_at_placeholder,
    whole_body,
)
from dynamo_trtllm.messages import TokenLogprob, token_ids
from dynamo_trtllm.tokenization.base import Renderer, ToolCallDelta

HALF_CHARACTER = "\ufffd"


class ChatSseEncoder:
    """An encoder of `chat.completion.chunk` events."""

    def __init__(self, prepared: PreparedRequest[Any]) -> None:
        self._envelope = SseEnvelope("chat.completion.chunk", prepared.meta, include_usage=prepared.body.include_usage)
        self._choices = [_ChatChoice(index, self._envelope, prepared.renderer) for index in range(prepared.answers)]

    def start(self) -> bytes:
        return b"".join(choice.start() for choice in self._choices)

    def delta(self, delta: ChoiceDelta) -> bytes:
        return self._choices[delta.index].delta(delta)

    def finish(self, usage: Usage, stats: Stats | None) -> bytes:
        return self._envelope.finish(usage, stats)

    def error(self, error: DynamoError) -> bytes:
        return self._envelope.error(error)


class _ChatChoice:
    def __init__(self, index: int, envelope: SseEnvelope, renderer: Renderer) -> None:
        self._index = index
        self._envelope = envelope
        self._renderer = renderer
        before, after = self._around_delta = split_at_placeholder(self._chunk(PLACEHOLDER))
        self._before_content, self._before_reasoning = before + b'{"content":', before + b'{"reasoning_content":'
        self._after_text = b"}" + after

    def start(self) -> bytes:
        return event(self._chunk({"role": "assistant", "content": "", "refusal": None}))

    def delta(self, delta: ChoiceDelta) -> bytes:
        if delta.content and not (delta.finish or delta.reasoning or delta.tool_calls or delta.logprobs):  # most deltas
            return self._before_content + orjson.dumps(delta.content) + self._after_text
        data = self._delta(delta)
        return data if delta.finish is None else data + event(self._chunk({}, finish=delta.finish))

    def _delta(self, delta: ChoiceDelta) -> bytes:
        if delta.logprobs:
            return event(self._chunk(_delta(delta), logprobs=chat_logprobs(delta.logprobs, self._renderer)))
        if delta.tool_calls or (delta.content and delta.reasoning):
            before, after = self._around_delta
            return before + orjson.dumps(_delta(delta)) + after
        if delta.content:
            return self._before_content + orjson.dumps(delta.content) + self._after_text
        if delta.reasoning:
            return self._before_reasoning + orjson.dumps(delta.reasoning) + self._after_text
        return b""

    def _chunk(self, delta: Any, *, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        return self._envelope.wrap(
            {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        )


def _delta(delta: ChoiceDelta) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.content:
        fields["content"] = delta.content
    if delta.tool_calls:
        fields["tool_calls"] = [_tool_call(call) for call in delta.tool_calls]
    return fields


def _tool_call(call: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    function = {"name": call.name} | function
    return {"index": call.index, "id": tool_call_id(), "type": "function", "function": function}


class ChatAggregator:
    """Aggregate deltas into a `chat.completion` object."""

    def __init__(self, prepared: PreparedRequest[Any]) -> None:
        self._meta = prepared.meta
        self._choices = [_ChatChoiceAggregate(index, prepared.renderer) for index in range(prepared.answers)]

    def push(self, delta: ChoiceDelta) -> None:
        self._choices[delta.index].push(delta)

    def body(self, usage: Usage, stats: Stats | None) -> dict[str, Any]:
        return whole_body("chat.completion", self._meta, [choice.body() for choice in self._choices], usage, stats)


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


def tool_call_id() -> str:
    """Return a new id. It is unique, because clients send it back in later turns together with other ids."""
    return f"call-{secrets.token_hex(8)}"


def chat_logprobs(logprobs: Sequence[TokenLogprob], renderer: Renderer) -> dict[str, Any]:
    content = []
    for each in logprobs:
        top = [_token(token_id, logprob, renderer) for token_id, logprob in each.top]
        content.append(_token(each.token_id, each.logprob, renderer) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _token(token_id: int, logprob: float, renderer: Renderer) -> dict[str, Any]:
    text = renderer.decode(token_ids((token_id,)))
    octets = None if HALF_CHARACTER in text else list(text.encode())  # null: the token is only part of a character
    return {"token": text, "logprob": finite(logprob), "bytes": octets}
