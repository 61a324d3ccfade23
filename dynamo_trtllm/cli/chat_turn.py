"""One turn of a chat in the terminal: streamed events to pieces, pieces to text on a screen. Knows no HTTP."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, TextIO

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # would move the cursor or color what follows
_DIM, _BOLD, _PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"


class Kind(Enum):
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()  # the name of a tool that is called
    ARGUMENTS = auto()


@dataclass(frozen=True, slots=True)
class Shown:
    kind: Kind
    text: str


@dataclass(slots=True)
class ChatTurn:
    """What came of one answer so far. Times are of this side: TTFT includes the way there and back."""

    clock: Callable[[], float] = time.perf_counter
    content: str = ""
    finish: str | None = None
    tokens: int | None = None  # of the answer, reasoning included, as the server counts
    began: float = field(init=False)
    first: float | None = None
    last: float = 0.0

    def __post_init__(self) -> None:
        self.began = self.clock()

    def add(self, event: Mapping[str, Any]) -> Iterator[Shown]:
        """The pieces of a `chat.completion.chunk`."""
        usage = event.get("usage")
        if usage:
            self.tokens = usage.get("completion_tokens")
        for choice in event.get("choices") or ():
            self.finish = choice.get("finish_reason") or self.finish
            for piece in _pieces(choice.get("delta") or {}):
                self.last = self.clock()
                self.first = self.last if self.first is None else self.first
                if piece.kind is Kind.CONTENT:
                    self.content += piece.text
                yield piece

    def report(self) -> str:
        """One line: how soon, how fast, and why it ended where that is not the usual."""
        if self.first is None:
            words = ["no text came"]
        else:
            words = [f"TTFT {(self.first - self.began) * 1e3:.0f} ms"]
        if self.tokens is not None:
            words.append(f"{self.tokens} tokens")
            took = self.last - (self.first or self.last)
            if self.tokens > 1 and took > 0:
                words.append(f"{(self.tokens - 1) / took:.1f} tokens/s")
        if self.finish not in (None, "stop"):
            words.append(f"ended by {self.finish}")
        return ", ".join(words)


def _pieces(delta: Mapping[str, Any]) -> Iterator[Shown]:
    for kind, name in ((Kind.REASONING, "reasoning_content"), (Kind.CONTENT, "content")):
        if delta.get(name):
            yield Shown(kind, delta[name])
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        if function.get("name"):
            yield Shown(Kind.CALL, function["name"])
        if function.get("arguments"):
            yield Shown(Kind.ARGUMENTS, function["arguments"])


class Screen:
    """Writes a turn as it comes: reasoning dim (or labeled, where there are no colors), each part on its own line."""

    def __init__(self, out: TextIO, *, has_colors: bool) -> None:
        self._out = out
        self._has_colors = has_colors
        self._kind: Kind | None = None
        self._is_at_line_start = True

    def show(self, piece: Shown) -> None:
        if piece.kind is not self._kind:
            self._begin(piece.kind)
        text = _CONTROL.sub("", piece.text)
        if piece.kind is Kind.CALL:
            text += " "
        self._write(text)

    def end(self) -> None:
        """After the last piece, or where the answer was left."""
        self._style("")
        if not self._is_at_line_start:
            self._write("\n")
        self._kind = None

    def _begin(self, kind: Kind) -> None:
        if kind is not Kind.ARGUMENTS or self._kind is not Kind.CALL:
            self.end()
        self._kind = kind
        if kind is Kind.REASONING:
            self._style(_DIM)
            self._write("" if self._has_colors else "[reasoning] ")
        elif kind is Kind.CALL:
            self._style(_BOLD)
            self._write("[tool call] ")

    def _style(self, style: str) -> None:
        if self._has_colors:
            self._out.write(_PLAIN + style)

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._is_at_line_start = text.endswith("\n")
            self._out.flush()
