"""Define the interfaces of tokenization: one `Renderer` per model card, one `OutputParser` per request.

The module also holds the output types, `DeltaBuilder`, the table of parsers, and `renderer_for`, which imports a
renderer's libraries at its first use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.messages import Conversation, ModelDeploymentCard, TokenIds, token_ids

NO_FORCED_IDS = token_ids()
TOOL_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,256}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A delta of one tool call. `name` is set only on the first delta of each index."""

    index: int
    name: str | None = None
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The text that some tokens add to the output. It has no markers and no incomplete UTF-8 characters.

    One is created per token. Creating a msgspec struct takes a tenth of the time of a frozen dataclass.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    reasoning_tokens: int = 0  # number of tokens that are reasoning


class OutputParser(Protocol):
    """Incremental parser of one request's output. Its cost is linear in the number of tokens."""

    def push(self, token_ids: TokenIds) -> Delta:
        """Return the delta of these tokens. Text that may be part of a marker or of a character is withheld."""
        ...

    def finish(self) -> Delta:
        """Return the withheld text. Call it once, after the last push."""
        ...


class Renderer(Protocol):
    """Tokenizer, chat template and output parsers of one model."""

    stop_token_ids: tuple[int, ...]  # of the chat format; sent to the engine with chat requests
    variables: frozenset[str]  # what the template reads besides messages: "tools", "reasoning_effort", template args

    def render(self, conversation: Conversation) -> TokenIds:
        """Return the token ids of the prompt, up to the start of the assistant's turn.

        Raises:
            InvalidRequest: The conversation can't be rendered.
        """
        ...

    def encode(self, text: str) -> TokenIds:
        """Tokenize plain text. Special tokens in it are encoded as text."""
        ...

    def decode(self, token_ids: TokenIds) -> str:
        """Return the text of the ids, special tokens included."""
        ...

    def chat_parser(self, *, forced_ids: TokenIds = NO_FORCED_IDS) -> OutputParser:
        """Return a parser for the output of a rendered conversation.

        Args:
            forced_ids: Ids that follow the rendered prompt, as if the model had generated them. They set the initial
                state of the parser and are not output, except that the name of a call is in the first delta.
        """
        ...

    def call_header(self, name: str | None) -> TokenIds | None:
        """Return ids that make the model call a tool when they follow the rendered prompt.

        Args:
            name: Name of the tool; the output then continues with the arguments. With None the output continues with
                the name, right after `to=functions.`, and the rest of the header.

        Returns:
            The ids, or None if the format has no such header or calls are not parsed.

        Raises:
            InvalidRequest: The name can't be rendered.
        """
        ...

    def answer_header(self) -> tuple[str, TokenIds]:
        """Return what the model generates right before its answer, after any reasoning, as text and as ids.

        Both are empty if the answer is the whole output.
        """
        ...

    def text_parser(self) -> OutputParser:
        """Return a parser for the output of a plain prompt. All text is content; special tokens are omitted."""
        ...


@dataclass(slots=True)
class DeltaBuilder:
    """Collects text and builds one `Delta` of it, with one `ToolCallDelta` per call."""

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


# renderer -> the card's field -> names of parsers, the default first
PARSERS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "harmony": {"reasoning_parser": ("gpt_oss", "none"), "tool_call_parser": ("harmony", "none")},
    "chat_template": {
        "reasoning_parser": ("none", "basic", "deepseek_r1"),
        "tool_call_parser": ("none", "hermes", "json"),
    },
}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model whose files are loaded."""

    card: ModelDeploymentCard
    renderer: Renderer
    # Whether the prompt format writes the names of messages, by role and by whether there are tools; filled on demand.
    writes_names: dict[tuple[str, bool], bool] = field(default_factory=dict, compare=False)


def renderer_for(card: ModelDeploymentCard, files: Mapping[str, bytes]) -> Renderer:
    """Create the renderer of a model card. The call takes up to 1 s, so do not run it on an event loop.

    Args:
        card: The model card; it names renderer and parsers.
        files: Contents of the model's files by name.

    Raises:
        ConfigError: A renderer or parser does not exist, or a file is missing or can't be parsed.
    """
    for name, known in PARSERS.get(card.renderer, {}).items():
        if getattr(card, name) not in known:
            raise ConfigError(
                f"model {card.name!r} needs the {name} {getattr(card, name)!r}, which the renderer {card.renderer} "
                f"does not have; choose one of {', '.join(known)}",
                field=name,
            )
    match card.renderer:
        case "harmony":
            from dynamo_trtllm.tokenization.harmony import HarmonyRenderer

            return HarmonyRenderer(reasoning_parser=card.reasoning_parser, tool_call_parser=card.tool_call_parser)
        case "chat_template":
            from dynamo_trtllm.tokenization.template import ChatTemplateRenderer

            return ChatTemplateRenderer(
                files,
                stop_token_ids=card.eos_token_ids,
                reasoning_parser=card.reasoning_parser,
                tool_call_parser=card.tool_call_parser,
            )
        case other:
            raise ConfigError(
                f"model {card.name!r} needs the renderer {other!r}; this version has only harmony and chat_template",
                field="renderer",
            )
