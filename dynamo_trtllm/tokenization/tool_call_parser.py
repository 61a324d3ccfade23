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
_BLANKS: Final = re.compile(r"[ \t\r\n]*")  # of JSON
_SPACE: Final = re.compile(r"\s*")
_SEPARATORS: Final = re.compile(r"[\s,\]]*")  # text between and after calls
_SCALAR: Final = string.ascii_letters + string.digits + "+.-"
_SCALARS: Final = re.compile(r"[A-Za-z0-9+.\-]*")
_CLOSERS: Final = {"{": "}", "[": "]"}
_STRING_STOP: Final = re.compile(r'["\\]')
_NESTED_STOP: Final = re.compile(r'["{}\[\]]')
_Waiting: TypeAlias = Generator[None, None, bool]
_Parsing: TypeAlias = Generator[None, None, None]


class _Answer:
    """The text of an answer, and what was read of it. Its generators yield where they need more text.

    Those that return a value return False at the first error, and consume nothing beyond it.
    """

    def __init__(self, *, needs_arguments: bool) -> None:
        self.text, self.at = "", 0  # the text received last, and where reading goes on
        self.out = DeltaBuilder()  # receives content and calls
        self.is_text = False  # all further text is content
        self.num_calls = 0  # that have begun
        self.has_begun = False  # the current call is certain
        self.unseen: list[str] = []  # text read, but not emitted. It is content if it belongs to no call
        self._name = ""
        self._has_arguments = False  # their key was read
        self._arguments: list[str] = []  # read before the call was certain
        self._needs_arguments = needs_arguments

    def hermes_answer(self) -> _Parsing:
        """Parse text with calls between <tool_call> and </tool_call>. White space around calls is omitted."""
        skips_space = True  # at the beginning and after a call
        while True:
            yield from self._content(skips_space=skips_space)
            skips_space = yield from self._call(_BLANKS)
            if skips_space:
                yield from self._end_marker()
            else:
                self._show_unseen()

    def json_answer(self) -> _Parsing:
        """Parse one call or a list of them. Any other text is content."""
        is_list = yield from self._skip("[", _SPACE)
        while (yield from self._call(_SPACE)):
            if is_list and (yield from self._skip(",", _SPACE)):
                continue
            if is_list:
                yield from self._skip("]", _SPACE)
            yield from self._peek(_SPACE)  # nothing may follow
            break
        self._show_unseen()
        self.out.content.append(self.text[self.at :])
        self.is_text = True
        yield

    def _show_unseen(self) -> None:
        self.out.content.append("".join(self.unseen))
        self.unseen.clear()

    def _content(self, *, skips_space: bool) -> _Parsing:
        """Show text up to <tool_call>. Text that may be part of the marker is withheld, and leading white space."""
        is_blank = skips_space  # joined only once, because there may be a lot of it
        while True:
            while self.at == len(self.text):
                yield
            text, self.at = self.text[self.at :], len(self.text)
            is_blank = is_blank and text.isspace()
            if is_blank:
                self.unseen.append(text)
                continue
            if self.unseen:
                text = "".join([*self.unseen, text])
                self.unseen.clear()
            before, marker, after = text.partition(TOOL_CALL)
            if marker:
                self.at -= len(after)
                is_shown = not (skips_space and before.isspace())
                self.out.content.append(before if is_shown else "")
                self.unseen.append(TOOL_CALL if is_shown else before + TOOL_CALL)
                return
            shown = text[: len(text) - overlap(text, TOOL_CALL)]
            if skips_space and (not shown or shown.isspace()):
                shown = ""
            else:
                skips_space = False
            self.out.content.append(shown)
            if len(shown) < len(text):
                self.unseen.append(text[len(shown) :])

    def _end_marker(self) -> _Parsing:
        """Consume </tool_call> and white space. Other text after the object is content."""
        held = ""
        while not held or (END_TOOL_CALL.startswith(held) and held != END_TOOL_CALL):
            while self.at == len(self.text):
                yield
            held = (held + self.text[self.at :]).lstrip()
            self.at = len(self.text)
        self.text, self.at = held.removeprefix(END_TOOL_CALL), 0

    def _call(self, blanks: re.Pattern[str]) -> _Waiting:
        """Parse the object of a call, after `blanks`."""
        if not (yield from self._skip("{", blanks)):
            return False
        self._name, self._has_arguments = "", False
        self._arguments.clear()
        is_complete = (yield from self._members()) and (yield from self._skip("}"))
        if is_complete:
            self.unseen.clear()
            if not self._has_arguments:
                self.out.add_arguments(self.num_calls - 1, "{}")
        self.has_begun = False
        return is_complete

    def _members(self) -> _Waiting:
        """Parse what is between the brackets."""
        seen: set[str] = set()
        while not seen or (yield from self._skip(",")):
            if (yield from self._peek()) != '"':
                return False
            try:
                key = json.loads((yield from self._string()))
            except ValueError:
                return False
            is_argument = key in _ARGUMENTS
            if key not in _KEYS or key in seen or (is_argument and self._has_arguments):
                return False
            seen.add(key)
            self._has_arguments |= is_argument
            self._begin_if_certain()
            if not (yield from self._skip(":")):
                return False
            if not (yield from (self._argument() if is_argument else self._plain_value(key))):
                return False
            self._begin_if_certain()
        return self.has_begun

    def _begin_if_certain(self) -> None:
        if not self.has_begun and self._name and (self._has_arguments or not self._needs_arguments):
            self.has_begun = True
            self.unseen.clear()
            self.out.begin_call(self.num_calls, self._name)
            self.out.add_arguments(self.num_calls, "".join(self._arguments))
            self.num_calls += 1

    def _take(self, end: int, *, is_argument: bool = False) -> str:
        """Consume the text up to an index, and return it."""
        part, self.at = self.text[self.at : end], end
        if not is_argument or not self.has_begun:
            self.unseen.append(part)
        elif part:
            self.unseen.clear()
            self.out.add_arguments(self.num_calls - 1, part)
        if is_argument and not self.has_begun:
            self._arguments.append(part)
        return part

    def _end_of(self, run: re.Pattern[str]) -> int:
        """Return the index after the run of characters that begins here, without a copy of the text after it."""
        found = run.match(self.text, self.at)
        return self.at if found is None else found.end()

    def _peek(self, blanks: re.Pattern[str] = _BLANKS) -> Generator[None, None, str]:
        """Consume blanks, and return the character after them."""
        while self._take(self._end_of(blanks)) or self.at == len(self.text):
            if self.at == len(self.text):
                yield
        return self.text[self.at]

    def _skip(self, char: str, blanks: re.Pattern[str] = _BLANKS) -> _Waiting:
        """Consume blanks, and the next character if it is this one. Otherwise return False."""
        is_found = (yield from self._peek(blanks)) == char
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
            self._name = value if TOOL_NAME.match(value) else ""
        return bool(self._name) or key != "name"

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


class ToolCallParser:
    """Incremental parser of an answer with tool calls."""

    def __init__(self, answer: _Answer, parsing: _Parsing) -> None:
        # The generator refers to the answer, which does not refer to it: a cycle would keep the text in memory.
        self._answer, self._parsing = answer, parsing

    def push(self, text: str, out: DeltaBuilder) -> None:
        """Add content and calls to `out`. Text that may be part of a marker or of a call is withheld."""
        answer = self._answer
        if answer.is_text:
            out.content.append(text)
            return
        answer.text, answer.at, answer.out = text, 0, out
        next(self._parsing)

    def finish(self, out: DeltaBuilder) -> None:
        """Add the withheld text to `out`."""
        answer = self._answer
        text = "".join(answer.unseen)
        if not (answer.has_begun or (answer.num_calls and _SEPARATORS.fullmatch(text))):
            out.content.append(text)


class HermesToolCallParser(ToolCallParser):
    """A parser of calls between <tool_call> and </tool_call>, which are certain once their name is read."""

    def __init__(self) -> None:
        answer = _Answer(needs_arguments=False)
        super().__init__(answer, answer.hermes_answer())


class JsonToolCallParser(ToolCallParser):
    """A parser of answers that are one call object or a list of them.

    A call is certain once its name and the key of its arguments are read: other JSON may have a name, too.
    """

    def __init__(self) -> None:
        answer = _Answer(needs_arguments=True)
        super().__init__(answer, answer.json_answer())
