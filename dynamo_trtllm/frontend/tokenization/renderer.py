"""Define renderers, one per model card: from conversations to token ids, and back to texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from dynamo_trtllm.frontend.tokenization.conversation import Conversation, Tool
from dynamo_trtllm.frontend.tokenization.output import OutputParser
from dynamo_trtllm.protocol.messages import TokenIds, token_ids

NO_FORCED_IDS = token_ids()
# `Renderer.inline_bytes` of fast tokenizers, which take 1 or 2 ms for a text of this size.
INLINE_BYTES: Final = 128 << 10


class Renderer(Protocol):
    """Tokenizer, chat template and output parsers of one model."""

    # Stop tokens of the chat format, which chat requests send to the engine.
    stop_token_ids: tuple[int, ...]
    # what the template reads besides messages: "tools", "reasoning_effort", template args
    variables: frozenset[str]

    @property
    def call_stop_token_ids(self) -> tuple[int, ...]:
        """The tokens of `stop_token_ids` that end a call. Empty: a call ends like an answer."""

    @property
    def call_opening(self) -> str | None:
        """The text before the JSON object of a call, with its keys "name" and "arguments".

        None: calls have a header of their own instead (`call_header`), or are not parsed.
        """

    @property
    def inline_bytes(self) -> int:
        """The most bytes of a body whose prompt is rendered on the event loop.

        The prompt of a larger one is rendered in a thread, so that it delays no other stream.
        """

    @property
    def is_loaded(self) -> bool:
        """False if `preload` would increase `inline_bytes`."""

    def preload(self) -> None:
        """Load what makes long prompts fast.

        This may take seconds; until it ends, other calls are slower.
        """

    def render(self, conversation: Conversation) -> TokenIds:
        """Return the token ids of the prompt.

        Raises:
            InvalidRequest: the conversation can't be rendered.
        """

    def encode(self, text: str, *, is_prompt: bool = True) -> TokenIds:
        """Tokenize plain text. Special tokens in it are encoded as text.

        Args:
            text: the text.
            is_prompt: add the special tokens with which prompts of the model begin or end, if any.
        """

    def decode(self, token_ids: TokenIds) -> str:
        """Return the text of the ids, special tokens included."""

    def token_text(self, token_id: int) -> str:
        """Return the text of a token inside of a text, such as " sky".

        At the start of a text, some decoders drop the blank.
        """

    def token_texts(self, token_ids: TokenIds) -> list[str]:
        """Return each token as the vocabulary writes it, such as "Ġsky" for " sky"."""

    def chat_parser(
        self, *, forced_ids: TokenIds = NO_FORCED_IDS, hidden: frozenset[int] | None = None
    ) -> OutputParser:
        """Return a parser for the output of a rendered conversation.

        Args:
            hidden: as for `text_parser`. Harmony hides all special tokens in any case.
            forced_ids: ids that follow the rendered prompt, as if the model had generated them.
                They set the initial state of the parser and are not output, except that the name of
                a call is in the first step.
        """

    def builtin_tools(self, tools: Iterable[Tool]) -> frozenset[str]:
        """Return the names of those tools that the model was trained with.

        The prompt format writes such tools in a special form.
        """

    def call_header(self, tool: Tool | None) -> TokenIds | None:
        """Return ids that make the model call a tool when they follow the rendered prompt.

        Args:
            tool: the tool; the output then continues with the arguments, or the text of a built-in
                tool. With None the output continues with the name of a function, right after
                `to=functions.`, and the rest of the header.

        Returns:
            The ids, or None if the format has no such header or calls are not parsed.

        Raises:
            InvalidRequest: the name can't be rendered.
        """

    def answer_header(self) -> tuple[str, TokenIds]:
        """Return what the model generates right before its answer, after any reasoning, as text and
        as ids.

        Both are empty if the answer is the whole output.
        """

    def text_parser(
        self, hidden: frozenset[int] | None = None, *, before: Sequence[int] = ()
    ) -> OutputParser:
        """Return a parser for the output of a plain prompt. All text is content.

        Args:
            hidden: ids that are no text; other special tokens are shown. None: all special tokens
                are omitted.
            before: the last tokens of the prompt, which the text continues. Without them, some
                decoders drop a blank at the start of the text.
        """
