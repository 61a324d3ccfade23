"""Harmony output to deltas: analysis is reasoning, final is content, calls of functions are tool calls.

It never raises for what a model writes, never shows a marker and never waits for more than one message header.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import openai_harmony as oh

from dynamo_trtllm.messages import TokenIds
from dynamo_trtllm.render.base import Delta, ToolCallDelta
from dynamo_trtllm.render.vocabulary import FIRST_SPECIAL

_RETURN: Final = 200002
_CHANNEL: Final = 200005
_START: Final = 200006
_END: Final = 200007
_MESSAGE: Final = 200008
_CALL: Final = 200012
_ENDS: Final = frozenset((_RETURN, _END, _CALL))
_MAX_HEADER_TOKENS: Final = 96  # a longer header is none: the longest tool name OpenAI allows is 64 characters
_RECIPIENT: Final = b" to="  # the only text that may come before the first control token of a turn
_PEOPLE: Final = frozenset(("all", "user", "assistant"))


class _In(Enum):
    """Where the next token stands."""

    HEADER = auto()
    BODY = auto()
    BETWEEN = auto()  # after the end of a message


class _Goes(Enum):
    """Where the text of the current body goes."""

    CONTENT = auto()
    REASONING = auto()
    ARGUMENTS = auto()


@dataclass(slots=True)
class _Collected:
    """The delta of one push while it grows."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, tuple[str | None, list[str]]] = field(default_factory=dict)
    reasoning_tokens: int = 0

    def delta(self) -> Delta:
        calls = tuple(
            ToolCallDelta(index=index, name=name, arguments="".join(parts))
            for index, (name, parts) in self.calls.items()
        )
        return Delta(
            content="".join(self.content),
            reasoning="".join(self.reasoning),
            tool_calls=calls,
            reasoning_tokens=self.reasoning_tokens,
        )


class HarmonyParser:
    """OutputParser of one assistant turn, which begins after `<|start|>assistant`.

    openai-harmony reads the headers; bodies are decoded here, so that bytes which are no UTF-8 hold nothing back.
    What is not harmony is content, control tokens left out: a header that openai-harmony refuses, that is longer
    than 96 tokens or is cut off by an end token, and text between messages. A header that the end of the output
    cuts off is dropped.
    """

    def __init__(self, encoding: oh.HarmonyEncoding, token_bytes: Callable[[int], bytes]) -> None:
        self._encoding = encoding
        self._token_bytes = token_bytes  # no bytes for control tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._state = _In.HEADER
        self._goes = _Goes.CONTENT
        self._header: list[int] = []
        self._calls = 0
        self._out = _Collected()

    def push(self, token_ids: TokenIds) -> Delta:
        self._out = _Collected()
        run: list[int] = []  # body tokens not decoded yet
        for token_id in token_ids:
            if self._state is _In.BODY and token_id < FIRST_SPECIAL:
                run.append(token_id)
                continue
            if run:
                self._body(run)
                run = []
            if token_id >= FIRST_SPECIAL:
                self._control(token_id)
            else:
                self._text(token_id)
        if run:
            self._body(run)
        return self._out.delta()

    def finish(self) -> Delta:
        self._out = _Collected()
        if self._header and self._header[0] < FIRST_SPECIAL:
            self._header_is_text()
        self._flush()
        return self._out.delta()

    def _text(self, token_id: int) -> None:
        """An ordinary token outside a body."""
        if self._state is _In.BETWEEN:
            self._open(_Goes.CONTENT)
            self._body([token_id])
            return
        self._header.append(token_id)
        if len(self._header) > _MAX_HEADER_TOKENS or not self._can_be_header():
            self._header_is_text()

    def _control(self, token_id: int) -> None:
        if token_id == _MESSAGE and self._state is _In.HEADER:
            self._end_header()
        elif token_id == _CHANNEL and self._state is _In.HEADER:
            self._header.append(token_id)
        elif token_id in (_START, _CHANNEL):  # a start without an end before it, or an end without a start after it
            self._end_message()
            self._state = _In.HEADER
            self._header = [token_id]
        elif token_id in _ENDS:
            self._end_message()
        elif self._state is _In.HEADER:
            self._header.append(token_id)

    def _can_be_header(self) -> bool:
        """False as soon as the text before the first control token can't become a recipient."""
        if self._header[0] >= FIRST_SPECIAL or len(self._header) > len(_RECIPIENT):
            return True
        text = b"".join(map(self._token_bytes, self._header))
        return text.startswith(_RECIPIENT) or _RECIPIENT.startswith(text)

    def _end_header(self) -> None:
        started = bool(self._header) and self._header[0] == _START
        parser = oh.StreamableParser(self._encoding, None if started else oh.Role.ASSISTANT)
        try:
            for token_id in (*self._header, _MESSAGE):
                parser.process(token_id)
            channel, recipient = parser.current_channel, parser.current_recipient
        except oh.HarmonyError:
            self._header_is_text()
            return
        self._header = []
        self._address(channel, recipient)

    def _address(self, channel: str | None, recipient: str | None) -> None:
        """A body begins."""
        is_function = recipient is not None and recipient.startswith("functions.")
        if recipient is not None and recipient not in _PEOPLE and (is_function or channel != "analysis"):
            self._open(_Goes.ARGUMENTS)
            self._out.calls[self._calls] = (recipient.removeprefix("functions."), [])
            self._calls += 1
        else:
            self._open(_Goes.REASONING if channel == "analysis" else _Goes.CONTENT)

    def _header_is_text(self) -> None:
        """What was held as a header is none: it is content, and so is what follows up to the next control token."""
        header, self._header = self._header, []
        self._open(_Goes.CONTENT)
        self._body(header)

    def _open(self, goes: _Goes) -> None:
        self._state = _In.BODY
        self._goes = goes

    def _end_message(self) -> None:
        if self._state is _In.HEADER and self._header:
            self._header_is_text()
        self._flush()
        self._state = _In.BETWEEN
        self._goes = _Goes.CONTENT

    def _body(self, ids: list[int]) -> None:
        if self._goes is _Goes.REASONING:
            self._out.reasoning_tokens += len(ids)
        self._put(self._decoder.decode(b"".join(map(self._token_bytes, ids))))

    def _flush(self) -> None:
        self._put(self._decoder.decode(b"", final=True))
        self._decoder.reset()

    def _put(self, text: str) -> None:
        if not text:
            return
        match self._goes:
            case _Goes.CONTENT:
                self._out.content.append(text)
            case _Goes.REASONING:
                self._out.reasoning.append(text)
            case _Goes.ARGUMENTS:
                self._out.calls.setdefault(self._calls - 1, (None, []))[1].append(text)
