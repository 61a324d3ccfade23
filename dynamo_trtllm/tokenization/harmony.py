"""Render Harmony, the prompt format of gpt-oss: openai-harmony encodes message frames, tiktoken the text inside them.

BPE merges never cross a control token, and a frame ends in one. So text that is encoded separately and inserted into a
frame gives the same ids as rendering the whole message. openai-harmony's encoder does not get text of clients: it is
three times slower, holds the GIL, and its cost is quadratic in the length of a word.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any, Final

import openai_harmony as oh

from dynamo_trtllm.errors import InvalidRequest, UnsupportedParameter
from dynamo_trtllm.messages import Conversation, Message, TokenIds, Tool, token_ids
from dynamo_trtllm.tokenization import vocabulary
from dynamo_trtllm.tokenization.base import NO_FORCED_IDS, TOOL_NAME, OutputParser
from dynamo_trtllm.tokenization.harmony_parser import HarmonyParser, HarmonyTexts
from dynamo_trtllm.tokenization.harmony_tools import DeveloperTexts
from dynamo_trtllm.tokenization.text import BytesTextParser, TokenizationCache, TokenTextCache

_RETURN: Final = 200002
_CALL: Final = 200012
_NAME: Final = "(name)"  # a placeholder
_FORMATS: Final = "# Response Formats\n\n## answer"
_JSON: Final = "<|constrain|>json"
_ANSWER: Final = "<|channel|>final<|message|>"
_EFFORTS: Final = {
    "low": oh.ReasoningEffort.LOW,
    "medium": oh.ReasoningEffort.MEDIUM,
    "high": oh.ReasoningEffort.HIGH,
}


class HarmonyRenderer:
    """Renderer of gpt-oss models.

    Args:
        reasoning_parser: "gpt_oss"; with "none" reasoning is part of the content.
        tool_call_parser: "harmony"; with "none" tool calls are part of the content.
        cache_dir: Cache folder of the vocabulary.
        today: Returns the date for the system message.
    """

    stop_token_ids: tuple[int, ...] = (_RETURN, _CALL)
    variables = frozenset({"tools", "reasoning_effort"})

    def __init__(
        self,
        *,
        reasoning_parser: str = "gpt_oss",
        tool_call_parser: str = "harmony",
        cache_dir: Path | None = None,
        today: Callable[[], date] = date.today,
    ) -> None:
        self._is_reasoning_split = reasoning_parser != "none"
        self._is_call_split = tool_call_parser != "none"
        self._harmony = vocabulary.load_harmony(cache_dir)
        self._tiktoken = vocabulary.load_tiktoken(cache_dir)
        self._token_cache = TokenizationCache(self.encode)
        self._developer_texts = DeveloperTexts(self._harmony)
        self._token_texts = HarmonyTexts(
            content=TokenTextCache(self._token_bytes), reasoning=TokenTextCache(self._token_bytes, is_reasoning=True)
        )
        self._today = today
        self._frame = functools.lru_cache(maxsize=64)(self._make_frame)
        self._system = functools.lru_cache(maxsize=16)(self._make_system)
        self._assistant_start = self._harmony.encode("<|start|>assistant", allowed_special={"<|start|>"})

    def render(self, conversation: Conversation) -> TokenIds:
        """Return the token ids of the prompt, up to the start of the assistant's turn. Raise InvalidRequest."""
        try:
            ids = token_ids(self._system(conversation.reasoning_effort, self._today(), bool(conversation.tools)))
            for message in _said_messages(conversation):
                self._append(ids, message)
        except (oh.HarmonyError, ValueError, RecursionError) as exc:  # ValueError: a schema too deep for its JSON
            raise InvalidRequest(f"the conversation can't be rendered: {exc}", field="messages") from exc
        ids.extend(self._assistant_start)
        return ids

    def encode(self, text: str) -> TokenIds:
        """Tokenize plain text. Special tokens in it are encoded as text."""
        return vocabulary.encode_text(self._tiktoken, text)

    def decode(self, token_ids: TokenIds) -> str:
        """Return the text of the ids, special tokens included. Raise InvalidRequest for an unknown id."""
        try:
            return self._tiktoken.decode(token_ids.tolist(), errors="replace")
        except KeyError as exc:
            raise InvalidRequest(f"token id {exc} is not in the vocabulary") from exc

    def chat_parser(self, *, forced_ids: TokenIds = NO_FORCED_IDS) -> OutputParser:
        return HarmonyParser(
            self._token_bytes,
            self._token_texts,
            forced_ids=forced_ids,
            is_reasoning_split=self._is_reasoning_split,
            is_call_split=self._is_call_split,
        )

    def call_header(self, name: str | None) -> TokenIds | None:
        if not self._is_call_split:
            return None
        if name is not None:
            _check_name(name, "tool_choice")
        rest = "" if name is None else f"{name} {_JSON}<|message|>"
        return self._control_text(f"<|channel|>commentary to=functions.{rest}")

    def answer_header(self) -> tuple[str, TokenIds]:
        return _ANSWER, self._control_text(_ANSWER)

    def _control_text(self, text: str) -> TokenIds:
        return array("I", self._harmony.encode(text, allowed_special="all"))

    def text_parser(self) -> OutputParser:
        return BytesTextParser(self._token_bytes, self._token_texts.content)

    def _token_bytes(self, token_id: int) -> bytes:
        return vocabulary.ordinary_bytes(self._tiktoken, token_id)

    def _make_system(self, effort: str, today: date, has_tools: bool) -> list[int]:
        options = oh.RenderOptions(conversation_has_function_tools=has_tools)
        ids: list[int] = self._harmony.render(_system_message(effort, today), options)
        return ids

    def _append(self, ids: TokenIds, message: oh.Message) -> None:
        body = message.content[0]
        if isinstance(body, oh.DeveloperContent):
            text = self._developer_texts.text(body)
        else:
            assert isinstance(body, oh.TextContent)
            text = body.text
        author, recipient = message.author.name, message.recipient
        name = recipient if author is None else author  # the one that a client chose; the other has a fixed value
        placeholders = (author and _NAME, recipient and _NAME if author is None else recipient)
        head, tail = self._frame(message.author.role, *placeholders, message.channel, message.content_type)
        for part in head:
            ids.extend(self.encode(part.replace(_NAME, name or "")) if isinstance(part, str) else part)
        ids.extend(self._token_cache.ids(text))
        ids.extend(tail)

    def _make_frame(
        self, role: oh.Role, name: str | None, *header: str | None
    ) -> tuple[list[str | list[int]], list[int]]:
        """Return what precedes and what follows the text of a message with this header.

        The first is a list of token ids, and of texts that contain the placeholder of a name. The second is token ids.
        """
        recipient, channel, content_type = header
        message = oh.Message.from_author_and_content(oh.Author(role=role, name=name), "")
        message.recipient, message.channel, message.content_type = recipient, channel, content_type
        parts: list[str | list[int]] = []
        rendered = self._harmony.render(message)
        for _, run in itertools.groupby(rendered[:-1], _is_control):
            ids = list(run)
            text = self._harmony.decode(ids)
            parts.append(text if _NAME in text else ids)
        return parts, rendered[-1:]


def harmony_messages(conversation: Conversation, today: date) -> Iterator[oh.Message]:
    """Yield the Harmony messages of a conversation in order, each with exactly one content. Raise InvalidRequest."""
    yield _system_message(conversation.reasoning_effort, today)
    yield from _said_messages(conversation)


def _system_message(effort: str, today: date) -> oh.Message:
    known = _EFFORTS.get(effort)
    if known is None:
        raise UnsupportedParameter(
            f"reasoning_effort {effort!r} is not supported by Harmony; use low, medium or high",
            field="reasoning_effort",
        )
    system = oh.SystemContent.new().with_reasoning_effort(known).with_conversation_start_date(today.isoformat())
    return oh.Message.from_role_and_content(oh.Role.SYSTEM, system)


def _said_messages(conversation: Conversation) -> Iterator[oh.Message]:
    """Yield all messages after the system message."""
    lead = 0
    while lead < len(conversation.messages) and conversation.messages[lead].role in ("system", "developer"):
        lead += 1
    texts = [message.content for message in conversation.messages[:lead] if message.content]
    if conversation.answer_schema:
        texts.append(f"{_FORMATS}\n\n{conversation.answer_schema}")
    instructions = "\n\n".join(texts)
    if instructions or conversation.tools:
        yield _developer(instructions, conversation.tools)
    last_answer = max(
        (i for i, m in enumerate(conversation.messages) if m.role == "assistant" and not m.tool_calls), default=-1
    )
    names: dict[str, str] = {}
    for index, message in enumerate(conversation.messages[lead:], start=lead):
        yield from _turn(message, names, keep_reasoning=index > last_answer)


def _developer(instructions: str, tools: tuple[Tool, ...] = ()) -> oh.Message:
    content = oh.DeveloperContent.new()
    if instructions:
        content = content.with_instructions(instructions)
    if tools:
        content = content.with_function_tools([_tool(tool) for tool in tools])
    return oh.Message.from_role_and_content(oh.Role.DEVELOPER, content)


def _tool(tool: Tool) -> oh.ToolDescription:
    parameters: Mapping[str, Any] = tool.parameters
    _check_name(tool.name, "tools")
    return oh.ToolDescription.new(tool.name, tool.description, dict(parameters) if parameters else None)


def _turn(message: Message, names: dict[str, str], *, keep_reasoning: bool) -> Iterator[oh.Message]:
    """Yield the Harmony messages of one message.

    Args:
        message: The message.
        names: Tool names by id of the earlier tool calls. The calls of this message are added.
        keep_reasoning: Include the reasoning of an assistant message.
    """
    match message.role:
        case "user":
            author = oh.Author(role=oh.Role.USER, name=message.name)
            yield oh.Message.from_author_and_content(author, message.content)
        case "assistant":
            yield from _assistant(message, keep_reasoning=keep_reasoning)
            names.update((call.id, call.name) for call in message.tool_calls)
        case "tool":
            yield _tool_result(message, names)
        case "system" | "developer":
            yield _developer(message.content)
        case role:
            raise InvalidRequest(
                f"unknown role {role!r}; use system, developer, user, assistant or tool", field="messages"
            )


def _assistant(message: Message, *, keep_reasoning: bool) -> Iterator[oh.Message]:
    """Yield an assistant message. Its reasoning is included only if it led to tool calls without a final answer yet."""
    if message.tool_calls and message.reasoning and keep_reasoning:
        yield _said(message.reasoning, "analysis")
    if message.content or not message.tool_calls:
        yield _said(message.content, "commentary" if message.tool_calls else "final")
    for call in message.tool_calls:
        _check_name(call.name, "messages")
        said = _said(call.arguments, "commentary")
        yield said.with_recipient(f"functions.{call.name}").with_content_type(_JSON)


def _said(text: str, channel: str) -> oh.Message:
    return oh.Message.from_role_and_content(oh.Role.ASSISTANT, text).with_channel(channel)


def _tool_result(message: Message, names: Mapping[str, str]) -> oh.Message:
    name = names.get(message.tool_call_id or "")
    if name is None:
        raise InvalidRequest(
            f"tool_call_id {message.tool_call_id!r} does not match a tool call of an earlier assistant message",
            field="messages",
        )
    author = oh.Author.new(oh.Role.TOOL, f"functions.{name}")
    return (
        oh.Message.from_author_and_content(author, message.content)
        .with_channel("commentary")
        .with_recipient("assistant")
    )


def _is_control(token_id: int) -> bool:
    return token_id >= vocabulary.FIRST_SPECIAL


def _check_name(name: str, field: str) -> None:
    if TOOL_NAME.match(name) is None:
        raise InvalidRequest(f"tool name {name!r} is not valid; use letters, digits, '_', '-' and '.'", field=field)
