"""Render the text of Harmony developer messages: instructions, and tools as TypeScript, as
openai-harmony does.

openai-harmony translates the schemas but returns only token ids. Its encoder holds the GIL, and the
cost is quadratic in the length of a word. Therefore, openai-harmony renders a few tools at a time,
with placeholders in place of the client's strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import openai_harmony as oh

from dynamo_trtllm.frontend.tokenization.conversation import Tool
from dynamo_trtllm.frontend.tokenization.text_cache import TextCache

_INSTRUCTIONS: Final = "INSTRUCTIONS"  # a placeholder
_EMPTY_TYPE: Final = "type tool = () => any;\n"  # the type of a tool "tool" without parameters
# Short names, keywords and types go to openai-harmony unchanged. No part of a placeholder matches.
_PLAIN: Final = re.compile(r"[A-Za-z0-9_$#/.-]{0,32}\Z")
_MARK: Final = "\ue000"
_BATCH_VALUES: Final = 1000  # JSON values rendered in one call, which holds the GIL
_CACHED_BYTES: Final = 4 << 20
_PLACEHOLDER: Final = re.compile(rf'{_MARK}(\d+)(?:null)?(\\?)"{_MARK}')


class DeveloperTexts:
    """Renders the texts of developer messages, with openai-harmony's encoding `harmony`.

    Tools are cached, because each turn of a conversation has the same tools: 60 tools take 10 ms.
    """

    def __init__(self, harmony: oh.HarmonyEncoding) -> None:
        self._harmony = harmony
        empty = harmony.render(oh.Message.from_role_and_content(oh.Role.DEVELOPER, ""))
        # index of the first token after the header of a developer message
        self._text_at = len(empty) - 1
        self._instructions = self._rendered(
            oh.DeveloperContent.new().with_instructions(_INSTRUCTIONS)
        )
        tool = oh.ToolDescription.new("tool", "", None)
        self._head, _, self._tail = self._rendered(_content([tool])).partition(_EMPTY_TYPE)
        self._tool_texts = TextCache(self._tool_text, _CACHED_BYTES, min_chars=0)

    def text(self, instructions: str, tools: Sequence[Tool]) -> str:
        """Return the text of a message with these instructions and tools.

        The cost is linear in the size of the text.

        Raises:
            oh.HarmonyError: a schema can't be translated.
            RecursionError: a schema is nested too deeply.
        """
        parts = []
        if instructions:
            parts.append(self._instructions.replace(_INSTRUCTIONS, instructions))
        if tools:
            described = json.dumps(
                [(tool.name, tool.description, dict(tool.parameters) or None) for tool in tools]
            )
            parts.append(self._head + self._tool_texts.get(described) + self._tail)
        return "\n\n".join(parts)

    def _tool_text(self, tools_json: str) -> str:
        return "\n".join(self._batches(json.loads(tools_json)))

    def _batches(self, tools: Sequence[tuple[str, str, Any]]) -> Iterator[str]:
        """Yield the text of all tools in parts. The tools of a part are rendered in one call."""
        batch: list[oh.ToolDescription] = []
        placeholders = _Placeholders()
        for name, description, parameters in tools:
            lines = _lines(description)
            description = placeholders.new("\n// ".join(lines)) if lines else ""
            batch.append(
                oh.ToolDescription.new(name, description, placeholders.put_into(parameters))
            )
            if placeholders.num_values > _BATCH_VALUES:
                yield self._batch(batch, placeholders)
                batch = []
                placeholders = _Placeholders()
        if batch:
            yield self._batch(batch, placeholders)

    def _batch(self, tools: list[oh.ToolDescription], placeholders: _Placeholders) -> str:
        text = self._rendered(_content(tools))
        begin = len(self._head)
        end = len(text) - len(self._tail)
        return placeholders.restored(text[begin:end])

    def _rendered(self, content: oh.DeveloperContent) -> str:
        ids = self._harmony.render(oh.Message.from_role_and_content(oh.Role.DEVELOPER, content))
        text: str = self._harmony.decode(ids[self._text_at : -1])
        return text


class _Placeholders:
    """Placeholders for the strings of one batch of tools.

    openai-harmony writes most strings unchanged and some as JSON. The quotation mark in a
    placeholder shows which: JSON escapes it. openai-harmony also checks whether a type contains
    "null", so the placeholder of such a string does too.
    """

    def __init__(self) -> None:
        self.num_values = 0  # JSON values seen
        self._known: dict[str, str] = {}  # placeholders by string, in the order of their numbers

    def new(self, string: str) -> str:
        """Return the placeholder of the string."""
        if string not in self._known:
            self._known[string] = (
                f'{_MARK}{len(self._known)}{"null" if "null" in string else ""}"{_MARK}'
            )
        return self._known[string]

    def put_into(self, value: Any) -> Any:
        """Return a copy of the JSON value in which all strings are short; equal strings stay
        equal.
        """
        self.num_values += 1
        if isinstance(value, str):
            return self._short(value)
        if isinstance(value, list):
            return [self.put_into(item) for item in value]
        if isinstance(value, dict):
            return {self._short(key): self.put_into(item) for key, item in value.items()}
        return value

    def restored(self, text: str) -> str:
        """Return the text with the strings in place of their placeholders."""
        strings = list(self._known)

        def original(match: re.Match[str]) -> str:
            string = strings[int(match[1])]
            is_json = bool(match[2])  # the quotation mark in the placeholder is escaped
            return json.dumps(string, ensure_ascii=False)[1:-1] if is_json else string

        return _PLACEHOLDER.sub(original, text)

    def _short(self, string: str) -> str:
        return string if _PLAIN.match(string) else self.new(string)


def _content(tools: list[oh.ToolDescription]) -> oh.DeveloperContent:
    return oh.DeveloperContent.new().with_function_tools(tools)


def _lines(text: str) -> list[str]:
    """Split the text into lines as Rust's `str::lines` does."""
    lines = text.split("\n")
    last = lines.pop()
    return [line.removesuffix("\r") for line in lines] + ([last] if last else [])
