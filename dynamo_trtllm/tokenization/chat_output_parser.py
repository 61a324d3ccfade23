"""Parse output of models without Harmony: decode text, split reasoning from the answer, and parse tool calls."""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Final

from dynamo_trtllm.messages import TokenIds
from dynamo_trtllm.tokenization.base import Delta, DeltaBuilder, OutputParser, overlap
from dynamo_trtllm.tokenization.tool_call_parser import ToolCallParser

THINK: Final = "<think>"
END_THINK: Final = "</think>"


class ReasoningParser:
    """Incremental parser that separates reasoning from the answer. White space next to the markers is omitted.

    Only the beginning of the output can be reasoning; later markers are text.

    Args:
        begins_inside: The prompt ends with the opening marker, so the output may lack it.
    """

    def __init__(self, *, begins_inside: bool) -> None:
        self._held = ""
        self._is_opening = True  # up to the opening marker and the white space after it
        self.is_inside = begins_inside
        self.is_over = False  # all further text is the answer
        self._is_trimming = False  # white space after the closing marker is being removed

    def push(self, text: str, out: DeltaBuilder) -> str:
        """Add reasoning to `out` and return text of the answer. Text that may be part of a marker is withheld."""
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
        """Add withheld reasoning to `out`, or return withheld text of the answer."""
        held, self._held = self._held, ""
        if not self.is_inside:
            return held
        if self._is_opening:
            held = held.lstrip().removeprefix(THINK).lstrip()
        out.reasoning.append(held)
        return ""

    def _open(self, text: str) -> str:
        """Search for the opening marker; withhold the text while it may be part of it."""
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
        """Add reasoning up to the closing marker to `out`, and return the text after it."""
        reasoning, marker, rest = text.partition(END_THINK)
        if not marker:
            num_held = overlap(text, END_THINK)
            self._held = text[len(text) - num_held :]
            reasoning = text[: len(text) - num_held]
        else:
            self.is_inside, self.is_over, self._is_trimming = False, True, True
        if reasoning:
            out.reasoning.append(reasoning)
        return rest


@dataclass(eq=False)
class ChatOutputParser:
    """OutputParser for models with a chat template.

    Args:
        text: Parser that decodes tokens to content.
        reasoning_parser: Parser of the decoded text, or None.
        calls: Parser of the answer, or None.
        forced_ids: Ids that follow the prompt. Reasoning tokens among them are not counted.
    """

    text: OutputParser
    _: KW_ONLY
    reasoning_parser: ReasoningParser | None
    calls: ToolCallParser | None
    forced_ids: InitVar[TokenIds]
    _out: DeltaBuilder = field(default_factory=DeltaBuilder, init=False)

    def __post_init__(self, forced_ids: TokenIds) -> None:
        self._add(forced_ids)
        self._out.reasoning_tokens = 0

    def push(self, token_ids: TokenIds) -> Delta:
        self._add(token_ids)
        return self._take()

    def finish(self) -> Delta:
        self._push(self.text.finish().content)
        if self.reasoning_parser is not None:
            self._push_answer(self.reasoning_parser.finish(self._out))
        if self.calls is not None:
            self.calls.finish(self._out)
        return self._take()

    def _take(self) -> Delta:
        out, self._out = self._out, DeltaBuilder()
        return out.delta()

    def _add(self, token_ids: TokenIds) -> None:
        reasoning, out, at = self.reasoning_parser, self._out, 0
        while at < len(token_ids) and reasoning is not None and not reasoning.is_over:
            num_texts, was_inside = len(out.reasoning), reasoning.is_inside
            self._push(self.text.push(token_ids[at : at + 1]).content)
            if (was_inside and reasoning.is_inside) or len(out.reasoning) > num_texts:
                out.reasoning_tokens += 1  # inside the markers, or with a part of the reasoning text
            at += 1
        if at < len(token_ids):
            self._push(self.text.push(token_ids[at:]).content)

    def _push(self, text: str) -> None:
        if self.reasoning_parser is not None:
            text = self.reasoning_parser.push(text, self._out)
        self._push_answer(text)

    def _push_answer(self, text: str) -> None:
        if text and self.calls is not None:
            self.calls.push(text, self._out)
        elif text:
            self._out.content.append(text)
