"""Accumulates the deltas of an answer like a client, and a text parser whose tokens are
characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dynamo_trtllm.frontend.tokenization.output import Channel, Delta, OutputParser, StepOutput
from dynamo_trtllm.frontend.tokenization.text_parsers import text_output
from dynamo_trtllm.protocol.messages import TokenIds, token_ids


@dataclass
class Seen:
    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    reasoning_tokens: int = 0

    def add(self, step: StepOutput) -> None:
        self.reasoning_tokens += step.reasoning_tokens
        for delta in step.deltas:
            if delta.channel is Channel.REASONING:
                self.reasoning += delta.text
            elif delta.channel is not Channel.CALL:
                self.content += delta.text
            else:
                if delta.name is not None:
                    assert delta.call_index == len(self.calls)
                    self.calls.append([delta.name, ""])
                self.calls[delta.call_index][1] += delta.text


def content_of(step: StepOutput) -> str:
    return "".join(
        d.text for d in step.deltas if d.channel not in (Channel.REASONING, Channel.CALL)
    )


def calls_of(step: StepOutput) -> list[Delta]:
    return [delta for delta in step.deltas if delta.channel is Channel.CALL]


def fold(parser: OutputParser, pushes: Iterable[Sequence[int]]) -> Seen:
    seen = Seen()
    for ids in pushes:
        seen.add(parser.push(token_ids(ids)))
    seen.add(parser.finish())
    return seen


def cut(ids: Sequence[int], steps: Sequence[int]) -> Iterable[Sequence[int]]:
    """Split the ids into chunks of these sizes, used in turn."""
    at = 0
    turn = 0
    while at < len(ids):
        yield ids[at : at + steps[turn % len(steps)]]
        at += steps[turn % len(steps)]
        turn += 1


class Characters:
    """An OutputParser whose tokens are the code points of a text."""

    def push(self, token_ids: TokenIds) -> StepOutput:
        return text_output("".join(map(chr, token_ids)))

    def finish(self) -> StepOutput:
        return StepOutput()
