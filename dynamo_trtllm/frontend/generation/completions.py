"""Encode deltas as events of chat and text completions, and aggregate them into complete bodies. Pure: sends nothing.

Each engine step gives one event. The constant part of a choice's events is built once; per event only text is encoded.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

import orjson

from dynamo_trtllm.api.common import ResponseMeta, Stats
from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.frontend.generation.api_adapter import PreparedRequest
from dynamo_trtllm.frontend.generation.detokenizer import ChoiceDelta, Usage
from dynamo_trtllm.http_server.errors import to_response
from dynamo_trtllm.messages import TokenLogprob, token_ids
from dynamo_trtllm.tokenization.base import Renderer, ToolCallDelta

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


class TextSseEncoder:
    """An encoder of `text_completion` events."""

    def __init__(self, prepared: PreparedRequest[Any]) -> None:
        self._envelope = SseEnvelope("text_completion", prepared.meta, include_usage=prepared.body.include_usage)
        self._choices = [
            _TextChoice(index, self._envelope, echo, prepared.renderer) for index, echo in enumerate(_echoes(prepared))
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
        self._around_text = split_at_placeholder(self._chunk(PLACEHOLDER))

    def start(self) -> bytes:
        return event(self._chunk(self._echo)) if self._echo else b""

    def delta(self, delta: ChoiceDelta) -> bytes:
        data = self._text(delta)
        return data if delta.finish is None else data + event(self._chunk("", finish=delta.finish))

    def _text(self, delta: ChoiceDelta) -> bytes:
        if delta.logprobs:
            logprobs, self._offset = _text_logprobs(delta.logprobs, self._renderer, self._offset)
            return event(self._chunk(delta.content, logprobs=logprobs))
        if delta.content:
            before, after = self._around_text
            return before + orjson.dumps(delta.content) + after
        return b""

    def _chunk(self, text: str, *, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        return self._envelope.wrap({"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish})


class TextAggregator:
    """Aggregate deltas into a `text_completion` object."""

    def __init__(self, prepared: PreparedRequest[Any]) -> None:
        self._meta = prepared.meta
        self._choices = [
            _TextChoiceAggregate(index, echo, prepared.renderer) for index, echo in enumerate(_echoes(prepared))
        ]

    def push(self, delta: ChoiceDelta) -> None:
        self._choices[delta.index].push(delta)

    def body(self, usage: Usage, stats: Stats | None) -> dict[str, Any]:
        return whole_body("text_completion", self._meta, [choice.body() for choice in self._choices], usage, stats)


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
        logprobs = _text_logprobs(self._logprobs, self._renderer, 0)[0] if self._logprobs else None
        return {"index": self._index, "text": "".join(self._text), "logprobs": logprobs, "finish_reason": self._finish}


def _echoes(prepared: PreparedRequest[Any]) -> list[str]:
    """Return the text with which each choice of the response begins; "" without `echo`."""
    plan = prepared.plan
    return [choice_request.echo for choice_request in plan.choices[:: plan.candidates] for _ in range(plan.keep)]


def _text_logprobs(logprobs: Sequence[TokenLogprob], renderer: Renderer, offset: int) -> tuple[dict[str, Any], int]:
    """Return the `logprobs` object and the offset after its tokens, in characters from the start of the response."""
    tokens, offsets, top = [], [], []
    for each in logprobs:
        text = renderer.decode(token_ids((each.token_id,)))
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        top.append({renderer.decode(token_ids((token_id,))): finite(logprob) for token_id, logprob in each.top})
    values = [finite(each.logprob) for each in logprobs]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}, offset
