"""Define custom tools, whose input is a text. The model sees a function with one string."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import orjson

from dynamo_trtllm.api.request_model import LongText, RequestModel

SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class AnyText(RequestModel):
    type: Literal["text"] = "text"


class Grammar(RequestModel):
    """The grammar of an input. The model is shown it, but its output is not checked."""

    syntax: Literal["lark", "regex"]
    definition: LongText


def described(description: str, grammar: Grammar | None) -> str:
    """Return the description that the model sees, with the grammar of the input."""
    if grammar is None:
        return description
    rule = f"The input follows this {grammar.syntax} grammar:\n{grammar.definition}"
    return f"{description}\n\n{rule}".strip()


def arguments_of(text: str) -> str:
    """Return the arguments of the function for an input."""
    return orjson.dumps({"input": text}).decode()


def input_of(arguments: str) -> str:
    """Return the input for the arguments of the function.

    Without structured output, a model may write the text alone.
    """
    try:
        found = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = found.get("input") if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments
