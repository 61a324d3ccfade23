"""Parse tool calls that models without Harmony write into their answer, while the text streams.

Text that is not a call, or stops being one before the call was emitted, is content. The parser is strict about the top
level of a call's JSON object. Below it, it only matches brackets and quotes: arguments are passed on as generated, and
the client has to validate them.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Generator
from typing import Final, TypeAlias

from dynamo_trtllm.tokenization.base import TOOL_NAME, DeltaBuilder, overlap

TOOL_CALL: Final = "<tool_call>"
END_TOOL_CALL: Final = "</tool_call>"
_ARGUMENTS: Final = frozenset(("arguments", "parameters"))
_KEYS: Final = _ARGUMENTS | {"name", "id", "type"}
_BLANKS: Final = re.compile(r"[ \t\r\n]*")
_SCALAR: Final = string.ascii_letters + string.digits + "+.-"
_SCALARS: Final = re.compile(r"[A-Za-z0-9+.\-]*")
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

    def _end_of(self, run: re.Pattern[str]) -> int:
        """Return the index after the run of characters that begins here, without a copy of the text after it."""
        found = run.match(self.text, self.at)
        return self.at if found is None else found.end()

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
        text = self._take(self._end_of(_SCALARS), is_argument=is_argument)
        while self.at == len(self.text):
            yield
            text += self._take(self._end_of(_SCALARS), is_argument=is_argument)
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


class HermesToolCallParser:
    """A parser of calls between <tool_call> and </tool_call>. White space around calls is omitted."""

    def __init__(self) -> None:
        self._held = ""  # text that is not yet content
        self._blanks: list[str] = []  # leading white space; joined only once, because there may be a lot of it
        self._call: StreamingJsonCall | None = None
        self._lead = ""  # text before the object; content if the object is not a call
        self._is_closing = False  # after the object, before its end marker
        self._skips_space = True  # at the beginning and after a call
        self._calls = 0

    def push(self, text: str, out: DeltaBuilder) -> None:
        """Add content and calls to `out`. Text that may be part of a marker or of a call is withheld."""
        while text:
            if self._is_closing:
                text = self._close(text)
            elif self._call is not None:
                text = self._read(self._call, text, out)
            else:
                text = self._content(text, out)

    def finish(self, out: DeltaBuilder) -> None:
        """Add the withheld text to `out`."""
        if self._call is not None and not self._call.begun:
            out.content.append(self._lead + self._call.unseen)
        elif (held := "".join(self._blanks) + self._held) and not self._is_closing:
            out.content.append(held if held.strip() or not self._calls else "")

    def _content(self, text: str, out: DeltaBuilder) -> str:
        if self._skips_space and not self._held and text.isspace():
            self._blanks.append(text)
            return ""
        text, self._held = "".join(self._blanks) + self._held + text, ""
        self._blanks.clear()
        before, marker, rest = text.partition(TOOL_CALL)
        if marker:
            is_shown = not (self._skips_space and before.isspace())
            out.content.append(before if is_shown else "")
            self._lead = TOOL_CALL if is_shown else before + TOOL_CALL
            self._call = StreamingJsonCall(self._calls, needs_arguments=False)
            return rest
        shown = len(text) - overlap(text, TOOL_CALL)
        if self._skips_space and (not text[:shown] or text[:shown].isspace()):
            shown = 0
        else:
            self._skips_space = False
        self._held = text[shown:]
        out.content.append(text[:shown])
        return ""

    def _read(self, call: StreamingJsonCall, text: str, out: DeltaBuilder) -> str:
        rest = call.feed(text, out)
        if call.begun:
            self._calls = max(self._calls, call.index + 1)
        if call.is_done:
            self._call, self._is_closing = None, True
        elif call.is_broken:
            out.content.append(("" if call.begun else self._lead) + call.unseen)
            self._call, self._skips_space = None, False
        return rest

    def _close(self, text: str) -> str:
        """Remove the end marker. Other text after the object is content."""
        text, self._held = self._held + text, ""
        shown = text.lstrip()
        if not shown.startswith(END_TOOL_CALL) and END_TOOL_CALL.startswith(shown):
            self._held = shown
            return ""
        self._is_closing, self._skips_space = False, True
        return shown.removeprefix(END_TOOL_CALL)


class JsonToolCallParser:
    """A parser of answers that are one call object or a list of them. Any other answer is content."""

    def __init__(self) -> None:
        self._expected = "{["  # one of these characters continues a call or the list
        self._held: list[str] = []  # text outside objects that is not yet content
        self._call = StreamingJsonCall(0, needs_arguments=True)
        self._is_in_call = False
        self._is_list = False
        self._is_text = False  # all further text is content

    def push(self, text: str, out: DeltaBuilder) -> None:
        while text:
            if self._is_text:
                out.content.append(text)
                return
            text = self._read(text, out) if self._is_in_call else self._outside(text, out)

    def finish(self, out: DeltaBuilder) -> None:
        is_unfinished = "{" in self._expected and not self._call.index
        if not self._call.begun and (self._is_in_call or is_unfinished):
            out.content.append("".join([*self._held, self._call.unseen]))

    def _outside(self, text: str, out: DeltaBuilder) -> str:
        shown = text.lstrip()
        self._held.append(text[: len(text) - len(shown)])
        if not shown:
            return ""
        char = shown[0]
        if char not in self._expected:
            self._show(out)
            return shown
        if char == "{":
            self._is_in_call = True
            return shown
        self._is_list = True
        self._expected = "" if char == "]" else "{"
        self._held.append(char)
        return shown[1:]

    def _read(self, text: str, out: DeltaBuilder) -> str:
        call = self._call
        rest = call.feed(text, out)
        if call.begun:
            self._held.clear()
        if call.is_done:
            self._is_in_call, self._expected = False, ",]" if self._is_list else ""
            self._call = StreamingJsonCall(call.index + 1, needs_arguments=True)
        elif call.is_broken:
            self._held.append(call.unseen)
            self._show(out)
        return rest

    def _show(self, out: DeltaBuilder) -> None:
        out.content.append("".join(self._held))
        self._held.clear()
        self._is_text, self._is_in_call, self._expected = True, False, ""


ToolCallParser: TypeAlias = HermesToolCallParser | JsonToolCallParser
