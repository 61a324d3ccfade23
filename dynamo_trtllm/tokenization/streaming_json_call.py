"""Parse one tool call, written as a JSON object, while it is generated.

The parser is strict about the top level of the object. Below it, it only matches brackets and quotes: arguments are
passed on as generated, and the client has to validate them.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Generator
from typing import Final, TypeAlias

from dynamo_trtllm.tokenization.base import TOOL_NAME, DeltaBuilder

_ARGUMENTS: Final = frozenset(("arguments", "parameters"))
_KEYS: Final = _ARGUMENTS | {"name", "id", "type"}
_BLANKS: Final = " \t\r\n"
_SCALAR: Final = string.ascii_letters + string.digits + "+.-"
_CLOSERS: Final = {"{": "}", "[": "]"}
_STRING_STOP: Final = re.compile(r'["\\]')
_NESTED_STOP: Final = re.compile(r'["{}\[\]]')
_Waiting: TypeAlias = Generator[None, None, bool]


class _CallText:
    """The text of one call, and what was read of it. Its generators yield where they need more text.

    A generator consumes nothing beyond an error. `parse` and those that read a value return False at the first one.
    """

    def __init__(self, *, needs_arguments: bool) -> None:
        self.text, self.at = "", 0  # the text received last, and where reading goes on
        self.has_begun = False  # the call is certain
        self.name = ""
        self.has_arguments = False  # their key was read
        self.arguments: list[str] = []  # read and not emitted
        self.unseen: list[str] = []  # all other text since the call began, or since the last text of arguments
        self._needs_arguments = needs_arguments

    def parse(self) -> _Waiting:
        """Parse the object."""
        seen: set[str] = set()
        separator = "{"
        while (yield from self._skip(separator)):
            separator = ","
            if (yield from self._peek()) != '"':
                return False
            try:
                key = json.loads((yield from self._string()))
            except ValueError:
                return False
            is_argument = key in _ARGUMENTS
            if key not in _KEYS or key in seen or (is_argument and self.has_arguments):
                return False
            seen.add(key)
            self.has_arguments |= is_argument
            self._begin_if_certain()
            if not (yield from self._skip(":")):
                return False
            if not (yield from (self._argument() if is_argument else self._plain_value(key))):
                return False
            self._begin_if_certain()
        return self._is_certain() and (yield from self._skip("}"))

    def _is_certain(self) -> bool:
        return bool(self.name) and (self.has_arguments or not self._needs_arguments)

    def _begin_if_certain(self) -> None:
        if not self.has_begun and self._is_certain():
            self.has_begun = True
            self.unseen.clear()

    def _take(self, end: int, *, is_argument: bool = False) -> str:
        """Consume the text up to an index, and return it."""
        part, self.at = self.text[self.at : end], end
        if is_argument:
            self.arguments.append(part)
        if not (is_argument and self.has_begun):
            self.unseen.append(part)
        elif part:
            self.unseen.clear()
        return part

    def _end_of(self, chars: str) -> int:
        """Return the index after the run of these characters that begins here."""
        return len(self.text) - len(self.text[self.at :].lstrip(chars))

    def _peek(self) -> Generator[None, None, str]:
        """Consume blanks, and return the character after them."""
        while self._take(self._end_of(_BLANKS)) or self.at == len(self.text):
            if self.at == len(self.text):
                yield
        return self.text[self.at]

    def _skip(self, char: str) -> _Waiting:
        """Consume the next character if it is this one. Otherwise return False."""
        is_found = (yield from self._peek()) == char
        if is_found:
            self._take(self.at + 1)
        return is_found

    def _plain_value(self, key: str) -> _Waiting:
        """Consume a string or, unless it is a name, a number, a literal or null."""
        char = yield from self._peek()
        if char != '"' and (key == "name" or char not in _SCALAR):
            return False
        text = yield from (self._string() if char == '"' else self._scalar())
        try:
            value = json.loads(text)
        except ValueError:
            return False
        if key == "name":
            self.name = value if TOOL_NAME.match(value) else ""
        return bool(self.name) or key != "name"

    def _argument(self) -> _Waiting:
        char = yield from self._peek()
        if char in _CLOSERS:
            return (yield from self._nested())
        if char == '"':
            yield from self._string(is_argument=True)
        elif char in _SCALAR:
            yield from self._scalar(is_argument=True)
        return char == '"' or char in _SCALAR

    def _scalar(self, *, is_argument: bool = False) -> Generator[None, None, str]:
        text = self._take(self._end_of(_SCALAR), is_argument=is_argument)
        while self.at == len(self.text):
            yield
            text += self._take(self._end_of(_SCALAR), is_argument=is_argument)
        return text

    def _string(self, *, is_argument: bool = False) -> Generator[None, None, str]:
        """Consume a string and return it with its quotes."""
        parts, at = list[str](), self.at + 1
        while (stop := _STRING_STOP.search(self.text, at)) is None or stop.group() != '"':
            if stop is not None:
                at = stop.end() + 1
                continue
            at = max(0, at - len(self.text))  # 1: the last character was a backslash
            parts.append(self._take(len(self.text), is_argument=is_argument))
            yield
        return "".join([*parts, self._take(stop.end(), is_argument=is_argument)])

    def _nested(self) -> _Waiting:
        """Consume an object or a list up to its closing bracket."""
        closers, at = [_CLOSERS[self.text[self.at]]], self.at + 1
        while closers:
            stop = _NESTED_STOP.search(self.text, at)
            if stop is None:
                self._take(len(self.text), is_argument=True)
                yield
                at = 0
                continue
            char, at = stop.group(), stop.end()
            if char == '"':
                self._take(at - 1, is_argument=True)
                yield from self._string(is_argument=True)
                at = self.at
            elif char in _CLOSERS:
                closers.append(_CLOSERS[char])
            elif char != closers.pop():
                self._take(at - 1, is_argument=True)
                return False
        self._take(at, is_argument=True)
        return True


class StreamingJsonCall:
    """Incremental parser of `{"name": …, "arguments" or "parameters": …}`, with keys in any order.

    Args:
        index: Index of the call in its deltas.
        needs_arguments: Emit the call only once its name and the key of its arguments are read. By default the name is
            enough.
    """

    def __init__(self, index: int, *, needs_arguments: bool) -> None:
        self.index = index
        self.begun = False  # something was emitted
        self.is_done = False
        self.is_broken = False
        self._call = _CallText(needs_arguments=needs_arguments)
        self._parser = self._call.parse()

    @property
    def unseen(self) -> str:
        """Return the text that was read but not emitted. For an invalid or cut-off object it is content."""
        return "".join(self._call.unseen)

    def feed(self, text: str, out: DeltaBuilder) -> str:
        """Parse text up to the end of the object or the first error.

        Args:
            text: The next text of the output.
            out: Receives the call and its arguments.

        Returns:
            The text that was not parsed.
        """
        call = self._call
        call.text, call.at = text, 0
        try:
            next(self._parser)
        except StopIteration as end:
            self.is_done, self.is_broken = end.value, not end.value
        if call.has_begun and not self.begun:
            self.begun = True
            out.begin_call(self.index, call.name)
        if self.begun:
            out.add_arguments(self.index, "".join(call.arguments))
            call.arguments.clear()
            if self.is_done and not call.has_arguments:
                out.add_arguments(self.index, "{}")
        return text[call.at :]
