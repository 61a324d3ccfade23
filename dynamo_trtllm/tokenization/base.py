"""The rendering interface: one `Renderer` per model card, one `OutputParser` per request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from dynamo_trtllm.messages import Conversation, TokenIds, token_ids

NO_PREFILL = token_ids()
TOOL_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,256}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A piece of one tool call. `name` is set exactly on the first piece of an index."""

    index: int
    name: str | None = None
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a run of tokens adds for the client. Never holds markers, nor part of a UTF-8 character.

    A msgspec struct because one is made per token: a frozen dataclass takes ten times as long.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    reasoning_tokens: int = 0  # how many of the tokens were reasoning


class OutputParser(Protocol):
    """Push parser of one request's output. Cost is linear in the tokens pushed."""

    def push(self, token_ids: TokenIds) -> Delta:
        """What these tokens add. May hold text back while it could still be a marker or half a character."""
        ...

    def finish(self) -> Delta:
        """What was held back; called once, after the last push."""
        ...


class Renderer(Protocol):
    """Everything between text and ids for one model."""

    stop_token_ids: tuple[int, ...]  # of the chat format; given to the engine for chat requests
    variables: frozenset[str]  # what the prompt can show beside messages: "tools", "reasoning_effort", template args

    def render(self, conversation: Conversation) -> TokenIds:
        """The prompt, ending where the assistant's turn begins. Raises InvalidRequest for what can't be rendered."""
        ...

    def encode(self, text: str) -> TokenIds:
        """Plain text, special tokens taken as text."""
        ...

    def decode(self, token_ids: TokenIds) -> str:
        """Return the whole text of the ids, special tokens included."""
        ...

    def chat_parser(self, *, prefill_ids: TokenIds = NO_PREFILL) -> OutputParser:
        """For output of a rendered conversation. `prefill_ids`: ids that follow the rendering, as if the model had
        written them. They set where the output begins and are no output (a call's name comes with the first delta)."""
        ...

    def call_header(self, name: str | None) -> TokenIds | None:
        """Ids that, put after the rendering, make the model call a tool. With a name the output goes on inside the
        arguments; with None it goes on with the name, right after `to=functions.`, and the rest of the header.
        None where there is no such header, or no parser for calls. Raises InvalidRequest for a name that can't be
        rendered."""
        ...

    def answer_header(self) -> tuple[str, TokenIds]:
        """Return what the model writes right before its answer (not before reasoning or a call), as text and as ids.

        Both are empty where the answer is all the output.
        """
        ...

    def text_parser(self) -> OutputParser:
        """For output of a plain prompt: everything is content, special tokens left out."""
        ...


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


# renderer -> parsers by the card's field, the one meant when none is named first
PARSERS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "harmony": {"reasoning_parser": ("gpt_oss", "none"), "tool_call_parser": ("harmony", "none")},
    "chat_template": {
        "reasoning_parser": ("none", "basic", "deepseek_r1"),
        "tool_call_parser": ("none", "hermes", "json"),
    },
}
