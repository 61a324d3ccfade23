"""Parse one tool call, written as a JSON object, while it is generated.

The parser is strict about the top level of the object. Below it, it only matches brackets and quotes: arguments are
passed on as generated, and the client has to validate them.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import Final

from dynamo_trtllm.tokenization.base import TOOL_NAME, DeltaBuilder

_ARGUMENTS: Final = frozenset(("arguments", "parameters"))
_KEYS: Final = _ARGUMENTS | {"name", "id", "type"}
_SPACE: Final = " \t\r\n"
_CLOSERS: Final = {"{": "}", "[": "]"}
_STRING_STOP: Final = re.compile(r'["\\]')
_NESTED_STOP: Final = re.compile(r'["{}\[\]]')
_SCALAR: Final = re.compile(r"[A-Za-z0-9+.\-]*")


class _Position(Enum):
    """State of the parser."""

    OPEN = auto()  # before the object
    KEY = auto()  # before a key
    COLON = auto()
    VALUE = auto()  # before a value
    STRING = auto()  # inside a string, which may be a key
    NESTED = auto()  # inside an object or a list
    SCALAR = auto()
    ENDED = auto()  # a key or a value was read
    AFTER = auto()  # after a value
    DONE = auto()
    BROKEN = auto()


_INSIDE: Final = frozenset((_Position.STRING, _Position.NESTED, _Position.SCALAR))


class StreamingJsonCall:
    """Incremental parser of `{"name": …, "arguments" or "parameters": …}`, with keys in any order.

    Args:
        index: Index of the call in its deltas.
        needs_arguments: Emit the call only once its name and the key of its arguments are read. By default the name is
            enough.
    """

    def __init__(self, index: int, *, needs_arguments: bool) -> None:
        self.begun = False  # something was emitted
        self.index = index
        self._needs_arguments = needs_arguments
        self._position = _Position.OPEN
        self._key: str | None = None  # key of the current value; None while a key is read
        self._seen: set[str] = set()
        self._name = ""
        self._chunks: list[str] = []  # text of the current key or value, except arguments
        self._arguments: list[str] = []  # not emitted yet
        self._unparsed: list[str] = []  # all text read but not emitted
        self._closers: list[str] = []
        self._in_string = False  # inside a string of a nested value
        self._escaped = False  # the last character was a backslash in a string

    @property
    def is_done(self) -> bool:
        return self._position is _Position.DONE

    @property
    def is_broken(self) -> bool:
        return self._position is _Position.BROKEN

    @property
    def unseen(self) -> str:
        """Return the text that was read but not emitted. For an invalid or cut-off object it is content."""
        return "".join(self._unparsed)

    def feed(self, text: str, out: DeltaBuilder) -> str:
        """Parse text up to the end of the object or the first error.

        Args:
            text: The next text of the output.
            out: Receives the call and its arguments.

        Returns:
            The text that was not parsed.
        """
        at = 0
        while at < len(text) and self._position not in (_Position.DONE, _Position.BROKEN):
            before = self._position
            end = self._step(text, at)
            if before in _INSIDE or self._position in _INSIDE:
                self._keep(text[at:end])
            else:
                self._unparsed.append(text[at:end])
            at = end
            if self._position is _Position.ENDED:
                self._position = self._ended()
            self._emit(out)
        return text[at:]

    def _keep(self, text: str) -> None:
        """Store text of a key or a value."""
        if self._key not in _ARGUMENTS:
            self._chunks.append(text)
        else:
            self._arguments.append(text)
        if self._key not in _ARGUMENTS or not self.begun:
            self._unparsed.append(text)
        elif text:
            self._unparsed.clear()

    def _emit(self, out: DeltaBuilder) -> None:
        if not self.begun and self._is_certain():
            self.begun = True
            self._unparsed.clear()
            out.begin_call(self.index, self._name)
        if self.begun:
            out.add_arguments(self.index, "".join(self._arguments))
            self._arguments.clear()
            if self.is_done and not self._seen & _ARGUMENTS:
                out.add_arguments(self.index, "{}")

    def _is_certain(self) -> bool:
        return bool(self._name) and (not self._needs_arguments or bool(self._seen & _ARGUMENTS))

    def _step(self, text: str, at: int) -> int:
        """Parse text within one state, or the first character of the next state; return the index after it."""
        match self._position:
            case _Position.STRING:
                end, is_closed = self._string_end(text, at)
                self._position = _Position.ENDED if is_closed else _Position.STRING
                return end
            case _Position.NESTED:
                return self._nested(text, at)
            case _Position.SCALAR:
                match = _SCALAR.match(text, at)
                end = match.end() if match else at
                self._position = _Position.SCALAR if end == len(text) else _Position.ENDED
                return end
        if text[at] not in _SPACE:
            self._position = self._after(text[at])
        return at if self._position is _Position.BROKEN else at + 1

    def _after(self, char: str) -> _Position:
        """Return the state after a character outside keys and values, or the first character of one."""
        match self._position, char:
            case (_Position.OPEN, "{") | (_Position.AFTER, ","):
                return _Position.KEY
            case (_Position.KEY, '"'):
                self._key = None
                return _Position.STRING
            case (_Position.COLON, ":"):
                return _Position.VALUE
            case (_Position.AFTER, "}"):
                return _Position.DONE if self._is_certain() else _Position.BROKEN
            case (_Position.VALUE, '"'):
                return _Position.STRING
            case (_Position.VALUE, "{" | "[") if self._key in _ARGUMENTS:
                self._closers = [_CLOSERS[char]]
                return _Position.NESTED
            case (_Position.VALUE, _) if self._key != "name" and _SCALAR.fullmatch(char):
                return _Position.SCALAR
            case _:
                return _Position.BROKEN

    def _ended(self) -> _Position:
        """Return the state after the end of a key or a value."""
        text = "".join(self._chunks)
        self._chunks.clear()
        if self._key in _ARGUMENTS:
            return _Position.AFTER
        try:
            value = json.loads(text)
        except ValueError:
            return _Position.BROKEN
        if self._key is None:
            return self._begin_key(value)
        if self._key == "name":
            self._name = value if TOOL_NAME.match(value) else ""
        return _Position.AFTER if self._name or self._key != "name" else _Position.BROKEN

    def _begin_key(self, key: str) -> _Position:
        if key not in _KEYS or key in self._seen or (key in _ARGUMENTS and self._seen & _ARGUMENTS):
            return _Position.BROKEN
        self._key = key
        self._seen.add(key)
        return _Position.COLON

    def _string_end(self, text: str, at: int) -> tuple[int, bool]:
        """Return the index after the closing quote and True, or the end of the text and False."""
        if self._escaped:
            self._escaped = False
            at += 1
        while (match := _STRING_STOP.search(text, at)) is not None:
            if match.group() == '"':
                return match.end(), True
            at = match.end() + 1
            self._escaped = at > len(text)
        return len(text), False

    def _nested(self, text: str, at: int) -> int:
        """Return the index after the closing bracket, at the first bracket that does not match, or the end."""
        while at < len(text):
            if self._in_string:
                at, is_closed = self._string_end(text, at)
                self._in_string = not is_closed
                continue
            match = _NESTED_STOP.search(text, at)
            if match is None:
                return len(text)
            char, at = match.group(), match.end()
            if char == '"':
                self._in_string = True
            elif char in _CLOSERS:
                self._closers.append(_CLOSERS[char])
            elif char != self._closers.pop():
                self._position = _Position.BROKEN
                return at - 1
            elif not self._closers:
                self._position = _Position.ENDED
                return at
        return at
