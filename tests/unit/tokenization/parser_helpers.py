"""Accumulates the deltas of an answer like a client, and a text parser whose tokens are characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dynamo_trtllm.messages import TokenIds, token_ids
from dynamo_trtllm.tokenization.base import Delta, OutputParser


@dataclass
class Seen:
    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    reasoning_tokens: int = 0

    def add(self, delta: Delta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        self.reasoning_tokens += delta.reasoning_tokens
        for call in delta.tool_calls:
            if call.name is not None:
                assert call.index == len(self.calls)
                self.calls.append([call.name, ""])
            self.calls[call.index][1] += call.arguments


def fold(parser: OutputParser, pushes: Iterable[Sequence[int]]) -> Seen:
    seen = Seen()
    for ids in pushes:
        seen.add(parser.push(token_ids(ids)))
    seen.add(parser.finish())
    return seen


def cut(ids: Sequence[int], steps: Sequence[int]) -> Iterable[Sequence[int]]:
    """Split the ids into chunks of these sizes, used in turn."""
    at, turn = 0, 0
    while at < len(ids):
        yield ids[at : at + steps[turn % len(steps)]]
        at += steps[turn % len(steps)]
        turn += 1


class Characters:
    """An OutputParser whose tokens are the code points of a text."""

    def push(self, token_ids: TokenIds) -> Delta:
        return Delta(content="".join(map(chr, token_ids)))

    def finish(self) -> Delta:
        return Delta()
