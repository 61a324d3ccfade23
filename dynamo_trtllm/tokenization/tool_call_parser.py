"""Parse tool calls that models without Harmony write into their answer, while the text streams.

Text that is not a call, or stops being one before the call was emitted, is content.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, TypeAlias

from dynamo_trtllm.tokenization.base import DeltaBuilder, overlap
from dynamo_trtllm.tokenization.streaming_json_call import StreamingJsonCall

TOOL_CALL: Final = "<tool_call>"
END_TOOL_CALL: Final = "</tool_call>"


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


class _JsonState(Enum):
    """State of JsonToolCallParser."""

    OPEN = auto()  # only white space so far
    CALL = auto()
    ENTRY = auto()  # the next call of a list must follow
    BETWEEN = auto()  # after a call of a list
    OVER = auto()  # after the only call or the list
    TEXT = auto()  # content up to the end


class JsonToolCallParser:
    """A parser of answers that are one call object or a list of them. Any other answer is content."""

    def __init__(self) -> None:
        self._state = _JsonState.OPEN
        self._held: list[str] = []  # text outside objects that is not yet content
        self._call = StreamingJsonCall(0, needs_arguments=True)
        self._is_list = False

    def push(self, text: str, out: DeltaBuilder) -> None:
        while text:
            if self._state is _JsonState.TEXT:
                out.content.append(text)
                return
            if self._state is _JsonState.CALL:
                text = self._read(text, out)
            else:
                text = self._outside(text, out)

    def finish(self, out: DeltaBuilder) -> None:
        if self._state is _JsonState.CALL and not self._call.begun:
            self._held.append(self._call.unseen)
            out.content.append("".join(self._held))
        elif self._state in (_JsonState.OPEN, _JsonState.ENTRY) and not self._call.index:
            out.content.append("".join(self._held))

    def _outside(self, text: str, out: DeltaBuilder) -> str:
        shown = text.lstrip()
        self._held.append(text[: len(text) - len(shown)])
        if not shown:
            return ""
        char, next_state = shown[0], _JsonState.TEXT
        match self._state, char:
            case (_JsonState.OPEN | _JsonState.ENTRY, "{"):
                self._state = _JsonState.CALL
                return shown
            case (_JsonState.OPEN, "["):
                self._is_list, next_state = True, _JsonState.ENTRY
            case (_JsonState.BETWEEN, ","):
                next_state = _JsonState.ENTRY
            case (_JsonState.BETWEEN, "]"):
                next_state = _JsonState.OVER
            case _:
                self._show(out)
                return shown
        self._state = next_state
        self._held.append(char)
        return shown[1:]

    def _read(self, text: str, out: DeltaBuilder) -> str:
        call = self._call
        rest = call.feed(text, out)
        if call.begun:
            self._held.clear()
        if call.is_done:
            self._state = _JsonState.BETWEEN if self._is_list else _JsonState.OVER
            self._call = StreamingJsonCall(call.index + 1, needs_arguments=True)
        elif call.is_broken:
            self._held.append(call.unseen)
            self._show(out)
        return rest

    def _show(self, out: DeltaBuilder) -> None:
        out.content.append("".join(self._held))
        self._held.clear()
        self._state = _JsonState.TEXT


ToolCallParser: TypeAlias = HermesToolCallParser | JsonToolCallParser
