"""Define what the formats share: one `Renderer` per model card, one `OutputParser` per request, and
streamed text.

The text parsers decode tokens incrementally, in complete UTF-8 characters and in linear time.
`renderer_for` imports the libraries of a format at its first use.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from encodings.utf_8 import IncrementalDecoder as Utf8Decoder
from enum import StrEnum, auto
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.messages import ModelDeploymentCard, TokenIds, TokenLogprob, token_ids

V = TypeVar("V")

NO_FORCED_IDS = token_ids()
# `Renderer.inline_bytes` of fast tokenizers, which take 1 or 2 ms for so many words
INLINE_BYTES: Final = 128 << 10
TOOL_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,256}\Z")


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of an assistant message."""

    id: str
    name: str
    arguments: str  # JSON text, as the model wrote it


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of a conversation."""

    role: str  # system, developer, user, assistant, tool
    content: str = ""
    name: str | None = None
    reasoning: str | None = None  # assistant: its reasoning before a tool call or an answer
    preamble: str = ""  # assistant: its text for the user before the content and the tool calls
    tool_calls: tuple[ToolCall, ...] = ()  # assistant
    tool_call_id: str | None = None  # tool


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = {}  # JSON Schema
    is_text: bool = False  # its input is any text, for which `parameters` have one string


class Conversation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Messages and settings from which a prompt is rendered."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    reasoning_effort: str = "medium"  # low, medium, high
    template_args: Mapping[str, Any] = {}  # extra variables of a chat template
    # JSON Schema of the answer; prompt formats that have a field for it include it
    answer_schema: str = ""
    opens_answer: bool = True  # the prompt ends with the start of the assistant's turn


class Channel(StrEnum):
    """The part of an answer that a text belongs to.

    It is a key of dicts that are read per token. A string is hashed in a fifth of an Enum's time.
    """

    REASONING = auto()
    COMMENTARY = auto()  # text for the user before calls or before the final answer
    FINAL = auto()  # the final answer, in a format that marks commentary
    CONTENT = auto()  # all text for the user, in a format that does not mark commentary
    CALL = auto()  # the arguments of a tool call


class Delta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The text that some tokens add to one channel.

    It has no markers and no incomplete UTF-8 characters.
    It is empty if a call begins without arguments, or if there are only log-probabilities.
    Creating a msgspec struct takes a tenth of the time of a frozen dataclass.
    """

    channel: Channel
    text: str = ""
    call_index: int = 0  # of the tool call
    name: str | None = None  # of the called function, in the first delta of a tool call
    logprobs: tuple[TokenLogprob, ...] = ()  # of the text's tokens; parsers leave it empty


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The output of one step. Consecutive deltas differ in their channel or their call."""

    deltas: tuple[Delta, ...] = ()  # in the order of generation
    reasoning_tokens: int = 0  # number of tokens that are reasoning
    num_calls: int = 0  # number of tool calls that begin


NO_OUTPUT: Final = StepOutput()


class OutputParser(Protocol):
    """Incremental parser of one request's output. Its cost is linear in the number of tokens.

    The deltas of all steps, joined, do not depend on how the tokens are divided into steps.
    """

    def push(self, token_ids: TokenIds) -> StepOutput:
        """Return the output of these tokens. Text that may be part of a marker is withheld."""

    def finish(self) -> StepOutput:
        """Return the withheld text. Call it once, after the last push."""


class Renderer(Protocol):
    """Tokenizer, chat template and output parsers of one model."""

    stop_token_ids: tuple[int, ...]  # of the chat format; sent to the engine with chat requests
    # what the template reads besides messages: "tools", "reasoning_effort", template args
    variables: frozenset[str]

    @property
    def call_stop_token_ids(self) -> tuple[int, ...]:
        """Those of the stop tokens that end a call. Empty: a call ends like an answer."""

    @property
    def call_opening(self) -> str | None:
        """The text before the JSON object of a call, with its keys "name" and "arguments".

        None: calls have a header of their own instead (`call_header`), or are not parsed.
        """

    @property
    def inline_bytes(self) -> int:
        """The prompt of a larger body is rendered in a thread, so that it delays no other
        stream.
        """

    @property
    def is_loaded(self) -> bool:
        """False if `preload` would raise `inline_bytes`."""

    def preload(self) -> None:
        """Load what makes long prompts fast.

        This may take seconds; until it ends, other calls are slower.
        """

    def render(self, conversation: Conversation) -> TokenIds:
        """Return the token ids of the prompt.

        Raises:
            InvalidRequest: The conversation can't be rendered.
        """

    def encode(self, text: str, *, is_prompt: bool = True) -> TokenIds:
        """Tokenize plain text. Special tokens in it are encoded as text.

        Args:
            text: The text.
            is_prompt: Add the special tokens with which prompts of the model begin or end, if any.
        """

    def decode(self, token_ids: TokenIds) -> str:
        """Return the text of the ids, special tokens included."""

    def token_texts(self, token_ids: TokenIds) -> list[str]:
        """Return each token as the vocabulary writes it: bytes in GPT-2's alphabet, "Ġ" a blank."""

    def chat_parser(
        self, *, forced_ids: TokenIds = NO_FORCED_IDS, hidden: frozenset[int] | None = None
    ) -> OutputParser:
        """Return a parser for the output of a rendered conversation.

        Args:
            hidden: As for `text_parser`. Harmony hides all special tokens in any case.
            forced_ids: Ids that follow the rendered prompt, as if the model had generated them.
                They set the initial state of the parser and are not output, except that the name of
                a call is in the first step.
        """

    def builtin_tools(self, tools: Iterable[Tool]) -> frozenset[str]:
        """Return the names of the tools that the model was trained with.

        The format writes these in a special form.
        """

    def call_header(self, tool: Tool | None) -> TokenIds | None:
        """Return ids that make the model call a tool when they follow the rendered prompt.

        Args:
            tool: The tool; the output then continues with the arguments, or the text of a built-in
                tool. With None the output continues with the name of a function, right after
                `to=functions.`, and the rest of the header.

        Returns:
            The ids, or None if the format has no such header or calls are not parsed.

        Raises:
            InvalidRequest: The name can't be rendered.
        """

    def answer_header(self) -> tuple[str, TokenIds]:
        """Return what the model generates right before its answer, after any reasoning, as text and
        as ids.

        Both are empty if the answer is the whole output.
        """

    def text_parser(self, hidden: frozenset[int] | None = None) -> OutputParser:
        """Return a parser for the output of a plain prompt. All text is content.

        Args:
            hidden: Ids that are no text; other special tokens are shown. None: all special tokens
                are omitted.
        """


class DeltaBuilder:
    """Collects the text of a step, and builds a delta of each run in one channel."""

    def __init__(self) -> None:
        self.reasoning_tokens = 0
        self._num_calls = 0
        self._deltas: list[Delta] = []  # before the current one
        self._channel: Channel | None = None  # of the current delta
        self._call_index = 0
        self._name: str | None = None
        self._texts: list[str] = []

    def add(self, channel: Channel, text: str) -> None:
        """Add text to a channel, except to that of calls."""
        if text:
            if self._channel is not channel:
                self._begin(channel)
            self._texts.append(text)

    def begin_call(self, index: int, name: str) -> None:
        """Begin a tool call."""
        self._begin(Channel.CALL, index, name)
        self._num_calls += 1

    def add_arguments(self, index: int, text: str) -> None:
        """Add text to the arguments of a call."""
        if text:
            if self._channel is not Channel.CALL or self._call_index != index:
                self._begin(Channel.CALL, index)
            self._texts.append(text)

    def take(self) -> StepOutput:
        """Return what was added since the last call."""
        if self._channel is None and not self.reasoning_tokens:
            return NO_OUTPUT
        self._end()
        deltas = tuple(self._deltas)
        num_reasoning = self.reasoning_tokens
        step = StepOutput(deltas=deltas, reasoning_tokens=num_reasoning, num_calls=self._num_calls)
        self._channel = None
        self.reasoning_tokens = 0
        self._num_calls = 0
        self._deltas.clear()
        return step

    def _begin(self, channel: Channel, call_index: int = 0, name: str | None = None) -> None:
        self._end()
        self._channel = channel
        self._call_index = call_index
        self._name = name

    def _end(self) -> None:
        if self._channel is not None:
            text = "".join(self._texts)
            index = self._call_index
            delta = Delta(channel=self._channel, text=text, call_index=index, name=self._name)
            self._deltas.append(delta)
            self._texts.clear()


def joined(deltas: Sequence[Delta]) -> tuple[Delta, ...]:
    """Return the deltas with each run in one channel, or of one call, as one delta."""
    if len(deltas) < 2:
        return tuple(deltas)
    runs: list[list[Delta]] = []
    for delta in deltas:
        if runs and delta.name is None and _place(runs[-1][0]) == _place(delta):
            runs[-1].append(delta)
        else:
            runs.append([delta])
    return tuple(_one_delta(run) for run in runs)


def _place(delta: Delta) -> tuple[Channel, int]:
    return delta.channel, delta.call_index


def _one_delta(run: Sequence[Delta]) -> Delta:
    if len(run) == 1:
        return run[0]
    text = "".join(delta.text for delta in run)
    logprobs = tuple(logprob for delta in run for logprob in delta.logprobs)
    return msgspec.structs.replace(run[0], text=text, logprobs=logprobs)


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
    # Whether the prompt format writes the names of messages, by role and by whether there are
    # tools; filled on demand.
    writes_names: dict[tuple[str, bool], bool] = field(default_factory=dict, compare=False)


def renderer_for(card: ModelDeploymentCard, files: Mapping[str, bytes]) -> Renderer:
    """Create the renderer of a model card.

    The call takes up to 1 s, so do not run it on an event loop.

    Args:
        card: The model card; it names renderer and parsers.
        files: Contents of the model's files by name.

    Raises:
        ConfigError: A renderer or parser does not exist, or a file is missing or can't be parsed.
    """
    parsers = PARSERS.get(card.renderer)
    if parsers is None:
        raise ConfigError(
            f"model {card.name!r} needs the renderer {card.renderer!r}; this version has only"
            f" {' and '.join(PARSERS)}",
            field="renderer",
        )
    chosen = {name: getattr(card, name) for name in parsers}
    for name, known in parsers.items():
        if chosen[name] not in known:
            raise ConfigError(
                f"model {card.name!r} needs the {name} {chosen[name]!r}, which the renderer"
                f" {card.renderer} does not have; choose one of {', '.join(known)}",
                field=name,
            )
    if card.renderer == "harmony":
        from dynamo_trtllm.tokenization.harmony import HarmonyRenderer

        return HarmonyRenderer(**chosen)
    from dynamo_trtllm.tokenization.template import ChatTemplateRenderer

    return ChatTemplateRenderer(files, stop_token_ids=card.eos_token_ids, **chosen)


_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD_TOKENS: Final = 4  # a UTF-8 character has at most four bytes


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


class TokenTextCache(dict[int, StepOutput | None]):
    """The output of each token that is complete UTF-8 by itself; None for any other token.

    Entries are added at first use, so the cache grows up to the size of the vocabulary. All
    requests of a model share it.

    Args:
        token_bytes: Returns the bytes of a token.
        channel: The channel of the texts.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], channel: Channel = Channel.CONTENT
    ) -> None:
        self.token_bytes = token_bytes
        self._channel = channel

    def __missing__(self, token_id: int) -> StepOutput | None:
        try:
            text = self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = ""
        deltas = (Delta(channel=self._channel, text=text),)
        step = StepOutput(deltas=deltas, reasoning_tokens=int(self._channel is Channel.REASONING))
        return self.setdefault(token_id, step if text else None)


def text_output(text: str) -> StepOutput:
    """Return output that is only content."""
    return StepOutput(deltas=(Delta(channel=Channel.CONTENT, text=text),)) if text else NO_OUTPUT


class BytesTextParser:
    """OutputParser for vocabularies whose tokens are byte strings, b"" if hidden; all text is
    content.
    """

    def __init__(self, token_texts: TokenTextCache) -> None:
        self._token_texts = token_texts
        self._decoder = Utf8Decoder(errors="replace")

    def push(self, token_ids: TokenIds) -> StepOutput:
        if len(token_ids) == 1 and not self._decoder.buffer:
            step = self._token_texts[token_ids[0]]
            if step is not None:
                return step
        data = b"".join(map(self._token_texts.token_bytes, token_ids))
        return text_output(self._decoder.decode(data))

    def finish(self) -> StepOutput:
        return text_output(self._decoder.decode(b"", final=True))


class WindowTextParser:
    """OutputParser for vocabularies in which a token's text depends on the tokens before it.

    Examples are leading spaces and byte fallback. The parser decodes a short window: the tokens of
    the last emitted text, as context, and the tokens after them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden: frozenset[int]) -> None:
        self._decode = decode
        self._hidden = hidden  # special tokens, which are omitted
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_ids: TokenIds) -> StepOutput:
        parts: list[str] = []
        for token_id in token_ids:
            if token_id in self._hidden:
                continue
            self._held.append(token_id)
            text = self._new_text()
            if text.endswith(_REPLACEMENT) and len(self._held) < _MAX_HELD_TOKENS:
                continue
            parts.append(text)
            self._context = self._held
            self._held = []
        return text_output("".join(parts))

    def finish(self) -> StepOutput:
        return text_output(self._new_text() if self._held else "")

    def _new_text(self) -> str:
        return self._decode([*self._context, *self._held])[len(self._decode(self._context)) :]


MAX_BYTES: Final = 16 << 20
MIN_CACHED_CHARS: Final = 256  # encoding a shorter text is as fast as a lookup


class TextCache(Generic[V]):
    """Thread-safe LRU cache from texts to what is made of them. Callers must not modify the values.

    All clients of a process share it. Only who already has a text can learn, from the time, that it
    was sent before.

    Args:
        make: Makes the value of a text, for example its token ids.
        max_bytes: Maximum size of the texts and their values together.
        min_chars: The values of shorter texts are made each time.
    """

    def __init__(
        self,
        make: Callable[[str], V],
        max_bytes: int = MAX_BYTES,
        min_chars: int = MIN_CACHED_CHARS,
    ) -> None:
        self._make = make
        self._max_bytes = max_bytes
        self._min_chars = min_chars
        self._cached: OrderedDict[str, tuple[V, int]] = OrderedDict()  # values and bytes by text
        self._lock = threading.Lock()  # large bodies are rendered in threads
        self.num_bytes = 0

    def get(self, text: str) -> V:
        """Return the value of the text, from the cache or made."""
        if len(text) < self._min_chars:
            return self._make(text)
        with self._lock:
            cached = self._cached.get(text)
            if cached is not None:
                self._cached.move_to_end(text)
                return cached[0]
        value = self._make(text)
        with self._lock:
            self._put(text, value)
        return value

    def _put(self, text: str, value: V) -> None:
        num_bytes = sys.getsizeof(text) + sys.getsizeof(value)
        if text in self._cached or num_bytes > self._max_bytes:
            return
        self._cached[text] = value, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            _, (_, num_bytes) = self._cached.popitem(last=False)
            self.num_bytes -= num_bytes
