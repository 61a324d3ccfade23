"""Parses output of a model without Harmony: decodes text, splits off reasoning, then finds tool calls in the answer."""

from __future__ import annotations

from dynamo_trtllm.messages import TokenIds
from dynamo_trtllm.tokenization.base import Delta, OutputParser
from dynamo_trtllm.tokenization.delta_builder import DeltaBuilder
from dynamo_trtllm.tokenization.reasoning_parser import ReasoningParser
from dynamo_trtllm.tokenization.tool_call_parser import ToolCallParser


class ChatOutputParser:
    """OutputParser over the content of another one."""

    def __init__(
        self, text: OutputParser, *, thinking: ReasoningParser | None, calls: ToolCallParser | None, forced: TokenIds
    ) -> None:
        self._text = text
        self._thinking = thinking
        self._calls = calls
        self._out = DeltaBuilder()
        self._add(forced)
        self._out.reasoning_tokens = 0

    def push(self, token_ids: TokenIds) -> Delta:
        self._add(token_ids)
        return self._take()

    def finish(self) -> Delta:
        self._answer(self._thought(self._text.finish().content))
        if self._thinking is not None:
            self._answer(self._thinking.finish(self._out))
        if self._calls is not None:
            self._calls.finish(self._out)
        return self._take()

    def _take(self) -> Delta:
        out, self._out = self._out, DeltaBuilder()
        return out.delta()

    def _add(self, token_ids: TokenIds) -> None:
        at = 0
        while at < len(token_ids) and self._thinking is not None and not self._thinking.is_over:
            self._think(self._thinking, token_ids[at : at + 1])
            at += 1
        if at < len(token_ids):
            self._answer(self._thought(self._text.push(token_ids[at:]).content))

    def _think(self, thinking: ReasoningParser, token: TokenIds) -> None:
        """One token at a time, to know which ones are reasoning: those inside, and those that end a part of it."""
        said = len(self._out.reasoning)
        was_inside = thinking.is_inside
        self._answer(self._thought(self._text.push(token).content))
        if (was_inside and thinking.is_inside) or len(self._out.reasoning) > said:
            self._out.reasoning_tokens += 1

    def _thought(self, text: str) -> str:
        return text if self._thinking is None else self._thinking.push(text, self._out)

    def _answer(self, text: str) -> None:
        if not text:
            return
        if self._calls is None:
            self._out.content.append(text)
        else:
            self._calls.push(text, self._out)
