"""Render Harmony, the prompt format of gpt-oss: control tokens, and between them texts.

BPE merges never cross a control token. So texts that are encoded separately give the same ids as a
whole message that openai-harmony renders. Therefore, fastokens encodes the text of clients: the
encoder of openai-harmony is three times slower, holds the GIL, and its cost is quadratic in the
length of a word.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import takewhile
from typing import Final, NamedTuple

import openai_harmony as oh

from dynamo_trtllm.frontend.tokenization import harmony_builtins, harmony_parser, o200k_tokenizer
from dynamo_trtllm.frontend.tokenization.conversation import (
    TOOL_NAME,
    Conversation,
    Message,
    Tool,
    ToolCall,
)
from dynamo_trtllm.frontend.tokenization.harmony_builtins import PYTHON
from dynamo_trtllm.frontend.tokenization.harmony_parser import STOPS, HarmonyParser
from dynamo_trtllm.frontend.tokenization.harmony_tools import DeveloperTexts
from dynamo_trtllm.frontend.tokenization.output import Channel, OutputParser
from dynamo_trtllm.frontend.tokenization.renderer import INLINE_BYTES, NO_FORCED_IDS
from dynamo_trtllm.frontend.tokenization.text_cache import TextCache
from dynamo_trtllm.frontend.tokenization.text_parsers import BytesTextParser, TokenTextCache
from dynamo_trtllm.protocol.errors import InvalidRequest, UnsupportedParameter
from dynamo_trtllm.protocol.messages import TokenIds, token_ids

_FORMATS: Final = "# Response Formats\n\n## answer"
_ANSWER: Final = "<|channel|>final<|message|>"
# An effort is only a hint. So the nearest effort of Harmony replaces an effort that Harmony lacks.
# No effort at all ("none") is not possible.
_EFFORTS: Final = {
    "minimal": oh.ReasoningEffort.LOW,
    "low": oh.ReasoningEffort.LOW,
    "medium": oh.ReasoningEffort.MEDIUM,
    "high": oh.ReasoningEffort.HIGH,
    "xhigh": oh.ReasoningEffort.HIGH,
    "max": oh.ReasoningEffort.HIGH,
}


@dataclass(eq=False, kw_only=True)
class HarmonyRenderer:
    """Renderer of gpt-oss models.

    Args:
        reasoning_parser: "gpt_oss"; with "none" reasoning is part of the content.
        tool_call_parser: "harmony"; with "none" tool calls are part of the content.
        today: returns the date for the system message.
    """

    stop_token_ids = STOPS
    call_stop_token_ids = (harmony_parser.CALL,)
    call_opening = None
    variables = frozenset({"tools", "reasoning_effort"})

    reasoning_parser: str = "gpt_oss"
    tool_call_parser: str = "harmony"
    today: Callable[[], date] = date.today

    def __post_init__(self) -> None:
        self._parses_calls = self.tool_call_parser != "none"
        self._tokenizer = o200k_tokenizer.load_tokenizer()
        self._harmony = self._tokenizer.harmony
        self._token_cache = TextCache(self.encode)
        self._developer_texts = DeveloperTexts(self._harmony)
        self._token_texts = TokenTextCache(self._tokenizer.token_bytes)
        channels = (Channel.REASONING, Channel.COMMENTARY, Channel.FINAL)
        token_bytes = self._tokenizer.token_bytes
        self._channel_texts = {
            channel: TokenTextCache(token_bytes, channel) for channel in channels
        }
        self._header = functools.lru_cache(maxsize=64)(self._make_header)
        self._system = functools.lru_cache(maxsize=16)(self._make_system)
        self._assistant_start = self._harmony.encode(
            "<|start|>assistant", allowed_special={"<|start|>"}
        )

    @property
    def inline_bytes(self) -> int:
        return INLINE_BYTES if self.is_loaded else o200k_tokenizer.SHORT_CHARS

    @property
    def is_loaded(self) -> bool:
        return self._tokenizer.is_loaded

    def preload(self) -> None:
        self._tokenizer.load()

    def render(self, conversation: Conversation) -> TokenIds:
        """Return the token ids of the prompt. Raise InvalidRequest."""
        try:
            ids = self._system_ids(conversation)
            for message in conversation_messages(conversation):
                self._append(ids, message)
        except (oh.HarmonyError, ValueError, RecursionError) as exc:
            # A ValueError means that a schema is nested too deeply.
            raise InvalidRequest(
                f"the conversation can't be rendered: {exc}", field="messages"
            ) from exc
        if conversation.opens_answer:
            ids.extend(self._assistant_start)
        return ids

    def encode(self, text: str, *, is_prompt: bool = True) -> TokenIds:
        """Tokenize plain text.

        Special tokens in the text are encoded as text. `is_prompt` has no effect: a plain prompt
        gets no special tokens.
        """
        return self._tokenizer.encode(text)

    def decode(self, token_ids: TokenIds) -> str:
        """Return the text of the ids, special tokens included.

        Raise InvalidRequest for an unknown id.
        """
        return self._tokenizer.decode(token_ids)

    def token_text(self, token_id: int) -> str:
        return self.decode(array("I", (token_id,)))

    def token_texts(self, token_ids: TokenIds) -> list[str]:
        texts = {token: self._tokenizer.token_text(token) for token in set(token_ids)}
        return [texts[token] for token in token_ids]

    def chat_parser(
        self, *, forced_ids: TokenIds = NO_FORCED_IDS, hidden: frozenset[int] | None = None
    ) -> OutputParser:
        return HarmonyParser(
            self._channel_texts,
            forced_ids=forced_ids,
            is_reasoning_split=self.reasoning_parser != "none",
            is_call_split=self._parses_calls,
        )

    def builtin_tools(self, tools: Iterable[Tool]) -> frozenset[str]:
        return frozenset(tool.name for tool in tools if harmony_builtins.is_builtin(tool))

    def call_header(self, tool: Tool | None) -> TokenIds | None:
        if not self._parses_calls:
            return None
        if tool is None:
            return self._control_text("<|channel|>commentary to=functions.")
        _check_name(tool.name, "tool_choice")
        if harmony_builtins.is_builtin(tool):
            return self._header_end(
                harmony_builtins.CHANNEL, f" to={tool.name}", harmony_builtins.CONTENT_TYPE
            )
        return self._header_end("commentary", f" to=functions.{tool.name}", "json")

    def answer_header(self) -> tuple[str, TokenIds]:
        return _ANSWER, self._control_text(_ANSWER)

    def _control_text(self, text: str) -> TokenIds:
        return array("I", self._harmony.encode(text, allowed_special="all"))

    def text_parser(
        self, hidden: frozenset[int] | None = None, *, before: Sequence[int] = ()
    ) -> OutputParser:
        if hidden is None:
            return BytesTextParser(self._token_texts)
        all_bytes = self._tokenizer.all_bytes
        return BytesTextParser(
            TokenTextCache(lambda token_id: b"" if token_id in hidden else all_bytes(token_id))
        )

    def _system_ids(self, conversation: Conversation) -> TokenIds:
        """Return the token ids of the system message.

        A client's description of Python replaces that of Harmony.
        """
        builtins = self.builtin_tools(conversation.tools)
        has_functions = len(builtins) < len(conversation.tools)
        ids = token_ids(
            self._system(conversation.reasoning_effort, self.today(), builtins, has_functions)
        )
        description = next(
            (tool.description for tool in conversation.tools if tool.name == PYTHON), ""
        )
        if not description or PYTHON not in builtins:
            return ids
        # The text of the message is between its header and its last token.
        begin = ids.index(harmony_parser.MESSAGE) + 1
        header = ids[:begin]
        text = self.decode(ids[begin:-1])
        end = ids[-1:]
        described = text.replace(harmony_builtins.PYTHON_DESCRIPTION, description)
        return header + self._token_cache.get(described) + end

    def _make_system(
        self, effort: str, today: date, builtins: frozenset[str], has_functions: bool
    ) -> list[int]:
        options = oh.RenderOptions(conversation_has_function_tools=has_functions)
        ids: list[int] = self._harmony.render(system_message(effort, today, builtins), options)
        return ids

    def _append(self, ids: TokenIds, message: HarmonyMessage) -> None:
        """Append a message to the ids of a prompt."""
        header = self._header(
            message.role,
            message.author,
            message.recipient,
            message.channel,
            message.content_type,
        )
        ids.extend(header)
        text = message.text
        if message.role == oh.Role.DEVELOPER:
            text = self._developer_texts.text(text, message.tools)
        ids.extend(self._token_cache.get(text))
        is_call = message.role == oh.Role.ASSISTANT and message.recipient is not None
        ids.append(harmony_parser.CALL if is_call else harmony_parser.END)

    def _make_header(
        self,
        role: oh.Role,
        author: str | None,
        recipient: str | None,
        channel: str | None,
        content_type: str | None,
    ) -> TokenIds:
        """Return what precedes the text of a message, in the order of OpenAI's guide to Harmony.

        A call has its recipient after the channel: gpt-oss writes calls in this form, and the next
        prompt repeats the tokens of the call. Other messages have the recipient before the channel.
        openai-harmony and its fork oss-harmony differ here from the guide and from each other, so
        neither of them renders the header.
        """
        sender = role.value
        if author is not None:
            sender = author if role == oh.Role.TOOL else f"{sender}:{author}"
        address = "" if recipient is None else f" to={recipient}"
        is_after_channel = role == oh.Role.ASSISTANT and channel is not None
        if not is_after_channel:
            sender = sender + address
            address = ""
        ids = token_ids([harmony_parser.START, *self.encode(sender)])
        if channel is None:
            ids.append(harmony_parser.MESSAGE)
        else:
            ids.extend(self._header_end(channel, address, content_type))
        return ids

    def _header_end(self, channel: str, address: str, content_type: str | None) -> TokenIds:
        """Return the end of a header, from the channel on.

        A content type follows `<|constrain|>`, except that of built-in tools.
        """
        ids = token_ids([harmony_parser.CHANNEL])
        if content_type is None:
            ids.extend(self.encode(channel + address))
        elif content_type == harmony_builtins.CONTENT_TYPE:
            ids.extend(self.encode(f"{channel}{address} {content_type}"))
        else:
            marked = [harmony_parser.CONSTRAIN, *self.encode(content_type)]
            ids.extend([*self.encode(f"{channel}{address} "), *marked])
        ids.append(harmony_parser.MESSAGE)
        return ids


class HarmonyMessage(NamedTuple):
    """A message after the system message.

    An `oh.Message` would take a third of the time of a prompt to create.
    """

    role: oh.Role
    text: str  # a developer message has its instructions here
    author: str | None = None
    recipient: str | None = None
    channel: str | None = None
    content_type: str | None = None
    tools: tuple[Tool, ...] = ()  # only a developer message has tools


def system_message(effort: str, today: date, builtins: frozenset[str] = frozenset()) -> oh.Message:
    """Return the first message of a prompt, with the built-in tools of these names.

    Raise UnsupportedParameter.
    """
    known = _EFFORTS.get(effort)
    if known is None:
        raise UnsupportedParameter(
            f"reasoning_effort {effort!r} is not supported by Harmony; use low, medium or high",
            field="reasoning_effort",
        )
    system = (
        oh.SystemContent.new()
        .with_reasoning_effort(known)
        .with_conversation_start_date(today.isoformat())
    )
    return oh.Message.from_role_and_content(
        oh.Role.SYSTEM, harmony_builtins.add_to(system, builtins)
    )


def conversation_messages(conversation: Conversation) -> Iterator[HarmonyMessage]:
    """Yield the Harmony messages of a conversation in order, after the system message.

    Raise InvalidRequest.
    """
    leading = list(
        takewhile(lambda message: message.role in ("system", "developer"), conversation.messages)
    )
    texts = [message.content for message in leading if message.content]
    if conversation.answer_schema:
        texts.append(f"{_FORMATS}\n\n{conversation.answer_schema}")
    instructions = "\n\n".join(texts)
    functions = tuple(tool for tool in conversation.tools if not harmony_builtins.is_builtin(tool))
    if instructions or functions:
        yield _developer(instructions, functions)
    # Harmony keeps only the reasoning after the last answer, which belongs to the current turn.
    last_answer = -1
    for index, message in enumerate(conversation.messages):
        if _is_answer(message):
            last_answer = index
    addresses: dict[str, _Address] = {}
    function_names = frozenset(tool.name for tool in functions)
    for index, message in enumerate(conversation.messages[len(leading) :], start=len(leading)):
        yield from _turn(message, addresses, function_names, keep_reasoning=index > last_answer)


def _is_answer(message: Message) -> bool:
    """Return whether a message ends the model's turn.

    A message that has only reasoning or a preamble was cut off.
    """
    if message.role != "assistant" or message.tool_calls:
        return False
    was_cut_off = not message.content and bool(message.reasoning or message.preamble)
    return not was_cut_off


def _developer(instructions: str, tools: tuple[Tool, ...] = ()) -> HarmonyMessage:
    for tool in tools:
        _check_name(tool.name, "tools")
    return HarmonyMessage(oh.Role.DEVELOPER, instructions, tools=tools)


class _Address(NamedTuple):
    """The recipient and the channel of a call.

    The message with the result of the call has the same channel, and the recipient as its author.
    """

    recipient: str
    channel: str


def _turn(
    message: Message,
    addresses: dict[str, _Address],
    functions: frozenset[str],
    *,
    keep_reasoning: bool,
) -> Iterator[HarmonyMessage]:
    """Yield the Harmony messages of one message.

    Args:
        message: the message.
        addresses: the addresses of the earlier tool calls, by the ids of the calls. Those of this
            message's calls are added.
        functions: names of the request's tools that are not built-in.
        keep_reasoning: include the reasoning of an assistant message without an answer.
    """
    calls = message.tool_calls
    match message.role:
        case "user":
            yield HarmonyMessage(oh.Role.USER, message.content, author=message.name)
        case "assistant":
            is_answer = _is_answer(message)
            if message.reasoning and keep_reasoning and not is_answer:
                yield HarmonyMessage(oh.Role.ASSISTANT, message.reasoning, channel="analysis")
            if message.preamble:
                yield HarmonyMessage(oh.Role.ASSISTANT, message.preamble, channel="commentary")
            if message.content or is_answer:
                yield HarmonyMessage(
                    oh.Role.ASSISTANT, message.content, channel="commentary" if calls else "final"
                )
            for call in calls:
                sent = _call(call, functions)
                yield sent
                addresses[call.id] = _Address(sent.recipient or "", sent.channel or "")
        case "tool":
            address = addresses.get(message.tool_call_id or "")
            if address is None:
                raise InvalidRequest(
                    f"tool_call_id {message.tool_call_id!r} does not match a tool call of an"
                    " earlier assistant message",
                    field="messages",
                )
            yield HarmonyMessage(
                oh.Role.TOOL,
                message.content,
                author=address.recipient,
                recipient="assistant",
                channel=address.channel,
            )
        case "system" | "developer":
            yield _developer(message.content)
        case role:
            raise InvalidRequest(
                f"unknown role {role!r}; use system, developer, user, assistant or tool",
                field="messages",
            )


def _call(call: ToolCall, functions: frozenset[str]) -> HarmonyMessage:
    """Return the message of an earlier call. `functions`: as for `_turn`."""
    _check_name(call.name, "messages")
    text = harmony_builtins.call_text(call, functions)
    if text is None:
        return HarmonyMessage(
            oh.Role.ASSISTANT,
            call.arguments,
            recipient=f"functions.{call.name}",
            channel="commentary",
            content_type="json",
        )
    return HarmonyMessage(
        oh.Role.ASSISTANT,
        text,
        recipient=call.name,
        channel=harmony_builtins.CHANNEL,
        content_type=harmony_builtins.CONTENT_TYPE,
    )


def _check_name(name: str, field: str) -> None:
    if TOOL_NAME.match(name) is None:
        raise InvalidRequest(
            f"tool name {name!r} is not valid; use letters, digits, '_', '-' and '.'", field=field
        )
