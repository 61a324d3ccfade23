"""Parses output of a model without Harmony: decodes text, splits off reasoning, then finds tool calls in the answer."""

from __future__ import annotations

from typing import Final

from dynamo_trtllm.messages import TokenIds
from dynamo_trtllm.tokenization.base import Delta, DeltaBuilder, OutputParser
from dynamo_trtllm.tokenization.text import overlap
from dynamo_trtllm.tokenization.tool_call_parser import ToolCallParser

THINK: Final = "<think>"
END_THINK: Final = "</think>"


class ReasoningParser:
    """Gives reasoning to `out` and the text of the answer back. White space next to the markers is left out.

    Only what opens the output can be reasoning: later markers are text. With `begins_inside` the prompt has opened it
    already, and the opening marker may be missing.
    """

    def __init__(self, *, begins_inside: bool) -> None:
        self._held = ""
        self._is_opening = True  # up to the opening marker and the white space after it
        self.is_inside = begins_inside
        self.is_over = False  # everything from here on is answer
        self._is_trimming = False  # white space after the closing marker

    def push(self, text: str, out: DeltaBuilder) -> str:
        if self.is_over and not self._is_trimming:
            return text
        text, self._held = self._held + text, ""
        if self._is_opening:
            text = self._open(text)
        if self.is_inside and not self._is_opening:
            text = self._reason(text, out)
        if self.is_over and self._is_trimming:
            text = text.lstrip()
            self._is_trimming = not text
        return text if self.is_over else ""

    def finish(self, out: DeltaBuilder) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        if not self.is_inside:
            return held
        if self._is_opening:
            held = held.lstrip().removeprefix(THINK).lstrip()
        out.reasoning.append(held)
        return ""

    def _open(self, text: str) -> str:
        """Looks for the opening marker; keeps the text while it can't tell."""
        shown = text.lstrip()
        if shown.startswith(THINK):
            self.is_inside = True
            shown = shown[len(THINK) :].lstrip()
            if not shown:
                self._held = text
                return ""
        elif THINK.startswith(shown):
            self._held = text
            return ""
        self._is_opening = False
        if not self.is_inside:
            self.is_over = True
            return text
        return shown

    def _reason(self, text: str, out: DeltaBuilder) -> str:
        """Gives reasoning out up to the closing marker, and the text after it back."""
        reasoning, marker, rest = text.partition(END_THINK)
        if not marker:
            keep = overlap(text, END_THINK)
            self._held = text[len(text) - keep :]
            reasoning = text[: len(text) - keep]
        else:
            self.is_inside, self.is_over, self._is_trimming = False, True, True
        if reasoning:
            out.reasoning.append(reasoning)
        return rest


class ChatOutputParser:
    """OutputParser over the content of another one."""

    def __init__(
        self,
        text: OutputParser,
        *,
        reasoning_parser: ReasoningParser | None,
        calls: ToolCallParser | None,
        prefill_ids: TokenIds,
    ) -> None:
        self._text = text
        self._reasoning_parser = reasoning_parser
        self._calls = calls
        self._out = DeltaBuilder()
        self._add(prefill_ids)
        self._out.reasoning_tokens = 0

    def push(self, token_ids: TokenIds) -> Delta:
        self._add(token_ids)
        return self._take()

    def finish(self) -> Delta:
        self._push_content(self._without_reasoning(self._text.finish().content))
        if self._reasoning_parser is not None:
            self._push_content(self._reasoning_parser.finish(self._out))
        if self._calls is not None:
            self._calls.finish(self._out)
        return self._take()

    def _take(self) -> Delta:
        out, self._out = self._out, DeltaBuilder()
        return out.delta()

    def _add(self, token_ids: TokenIds) -> None:
        at = 0
        while at < len(token_ids) and self._reasoning_parser is not None and not self._reasoning_parser.is_over:
            self._push_reasoning_token(self._reasoning_parser, token_ids[at : at + 1])
            at += 1
        if at < len(token_ids):
            self._push_content(self._without_reasoning(self._text.push(token_ids[at:]).content))

    def _push_reasoning_token(self, reasoning_parser: ReasoningParser, token: TokenIds) -> None:
        """One token at a time, to know which ones are reasoning: those inside, and those that end a part of it."""
        num_chars = len(self._out.reasoning)
        was_inside = reasoning_parser.is_inside
        self._push_content(self._without_reasoning(self._text.push(token).content))
        if (was_inside and reasoning_parser.is_inside) or len(self._out.reasoning) > num_chars:
            self._out.reasoning_tokens += 1

    def _without_reasoning(self, text: str) -> str:
        return text if self._reasoning_parser is None else self._reasoning_parser.push(text, self._out)

    def _push_content(self, text: str) -> None:
        if not text:
            return
        if self._calls is None:
            self._out.content.append(text)
        else:
            self._calls.push(text, self._out)
