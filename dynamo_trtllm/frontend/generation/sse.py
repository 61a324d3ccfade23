"""Encode deltas as server-sent events of chat and text completions. Pure: returns bytes and sends nothing.

Each engine step gives one event. The constant part of a choice's events is built once; per event only text is encoded.
"""

from __future__ import annotations

from typing import Any

import orjson

from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.frontend.generation.aggregators import chat_logprobs, echoes, text_logprobs, tool_call_id, usage_object
from dynamo_trtllm.frontend.generation.api_adapter import PreparedRequest, ResponseMeta, Stats
from dynamo_trtllm.frontend.generation.detokenizer import ChoiceDelta, Usage
from dynamo_trtllm.http_server.errors import to_response
from dynamo_trtllm.tokenization.base import Renderer, ToolCallDelta

DONE = b"data: [DONE]\n\n"
_PLACEHOLDER = "\x00"  # \u0000 in JSON, which no other value contains


def event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def split_at_placeholder(value: Any) -> tuple[bytes, bytes]:
    """Return the parts of the event before and after its only `_PLACEHOLDER`."""
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
        before, after = self._around_delta = split_at_placeholder(self._chunk(_PLACEHOLDER))
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


class TextSseEncoder:
    """An encoder of `text_completion` events."""

    def __init__(self, prepared: PreparedRequest[Any]) -> None:
        self._envelope = SseEnvelope("text_completion", prepared.meta, include_usage=prepared.body.include_usage)
        self._choices = [
            _TextChoice(index, self._envelope, echo, prepared.renderer) for index, echo in enumerate(echoes(prepared))
        ]

    def start(self) -> bytes:
        return b"".join(choice.start() for choice in self._choices)

    def delta(self, delta: ChoiceDelta) -> bytes:
        return self._choices[delta.index].delta(delta)

    def finish(self, usage: Usage, stats: Stats | None) -> bytes:
        return self._envelope.finish(usage, stats)

    def error(self, error: DynamoError) -> bytes:
        return self._envelope.error(error)


class _TextChoice:
    def __init__(self, index: int, envelope: SseEnvelope, echo: str, renderer: Renderer) -> None:
        self._index = index
        self._envelope = envelope
        self._echo = echo
        self._renderer = renderer
        self._offset = 0  # characters of the tokens whose log-probabilities were sent
        self._around_text = split_at_placeholder(self._chunk(_PLACEHOLDER))

    def start(self) -> bytes:
        return event(self._chunk(self._echo)) if self._echo else b""

    def delta(self, delta: ChoiceDelta) -> bytes:
        data = self._text(delta)
        return data if delta.finish is None else data + event(self._chunk("", finish=delta.finish))

    def _text(self, delta: ChoiceDelta) -> bytes:
        if delta.logprobs:
            logprobs, self._offset = text_logprobs(delta.logprobs, self._renderer, self._offset)
            return event(self._chunk(delta.content, logprobs=logprobs))
        if delta.content:
            before, after = self._around_text
            return before + orjson.dumps(delta.content) + after
        return b""

    def _chunk(self, text: str, *, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        return self._envelope.wrap({"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish})


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
