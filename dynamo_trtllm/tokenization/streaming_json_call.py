"""One tool call written as a JSON object, read while it is written. Text in, values out; knows no markers.

Strict about the object's own level; below it only brackets and quotes are counted: arguments are passed on as they are
written, and it is for the client to find out whether they are sound.
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
    OPEN = auto()  # before the object
    KEY = auto()  # before a key
    COLON = auto()
    VALUE = auto()  # before a value
    STRING = auto()  # in one; a key too
    NESTED = auto()  # in an object or a list
    SCALAR = auto()
    ENDED = auto()  # a key or a value was read
    AFTER = auto()  # after a value
    DONE = auto()
    BROKEN = auto()


_INSIDE: Final = frozenset((_Position.STRING, _Position.NESTED, _Position.SCALAR))


class StreamingJsonCall:
    """`{"name": …, "arguments" or "parameters": …}`, keys in any order, given out as call `index` once it is certain:
    at its name, or with `needs_arguments` when the key of the arguments was read too."""

    def __init__(self, index: int, *, needs_arguments: bool) -> None:
        self.begun = False  # something was given out
        self.index = index
        self._needs_arguments = needs_arguments
        self._position = _Position.OPEN
        self._key: str | None = None  # whose value is read; None: a key is read
        self._seen: set[str] = set()
        self._name = ""
        self._piece: list[str] = []  # the key or value being read, arguments left out
        self._arguments: list[str] = []  # not given out yet
        self._unparsed: list[str] = []  # read and not given out
        self._closers: list[str] = []
        self._in_string = False  # of what is nested
        self._escaped = False  # the last character was a backslash in a string

    @property
    def is_done(self) -> bool:
        return self._position is _Position.DONE

    @property
    def is_broken(self) -> bool:
        return self._position is _Position.BROKEN

    @property
    def unseen(self) -> str:
        """What was read and not given out: for a broken or cut-off object, what is left to show."""
        return "".join(self._unparsed)

    def feed(self, text: str, out: DeltaBuilder) -> str:
        """Reads up to the end of the object or the first fault; the rest comes back."""
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
        """Text of a key or a value."""
        if self._key not in _ARGUMENTS:
            self._piece.append(text)
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
        """Reads some text, which is all in one state or the first of the next; returns the place after it."""
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
        """The state after a character that stands outside keys and values, or begins one."""
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
        """The state after a key or a value that was read to its end."""
        piece = "".join(self._piece)
        self._piece.clear()
        if self._key in _ARGUMENTS:
            return _Position.AFTER
        try:
            value = json.loads(piece)
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
        """The place behind the closing quote, or the end of the text; and which it is."""
        if self._escaped:
            self._escaped = False
            at += 1
        while (found := _STRING_STOP.search(text, at)) is not None:
            if found.group() == '"':
                return found.end(), True
            at = found.end() + 1
            self._escaped = at > len(text)
        return len(text), False

    def _nested(self, text: str, at: int) -> int:
        """Up to the closing bracket, the first that does not fit, or the end of the text."""
        while at < len(text):
            if self._in_string:
                at, is_closed = self._string_end(text, at)
                self._in_string = not is_closed
                continue
            found = _NESTED_STOP.search(text, at)
            if found is None:
                return len(text)
            char, at = found.group(), found.end()
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
