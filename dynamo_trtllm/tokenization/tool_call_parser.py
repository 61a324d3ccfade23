"""Tool calls that models without Harmony write into their answer, found in text that comes in pieces.

What is no call, or stops being one before it could be given out, is content as it is written.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, Protocol

from dynamo_trtllm.tokenization.base import DeltaBuilder
from dynamo_trtllm.tokenization.streaming_json_call import StreamingJsonCall
from dynamo_trtllm.tokenization.text import overlap

TOOL_CALL: Final = "<tool_call>"
END_TOOL_CALL: Final = "</tool_call>"


class ToolCallParser(Protocol):
    def push(self, text: str, out: DeltaBuilder) -> None:
        """Gives content and calls to `out`; holds back what could still be a marker or a call."""
        ...

    def finish(self, out: DeltaBuilder) -> None:
        """Gives what was held back."""
        ...


class HermesToolCallParser:
    """Calls between <tool_call> and </tool_call>, among content. White space around calls is left out."""

    def __init__(self) -> None:
        self._held = ""  # text that is not yet content
        self._blanks: list[str] = []  # leading white space, joined only once: an answer may begin with a lot of it
        self._call: StreamingJsonCall | None = None
        self._lead = ""  # what stands before the object: content if it is no call
        self._is_closing = False  # after the object: its end marker is due
        self._skips_space = True  # at the beginning and after a call
        self._calls = 0

    def push(self, text: str, out: DeltaBuilder) -> None:
        while text:
            if self._is_closing:
                text = self._close(text)
            elif self._call is not None:
                text = self._read(self._call, text, out)
            else:
                text = self._content(text, out)

    def finish(self, out: DeltaBuilder) -> None:
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
        """Takes the end marker away; anything else that follows the object is content."""
        text, self._held = self._held + text, ""
        shown = text.lstrip()
        if not shown.startswith(END_TOOL_CALL) and END_TOOL_CALL.startswith(shown):
            self._held = shown
            return ""
        self._is_closing, self._skips_space = False, True
        return shown.removeprefix(END_TOOL_CALL)


class _JsonState(Enum):
    OPEN = auto()  # nothing but white space yet
    CALL = auto()
    ENTRY = auto()  # a list's next call must follow
    BETWEEN = auto()  # after a call of a list
    OVER = auto()  # after the only call or the list
    TEXT = auto()  # content up to the end


class JsonToolCallParser:
    """The answer is one call object or a list of them, and nothing else. An answer that is no such thing is content."""

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
