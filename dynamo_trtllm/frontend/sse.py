"""Pieces → server-sent events. What stays equal within a request is built once; per event only the text is encoded.

One event per engine step. Pure: bytes out, nothing sent.
"""

from __future__ import annotations

from typing import Any, Protocol

import orjson

from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.frontend.answer import Heading, Stats, chat_logprobs, text_logprobs, tool_call_id, usage_object
from dynamo_trtllm.frontend.errors import answer
from dynamo_trtllm.frontend.postprocess import Piece, Usage
from dynamo_trtllm.render.base import Renderer, ToolCallDelta

DONE = b"data: [DONE]\n\n"
_HOLE = "\x00"  # in JSON spelled \u0000, which none of our other values holds


class Events(Protocol):
    """The events of one streamed answer."""

    def opening(self) -> bytes:
        """Before the first piece."""
        ...

    def piece(self, piece: Piece) -> bytes:
        """No bytes for a piece that adds nothing."""
        ...

    def closing(self, finish: str, usage: Usage, stats: Stats | None) -> bytes:
        """The reason, the usage when the client asked for it or for statistics, and the end mark."""
        ...


def event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def error_events(error: DynamoError) -> bytes:
    """For an error after the headers were sent: the client sees it as an event, and an end."""
    return event(answer(error).body) + DONE


def split_at_hole(value: Any) -> tuple[bytes, bytes]:
    """The event around the one `_HOLE` in it, as (before, after)."""
    before, after = event(value).split(b'"\\u0000"')
    return before, after


class ChatEvents:
    """`chat.completion.chunk` objects."""

    def __init__(self, heading: Heading, renderer: Renderer, include_usage: bool) -> None:
        self._renderer = renderer
        self._include_usage = include_usage
        self._base = {"id": heading.id, "object": "chat.completion.chunk", "created": heading.created}
        self._base |= {"model": heading.model}
        self._around_delta = split_at_hole(self._chunk(_HOLE))
        before, after = self._around_delta
        self._around_content = (before + b'{"content":', b"}" + after)
        self._around_reasoning = (before + b'{"reasoning_content":', b"}" + after)

    def opening(self) -> bytes:
        return event(self._chunk({"role": "assistant", "content": ""}))

    def piece(self, piece: Piece) -> bytes:
        if piece.logprobs:
            return event(self._chunk(self._delta(piece), logprobs=chat_logprobs(piece.logprobs, self._renderer)))
        if piece.tool_calls or (piece.content and piece.reasoning):
            before, after = self._around_delta
            return before + orjson.dumps(self._delta(piece)) + after
        if piece.content:
            before, after = self._around_content
            return before + orjson.dumps(piece.content) + after
        if piece.reasoning:
            before, after = self._around_reasoning
            return before + orjson.dumps(piece.reasoning) + after
        return b""

    def closing(self, finish: str, usage: Usage, stats: Stats | None) -> bytes:
        last = event(self._chunk({}, finish=finish))
        return last + _totals(self._base, usage, stats, wanted=self._include_usage) + DONE

    def _chunk(self, delta: Any, *, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = self._base | {"choices": [choice]}
        return chunk | {"usage": None} if self._include_usage else chunk

    @staticmethod
    def _delta(piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.content:
            delta["content"] = piece.content
        if piece.tool_calls:
            delta["tool_calls"] = [_tool_call(call) for call in piece.tool_calls]
        return delta


class TextEvents:
    """`text_completion` objects."""

    def __init__(self, heading: Heading, renderer: Renderer, include_usage: bool) -> None:
        self._renderer = renderer
        self._include_usage = include_usage
        self._offset = 0  # characters of the tokens whose log-probabilities were sent
        self._base = {"id": heading.id, "object": "text_completion", "created": heading.created}
        self._base |= {"model": heading.model}
        self._around_text = split_at_hole(self._chunk(_HOLE))

    def opening(self) -> bytes:
        return b""

    def piece(self, piece: Piece) -> bytes:
        if piece.logprobs:
            logprobs, self._offset = text_logprobs(piece.logprobs, self._renderer, self._offset)
            return event(self._chunk(piece.content, logprobs=logprobs))
        if piece.content:
            before, after = self._around_text
            return before + orjson.dumps(piece.content) + after
        return b""

    def closing(self, finish: str, usage: Usage, stats: Stats | None) -> bytes:
        last = event(self._chunk("", finish=finish))
        return last + _totals(self._base, usage, stats, wanted=self._include_usage) + DONE

    def _chunk(self, text: str, *, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
        chunk = self._base | {"choices": [choice]}
        return chunk | {"usage": None} if self._include_usage else chunk


def _totals(base: dict[str, Any], usage: Usage, stats: Stats | None, *, wanted: bool) -> bytes:
    if not wanted and stats is None:
        return b""
    totals: dict[str, Any] = base | {"choices": [], "usage": usage_object(usage)}
    return event(totals if stats is None else totals | {"dynamo_trtllm": stats})


def _tool_call(call: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    function = {"name": call.name} | function
    return {"index": call.index, "id": tool_call_id(), "type": "function", "function": function}
