"""Parse the output of models without Harmony: split reasoning from the answer, and find tool calls.

Text that is not a call, or stops being one before the call was emitted, is content. The parser is
strict about the top level of a call's JSON object. Below that level, it only matches brackets and
quotes: arguments are passed on as generated, and the client has to validate them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Final, TypeAlias

from dynamo_trtllm.frontend.tokenization.conversation import TOOL_NAME
from dynamo_trtllm.frontend.tokenization.output import (
    Channel,
    DeltaBuilder,
    OutputParser,
    StepOutput,
)
from dynamo_trtllm.protocol.messages import TokenIds

THINK: Final = "<think>"
END_THINK: Final = "</think>"
TOOL_CALL: Final = "<tool_call>"
END_TOOL_CALL: Final = "</tool_call>"
# Keys of the object of a call. "parameters" counts as "arguments".
_KEYS: Final = frozenset(("arguments", "name", "id", "type"))
_BLANKS: Final = re.compile(r"[ \t\r\n]*")  # blanks between the tokens of JSON
_SPACE: Final = re.compile(r"\s*")
_SEPARATORS: Final = re.compile(r"[\s,\]]*")  # text between and after calls
_SCALAR: Final = re.compile(r"[A-Za-z0-9+.\-]*")
_CLOSERS: Final = {'"': '"', "{": "}", "[": "]"}
_STRING_STOP: Final = re.compile(r'["\\]')
_NESTED_STOP: Final = re.compile(r'["{}\[\]]')
_CONTENT: Final = Channel.CONTENT
# Generators that yield when they need more text.
_Parsing: TypeAlias = Generator[None, None, None]
_Matching: TypeAlias = Generator[None, None, bool]  # returns whether it found what it parses
_Reading: TypeAlias = Generator[None, None, str]  # returns text


class _OutputReader:
    """Reads the text of an output, and adds reasoning, content and calls to `out`.

    Methods that need more text are generators, which yield to wait for the text. A generator that
    returns a value returns False or "" at the first error, and consumes nothing after the error.
    """

    def __init__(self, reasoning_parser: str, tool_call_parser: str) -> None:
        self.text = ""  # the text received last
        self.at = 0  # the index in `text` where reading goes on
        self.has_ended = False  # no more text comes
        self.out = DeltaBuilder()  # receives reasoning, content and calls
        self.num_reasoning_texts = 0  # the texts of reasoning that `out` has received
        # Whether the text is reasoning. A prompt for such a model may end with <think>.
        self.is_in_reasoning = reasoning_parser == "deepseek_r1"
        self.is_reasoning_over = reasoning_parser == "none"  # all further text is the answer
        self.is_all_content = False  # all further text is content
        self._num_calls = 0  # calls that have begun
        self._is_certain = False  # what is parsed now is certainly a call
        # Text that was read and not emitted. It is content if it belongs to no call.
        self._withheld: list[str] = []
        # Of the current call:
        self._name = ""
        self._keys: set[str] = set()
        self._arguments: list[str] = []  # text of arguments, read before the call was certain
        self._tool_call_parser = tool_call_parser

    def parse(self) -> _Parsing:
        """Parse the whole output."""
        if not self.is_reasoning_over:
            yield from self._reasoning()
        if self._tool_call_parser == "hermes":
            yield from self._hermes_answer()
        elif self._tool_call_parser == "json":
            yield from self._json_answer()
        self.out.add(_CONTENT, self._rest())
        self.is_all_content = True
        yield

    def show_withheld(self) -> None:
        """Emit the withheld text as content."""
        self.out.add(_CONTENT, "".join(self._withheld))
        self._withheld.clear()

    def finish_answer(self) -> None:
        """Emit the withheld text as content, unless it is part of a call or separates calls."""
        is_separator = self._num_calls and _SEPARATORS.fullmatch("".join(self._withheld))
        if not (self._is_certain or is_separator):
            self.show_withheld()

    def _rest(self) -> str:
        """Consume and return all text that has come."""
        text = self.text[self.at :]
        self.at = len(self.text)
        return text

    # --- reasoning --------------------------------------------------------------------------------

    def _reasoning(self) -> _Parsing:
        """Emit reasoning up to </think>. White space next to the markers is omitted.

        Only the beginning of the output can be reasoning; later markers are text.
        """
        text = self._rest()
        # Wait until it is decided whether the output begins with the marker.
        while True:
            shown = text.lstrip()
            is_marked = shown.startswith(THINK)
            if is_marked:
                self.is_in_reasoning = True
                shown = shown[len(THINK) :].lstrip()
                is_decided = bool(shown)  # the first character after the marker has come
            else:
                is_decided = not THINK.startswith(shown)  # the text can't become the marker
            if is_decided or self.has_ended:
                break
            yield
            text += self._rest()
        if not self.is_in_reasoning:
            self.is_reasoning_over = True
            # The answer is parsed from its beginning.
            self.text = text
            self.at = 0
            return
        reasoning, marker, rest = shown.partition(END_THINK)
        while not marker:
            # The end of the text may be the beginning of the marker.
            num_held = 0 if self.has_ended else _overlap(reasoning, END_THINK)
            num_shown = len(reasoning) - num_held
            self._emit_reasoning(reasoning[:num_shown])
            yield
            held = reasoning[num_shown:]
            reasoning, marker, rest = (held + self._rest()).partition(END_THINK)
        self._emit_reasoning(reasoning)
        self.is_in_reasoning = False
        self.is_reasoning_over = True
        rest = rest.lstrip()
        while not rest:
            yield
            rest = self._rest().lstrip()
        self.text = rest
        self.at = 0

    def _emit_reasoning(self, text: str) -> None:
        if text:
            self.out.add(Channel.REASONING, text)
            self.num_reasoning_texts += 1

    # --- answers ----------------------------------------------------------------------------------

    def _hermes_answer(self) -> _Parsing:
        """Parse text with calls between <tool_call> and </tool_call>.

        White space around calls is omitted.

        A call is certain once its name is read.
        """
        # Space at the beginning and after a call is skipped.
        skips_space = True
        while True:
            yield from self._content(skips_space=skips_space)
            is_call = yield from self._call(_BLANKS)
            if is_call:
                yield from self._end_marker()
            else:
                self.show_withheld()
            skips_space = is_call

    def _json_answer(self) -> _Parsing:
        """Parse one call or a list of them. Any other text is content.

        A call is certain once its name and the key of its arguments are read: other JSON may have a
        name, too.
        """
        is_list = yield from self._skip("[", _SPACE)
        while (yield from self._call(_SPACE)):
            if is_list and (yield from self._skip(",", _SPACE)):
                continue
            if is_list:
                yield from self._skip("]", _SPACE)
            # Wait for further text, which is content. Without further text, the separators of calls
            # are omitted.
            yield from self._peek(_SPACE)
            break
        self.show_withheld()

    def _content(self, *, skips_space: bool) -> _Parsing:
        """Emit text up to <tool_call>.

        Text that may be the beginning of the marker is withheld. With `skips_space`, leading white
        space is withheld, too.
        """
        # Whether all text so far is white space to skip. It may be long, so it is joined only once.
        is_blank = skips_space
        while True:
            while self.at == len(self.text):
                yield
            text = self._rest()
            is_blank = is_blank and text.isspace()
            if is_blank:
                self._withheld.append(text)
                continue
            if self._withheld:
                text = "".join([*self._withheld, text])
                self._withheld.clear()
            before, marker, after = text.partition(TOOL_CALL)
            if marker:
                self.at -= len(after)
                # Skipped space and the marker are content only if no call follows.
                is_skipped_space = skips_space and before.isspace()
                if is_skipped_space:
                    self._withheld.append(before + TOOL_CALL)
                else:
                    self.out.add(_CONTENT, before)
                    self._withheld.append(TOOL_CALL)
                return
            shown = text[: len(text) - _overlap(text, TOOL_CALL)]
            if skips_space and (not shown or shown.isspace()):
                shown = ""
            else:
                skips_space = False
            self.out.add(_CONTENT, shown)
            if len(shown) < len(text):
                self._withheld.append(text[len(shown) :])

    def _end_marker(self) -> _Parsing:
        """Consume </tool_call> and white space. Other text after the object is content."""
        held = ""
        while not held or (END_TOOL_CALL.startswith(held) and held != END_TOOL_CALL):
            while self.at == len(self.text):
                yield
            held = (held + self._rest()).lstrip()
        self.text = held.removeprefix(END_TOOL_CALL)
        self.at = 0

    # --- calls ------------------------------------------------------------------------------------

    def _call(self, blanks: re.Pattern[str]) -> _Matching:
        """Parse the object of a call, after `blanks`. Return False if there is none."""
        if not (yield from self._skip("{", blanks)):
            return False
        self._name = ""
        self._keys.clear()
        self._arguments.clear()
        is_complete = (yield from self._members()) and (yield from self._skip("}"))
        if is_complete:
            self._withheld.clear()
            if "arguments" not in self._keys:
                self.out.add_arguments(self._num_calls - 1, "{}")
        self._is_certain = False
        return is_complete

    def _members(self) -> _Matching:
        """Parse the keys and values of a call's object. Return whether it is certainly a call."""
        while not self._keys or (yield from self._skip(",")):
            if (yield from self._peek()) != '"':
                return False
            try:
                key = json.loads((yield from self._delimited()))
            except ValueError:
                return False
            key = "arguments" if key == "parameters" else key
            if key not in _KEYS or key in self._keys:
                return False
            self._keys.add(key)
            self._begin_if_certain()
            if not (yield from self._skip(":")):
                return False
            if key == "arguments":
                is_valid = bool((yield from self._value(is_argument=True)))
            else:
                is_valid = yield from self._plain_value(key)
            if not is_valid:
                return False
            self._begin_if_certain()
        return self._is_certain

    def _begin_if_certain(self) -> None:
        """Emit the beginning of the call, if the text that was read can only be a call."""
        if self._is_certain or not self._name:
            return
        if "arguments" not in self._keys and self._tool_call_parser != "hermes":
            return  # other JSON may have a name, too
        self._is_certain = True
        self._withheld.clear()
        self.out.begin_call(self._num_calls, self._name)
        self.out.add_arguments(self._num_calls, "".join(self._arguments))
        self._num_calls += 1

    def _take(self, end: int, *, is_argument: bool = False) -> str:
        """Consume the text up to an index, and return it.

        Arguments of a certain call are emitted. All other text is withheld.
        """
        part = self.text[self.at : end]
        self.at = end
        if is_argument and self._is_certain:
            if part:
                self._withheld.clear()
                self.out.add_arguments(self._num_calls - 1, part)
            return part
        self._withheld.append(part)
        if is_argument:
            self._arguments.append(part)
        return part

    def _run(self, chars: re.Pattern[str], *, is_argument: bool = False) -> str:
        """Consume and return the run of these characters that begins here; "" if there is none."""
        found = chars.match(self.text, self.at)
        return self._take(self.at if found is None else found.end(), is_argument=is_argument)

    def _peek(self, blanks: re.Pattern[str] = _BLANKS) -> _Reading:
        """Consume blanks, and return the character after them without consuming it."""
        # Blanks at the end of a text may go on in the next text.
        while self._run(blanks) or self.at == len(self.text):
            if self.at == len(self.text):
                yield
        return self.text[self.at]

    def _skip(self, char: str, blanks: re.Pattern[str] = _BLANKS) -> _Matching:
        """Consume blanks, and the next character if it is this one. Otherwise return False."""
        is_found = (yield from self._peek(blanks)) == char
        if is_found:
            self._take(self.at + 1)
        return is_found

    def _plain_value(self, key: str) -> _Matching:
        """Consume the value of a key other than the arguments.

        A name has to be a string. Other values may also be a number, a literal or null.
        """
        if key == "name" and (yield from self._peek()) != '"':
            return False
        try:
            value = json.loads((yield from self._value(is_argument=False)))
        except ValueError:
            return False
        if key != "name":
            return True
        self._name = value if TOOL_NAME.match(value) else ""
        return bool(self._name)

    def _value(self, *, is_argument: bool) -> _Reading:
        """Consume and return a string, a number, a literal or null.

        Arguments may be an object or a list, too.
        """
        char = yield from self._peek()
        if char == '"' or (is_argument and char in _CLOSERS):
            return (yield from self._delimited(is_argument=is_argument))
        text = self._run(_SCALAR, is_argument=is_argument)
        while self.at == len(self.text):
            yield
            text += self._run(_SCALAR, is_argument=is_argument)
        return text

    def _delimited(self, *, is_argument: bool = False) -> _Reading:
        """Consume and return a string, an object or a list up to its closing quote or bracket.

        Return "" if brackets do not match.
        """
        parts = list[str]()
        # The closing quotes and brackets that are awaited, the innermost last.
        closers = [_CLOSERS[self.text[self.at]]]
        at = self.at + 1
        while closers:
            is_string = closers[-1] == '"'
            stops = _STRING_STOP if is_string else _NESTED_STOP
            stop = stops.search(self.text, at)
            if stop is None:
                # Reading goes on at the beginning of the next text. If this text ends with a
                # backslash, the first character of the next text is skipped.
                at = max(0, at - len(self.text))
                parts.append(self._take(len(self.text), is_argument=is_argument))
                yield
                continue
            char = stop.group()
            at = stop.end()
            if char == closers[-1]:
                closers.pop()
            elif char == "\\":
                at += 1
            elif char in _CLOSERS:
                closers.append(_CLOSERS[char])
            else:
                self._take(at - 1, is_argument=is_argument)
                return ""
        return "".join([*parts, self._take(at, is_argument=is_argument)])


class ChatOutputParser:
    """OutputParser for models with a chat template.

    Args:
        text: parser that decodes tokens to content.
        reasoning_parser: "basic", "deepseek_r1" or "none".
        tool_call_parser: "hermes", "json" or "none".
        forced_ids: ids that follow the prompt. Reasoning tokens among them are not counted.
    """

    def __init__(
        self,
        text: OutputParser,
        *,
        reasoning_parser: str,
        tool_call_parser: str,
        forced_ids: TokenIds,
    ) -> None:
        self._text = text
        # The generator refers to the reader. The reader does not hold the generator, because such a
        # cycle would keep the text in memory.
        self._reader = _OutputReader(reasoning_parser, tool_call_parser)
        self._parsing = self._reader.parse()
        self._is_plain = False  # all further text is content, and no text is withheld
        self._add(forced_ids)
        self._reader.out.reasoning_tokens = 0

    def push(self, token_ids: TokenIds) -> StepOutput:
        if self._is_plain:
            return self._text.push(token_ids)
        self._add(token_ids)
        return self._take()

    def finish(self) -> StepOutput:
        self._push(self._text.finish())
        self._reader.has_ended = True
        if not self._reader.is_reasoning_over:
            self._parse("")
        self._reader.finish_answer()
        return self._take()

    def _take(self) -> StepOutput:
        self._is_plain = self._reader.is_all_content
        return self._reader.out.take()

    def _add(self, token_ids: TokenIds) -> None:
        """Parse tokens. The tokens of reasoning are parsed one by one, to count them."""
        reader = self._reader
        at = 0
        while at < len(token_ids) and not reader.is_reasoning_over:
            num_texts = reader.num_reasoning_texts
            was_in_reasoning = reader.is_in_reasoning
            self._push(self._text.push(token_ids[at : at + 1]))
            is_between_markers = was_in_reasoning and reader.is_in_reasoning
            # A token may have both the last text of reasoning and the marker after that text.
            has_reasoning_text = reader.num_reasoning_texts > num_texts
            if is_between_markers or has_reasoning_text:
                reader.out.reasoning_tokens += 1
            at += 1
        if at < len(token_ids):
            self._push(self._text.push(token_ids[at:]))

    def _push(self, decoded: StepOutput) -> None:
        for delta in decoded.deltas:
            if self._reader.is_all_content:
                self._reader.out.add(_CONTENT, delta.text)
            else:
                self._parse(delta.text)

    def _parse(self, text: str) -> None:
        self._reader.text = text
        self._reader.at = 0
        next(self._parsing)


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
