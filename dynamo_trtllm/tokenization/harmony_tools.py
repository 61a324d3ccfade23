"""The text of Harmony's developer messages: instructions, and tools as TypeScript, as openai-harmony renders them.

openai-harmony translates schemas, and gives the result only as token ids. Its encoder holds the GIL, and its cost is
quadratic in the length of a word. So it renders a few tools at a time, in which placeholders replace the client's
strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import openai_harmony as oh

_INSTRUCTIONS: Final = "INSTRUCTIONS"  # a placeholder
_EMPTY_TYPE: Final = "type tool = () => any;\n"  # of a tool "tool" without parameters
# Short names, keywords and types go to openai-harmony as they are. Nothing that matches can be part of a placeholder.
_PLAIN: Final = re.compile(r"[A-Za-z0-9_$#/.-]{0,32}\Z")
_MARK: Final = "\ue000"
_BATCH_VALUES: Final = 1000  # JSON values of the tools that are rendered at once, while the GIL is held
_PLACEHOLDER: Final = re.compile(rf'{_MARK}(\d+)(?:null)?(\\?)"{_MARK}')


class DeveloperTexts:
    """Renders the texts of developer messages; `harmony` does it for a few tools at a time."""

    def __init__(self, harmony: oh.HarmonyEncoding) -> None:
        self._harmony = harmony
        empty = harmony.render(oh.Message.from_role_and_content(oh.Role.DEVELOPER, ""))
        self._text_at = len(empty) - 1  # index of the first token after the header of a developer message
        self._instructions = self._rendered(oh.DeveloperContent.new().with_instructions(_INSTRUCTIONS))
        tool = oh.ToolDescription.new("tool", "", None)
        self._head, _, self._tail = self._rendered(_content([tool])).partition(_EMPTY_TYPE)

    def text(self, content: oh.DeveloperContent) -> str:
        """Return the text of a message with this content. Cost is linear in its size.

        Raises:
            oh.HarmonyError: a schema can't be translated.
            RecursionError: a schema is nested too deeply.
        """
        parts = []
        if content.instructions:
            parts.append(self._instructions.replace(_INSTRUCTIONS, content.instructions))
        parts += [
            self._head + "\n".join(self._tools(namespace.tools)) + self._tail
            for namespace in (content.tools or {}).values()
        ]
        return "\n\n".join(parts)

    def _tools(self, tools: Sequence[oh.ToolDescription]) -> Iterator[str]:
        batch: list[oh.ToolDescription] = []
        placeholders = _Placeholders()
        for tool in tools:
            lines = _lines(tool.description)
            description = placeholders.new("\n// ".join(lines)) if lines else ""
            batch.append(oh.ToolDescription.new(tool.name, description, placeholders.put_into(tool.parameters)))
            if placeholders.num_values > _BATCH_VALUES:
                yield self._batch(batch, placeholders)
                batch, placeholders = [], _Placeholders()
        if batch:
            yield self._batch(batch, placeholders)

    def _batch(self, tools: list[oh.ToolDescription], placeholders: _Placeholders) -> str:
        text = self._rendered(_content(tools))
        return placeholders.restored(text[len(self._head) : len(text) - len(self._tail)])

    def _rendered(self, content: oh.DeveloperContent) -> str:
        ids = self._harmony.render(oh.Message.from_role_and_content(oh.Role.DEVELOPER, content))
        text: str = self._harmony.decode(ids[self._text_at : -1])
        return text


class _Placeholders:
    """Placeholders for the strings of one schema.

    openai-harmony writes most strings as they are and some as JSON; the quotation mark in a placeholder shows which.
    It also checks whether a type contains "null", so the placeholder of such a string contains "null", too.
    """

    def __init__(self) -> None:
        self.num_values = 0  # JSON values seen
        self._strings: list[str] = []
        self._known: dict[str, str] = {}

    def new(self, string: str) -> str:
        """Return the placeholder of the string."""
        known = self._known.get(string)
        if known is None:
            known = f'{_MARK}{len(self._strings)}{"null" if "null" in string else ""}"{_MARK}'
            self._known[string] = known
            self._strings.append(string)
        return known

    def put_into(self, value: Any) -> Any:
        """Return a copy of the JSON value in which all strings are short; equal strings stay equal."""
        self.num_values += 1
        if isinstance(value, str):
            return self._short(value)
        if isinstance(value, list):
            return [self.put_into(each) for each in value]
        if isinstance(value, dict):
            return {self._short(key): self.put_into(each) for key, each in value.items()}
        return value

    def restored(self, text: str) -> str:
        """Return the text with the strings in place of their placeholders."""
        return _PLACEHOLDER.sub(self._string, text)

    def _short(self, string: str) -> str:
        return string if _PLAIN.match(string) else self.new(string)

    def _string(self, found: re.Match[str]) -> str:
        string = self._strings[int(found[1])]
        return json.dumps(string, ensure_ascii=False)[1:-1] if found[2] else string


def _content(tools: list[oh.ToolDescription]) -> oh.DeveloperContent:
    return oh.DeveloperContent.new().with_function_tools(tools)


def _lines(text: str) -> list[str]:
    """Return the lines as Rust's `str::lines` cuts them."""
    lines = text.split("\n")
    last = lines.pop()
    return [line.removesuffix("\r") for line in lines] + ([last] if last else [])
