"""Renders with the installed module openai_harmony, which two distributions have, and puts headers
into our order.

openai-harmony has all recipients before the channel. Its fork oss-harmony (from 0.0.10 on, required
by vLLM 0.31) has those on the channel commentary after it. What is installed is found out by what
it renders, not by its name: both write the same files, so that the one installed last counts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from datetime import date

import openai_harmony as oh

from dynamo_trtllm.frontend.tokenization import o200k_tokenizer
from dynamo_trtllm.frontend.tokenization.conversation import Conversation
from dynamo_trtllm.frontend.tokenization.harmony import (
    HarmonyMessage,
    conversation_messages,
    system_message,
)

# `load_tokenizer` checks the hash of the file at each call, which takes 10 ms.
_harmony = functools.cache(lambda: o200k_tokenizer.load_tokenizer().harmony)
START = 200006
MESSAGE = 200008
_HEADER = re.compile(
    r"<\|start\|>(?P<sender>[^<]*?)(?P<early> to=[^< ]+)?"
    r"(?:<\|channel\|>(?P<channel>[a-z]+)(?P<late> to=[^< ]+)?(?P<kind>"
    r" <\|constrain\|>[a-z]+)?)?<\|message\|>"
)


def rendered(conversation: Conversation, today: date) -> list[int]:
    """Return the prompt as the library renders it, in its order."""
    first = system_message(conversation.reasoning_effort, today)
    messages = [first, *map(_for_library, conversation_messages(conversation))]
    config = oh.RenderConversationConfig(auto_drop_analysis=False)
    ids: list[int] = _harmony().render_conversation_for_completion(
        oh.Conversation.from_messages(messages), oh.Role.ASSISTANT, config
    )
    return ids


def in_our_order(ids: Sequence[int]) -> list[int]:
    """Return the prompt with the recipients of the assistant after the channel, and those of tools
    before it.
    """
    return [token_id for message in _messages(ids) for token_id in _reordered(message)]


def _for_library(message: HarmonyMessage) -> oh.Message:
    content: str | oh.DeveloperContent = message.text
    if message.role == oh.Role.DEVELOPER:
        content = oh.DeveloperContent.new()
        content = content.with_instructions(message.text) if message.text else content
        tools = [
            oh.ToolDescription.new(tool.name, tool.description, tool.parameters or None)
            for tool in message.tools
        ]
        content = content.with_function_tools(tools) if tools else content
    made = oh.Message.from_author_and_content(
        oh.Author(role=message.role, name=message.author), content
    )
    made.recipient = message.recipient
    made.channel = message.channel
    made.content_type = message.content_type and f"<|constrain|>{message.content_type}"
    return made


def _messages(ids: Sequence[int]) -> Iterator[list[int]]:
    starts = [at for at, token_id in enumerate(ids) if token_id == START]
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        yield list(ids[start:end])


def _reordered(message: list[int]) -> list[int]:
    if MESSAGE not in message:
        return message  # the start of the assistant's turn
    encoding = _harmony()
    end = message.index(MESSAGE) + 1
    header = _HEADER.fullmatch(encoding.decode(message[:end]))
    assert header is not None
    sender, early, channel, late, kind = (part or "" for part in header.groups())
    if not early and not late:
        return message
    behind = f"{early}{late}" if sender == "assistant" else ""
    before = "" if behind else f"{early}{late}"
    text = f"<|start|>{sender}{before}<|channel|>{channel}{behind}{kind}<|message|>"
    return [*encoding.encode(text, allowed_special="all"), *message[end:]]
