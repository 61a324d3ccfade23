"""Pieces → server-sent events. What stays equal within a choice is built once; per event only the text is encoded.

One event per engine step. Pure: bytes out, nothing sent.
"""

from __future__ import annotations

from typing import Any

import orjson

from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.frontend.aggregators import chat_logprobs, echoes, text_logprobs, tool_call_id, usage_object
from dynamo_trtllm.frontend.api_adapter import PreparedRequest, ResponseMeta, Stats
from dynamo_trtllm.frontend.detokenizer import ChoiceDelta, Usage
from dynamo_trtllm.http_server.errors import to_response
from dynamo_trtllm.tokenization.base import Renderer, ToolCallDelta

DONE = b"data: [DONE]\n\n"
_HOLE = "\x00"  # JSON writes it as \u0000, which none of our other values holds


def event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def split_at_hole(value: Any) -> tuple[bytes, bytes]:
    """The event around the one `_HOLE` in it, as (before, after)."""
    before, after = event(value).split(b'"\\u0000"')
    return before, after


class SseEnvelope:
    """What both dialects put around a choice, and how their streams end."""

    def __init__(self, kind: str, heading: ResponseMeta, *, include_usage: bool) -> None:
        self._base = {"id": heading.id, "object": kind, "created": heading.created, "model": heading.model}
        self._include_usage = include_usage

    def around(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._base | {"choices": [choice]}
        return chunk | {"usage": None} if self._include_usage else chunk

    def closing(self, usage: Usage, stats: Stats | None) -> bytes:
        if not self._include_usage and stats is None:
            return DONE
        totals: dict[str, Any] = self._base | {"choices": [], "usage": usage_object(usage)}
        return event(totals if stats is None else totals | {"dynamo_trtllm": stats}) + DONE

    @staticmethod
    def failure(error: DynamoError) -> bytes:
        return event(to_response(error).body) + DONE


class ChatSseEncoder:
    """`chat.completion.chunk` objects."""

    def __init__(self, job: PreparedRequest[Any]) -> None:
        self._envelope = SseEnvelope("chat.completion.chunk", job.heading, include_usage=job.body.include_usage)
        self._choices = [_ChatChoice(index, self._envelope, job.renderer) for index in range(job.answers)]

    def opening(self) -> bytes:
        return b"".join(choice.opening() for choice in self._choices)

    def piece(self, piece: ChoiceDelta) -> bytes:
        return self._choices[piece.index].piece(piece)

    def closing(self, usage: Usage, stats: Stats | None) -> bytes:
        return self._envelope.closing(usage, stats)

    def failure(self, error: DynamoError) -> bytes:
        return self._envelope.failure(error)


class _ChatChoice:
    def __init__(self, index: int, envelope: SseEnvelope, renderer: Renderer) -> None:
        self._index = index
        self._envelope = envelope
        self._renderer = renderer
        before, after = self._around_delta = split_at_hole(self._chunk(_HOLE))
        self._before_content, self._before_reasoning = before + b'{"content":', before + b'{"reasoning_content":'
        self._after_text = b"}" + after

    def opening(self) -> bytes:
        return event(self._chunk({"role": "assistant", "content": "", "refusal": None}))

    def piece(self, piece: ChoiceDelta) -> bytes:
        if piece.content and not (piece.finish or piece.reasoning or piece.tool_calls or piece.logprobs):  # nearly all
            return self._before_content + orjson.dumps(piece.content) + self._after_text
        data = self._delta(piece)
        return data if piece.finish is None else data + event(self._chunk({}, finish=piece.finish))

    def _delta(self, piece: ChoiceDelta) -> bytes:
        if piece.logprobs:
            return event(self._chunk(_delta(piece), logprobs=chat_logprobs(piece.logprobs, self._renderer)))
        if piece.tool_calls or (piece.content and piece.reasoning):
            before, after = self._around_delta
            return before + orjson.dumps(_delta(piece)) + after
        if piece.content:
            return self._before_content + orjson.dumps(piece.content) + self._after_text
        if piece.reasoning:
            return self._before_reasoning + orjson.dumps(piece.reasoning) + self._after_text
        return b""

    def _chunk(self, delta: Any, *, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        return self._envelope.around(
            {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        )


class TextSseEncoder:
    """`text_completion` objects."""

    def __init__(self, job: PreparedRequest[Any]) -> None:
        self._envelope = SseEnvelope("text_completion", job.heading, include_usage=job.body.include_usage)
        self._choices = [
            _TextChoice(index, self._envelope, echo, job.renderer) for index, echo in enumerate(echoes(job))
        ]

    def opening(self) -> bytes:
        return b"".join(choice.opening() for choice in self._choices)

    def piece(self, piece: ChoiceDelta) -> bytes:
        return self._choices[piece.index].piece(piece)

    def closing(self, usage: Usage, stats: Stats | None) -> bytes:
        return self._envelope.closing(usage, stats)

    def failure(self, error: DynamoError) -> bytes:
        return self._envelope.failure(error)


class _TextChoice:
    def __init__(self, index: int, envelope: SseEnvelope, echo: str, renderer: Renderer) -> None:
        self._index = index
        self._envelope = envelope
        self._echo = echo
        self._renderer = renderer
        self._offset = 0  # characters of the tokens whose log-probabilities were sent
        self._around_text = split_at_hole(self._chunk(_HOLE))

    def opening(self) -> bytes:
        return event(self._chunk(self._echo)) if self._echo else b""

    def piece(self, piece: ChoiceDelta) -> bytes:
        data = self._text(piece)
        return data if piece.finish is None else data + event(self._chunk("", finish=piece.finish))

    def _text(self, piece: ChoiceDelta) -> bytes:
        if piece.logprobs:
            logprobs, self._offset = text_logprobs(piece.logprobs, self._renderer, self._offset)
            return event(self._chunk(piece.content, logprobs=logprobs))
        if piece.content:
            before, after = self._around_text
            return before + orjson.dumps(piece.content) + after
        return b""

    def _chunk(self, text: str, *, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        return self._envelope.around(
            {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        )


def _delta(piece: ChoiceDelta) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if piece.reasoning:
        delta["reasoning_content"] = piece.reasoning
    if piece.content:
        delta["content"] = piece.content
    if piece.tool_calls:
        delta["tool_calls"] = [_tool_call(call) for call in piece.tool_calls]
    return delta


def _tool_call(call: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    function = {"name": call.name} | function
    return {"index": call.index, "id": tool_call_id(), "type": "function", "function": function}
