"""The delta of one push while it grows."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynamo_trtllm.tokenization.base import Delta, ToolCallDelta


@dataclass(slots=True)
class DeltaBuilder:
    """Pieces in the order they came; those of one call become one `ToolCallDelta`."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, tuple[str | None, list[str]]] = field(default_factory=dict)
    reasoning_tokens: int = 0

    def begin_call(self, index: int, name: str) -> None:
        self.calls[index] = (name, [])

    def add_arguments(self, index: int, text: str) -> None:
        if text:
            self.calls.setdefault(index, (None, []))[1].append(text)

    def delta(self) -> Delta:
        calls = tuple(
            ToolCallDelta(index=index, name=name, arguments="".join(parts))
            for index, (name, parts) in self.calls.items()
        )
        return Delta(
            content="".join(self.content),
            reasoning="".join(self.reasoning),
            tool_calls=calls,
            reasoning_tokens=self.reasoning_tokens,
        )
