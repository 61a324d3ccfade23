"""What a client makes of the deltas of one answer, and a text parser whose tokens are single characters."""

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
    """The ids in pieces of these sizes, over and over."""
    at, turn = 0, 0
    while at < len(ids):
        yield ids[at : at + steps[turn % len(steps)]]
        at += steps[turn % len(steps)]
        turn += 1


class Characters:
    """OutputParser that takes the code points of a text as its tokens."""

    def push(self, token_ids: TokenIds) -> Delta:
        return Delta(content="".join(map(chr, token_ids)))

    def finish(self) -> Delta:
        return Delta()
