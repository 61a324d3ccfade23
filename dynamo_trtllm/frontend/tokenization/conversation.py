"""Define conversations: the messages, tools and settings from which prompts are rendered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

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
    # The tool takes any text. `parameters` then have one string, which is this text.
    is_text: bool = False


class Conversation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Messages and settings from which a prompt is rendered."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    reasoning_effort: str = "medium"  # low, medium, high
    template_args: Mapping[str, Any] = {}  # extra variables of a chat template
    # JSON Schema of the answer; prompt formats that have a field for it include it
    answer_schema: str = ""
    opens_answer: bool = True  # the prompt ends with the start of the assistant's turn
