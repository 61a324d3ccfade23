"""Separates reasoning between <think> and </think> from the answer, in text that comes in pieces."""

from __future__ import annotations

from typing import Final

from dynamo_trtllm.tokenization.delta_builder import DeltaBuilder
from dynamo_trtllm.tokenization.text import overlap

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
