"""Convert the input of a tool that takes a text to the arguments of a function with one string, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

_FIELD: Final = "input"
SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {_FIELD: {"type": "string"}},
    "required": [_FIELD],
    "additionalProperties": False,
}
# What encloses the escaped text in the arguments, for a text that arrives in parts.
OPENING: Final = f'{{"{_FIELD}":"'
CLOSING: Final = '"}'


def escaped(text: str) -> str:
    """Return a part of a text as it is written between OPENING and CLOSING."""
    return orjson.dumps(text)[1:-1].decode()


def arguments_of(text: str) -> str:
    """Return the arguments of the function for an input."""
    return OPENING + escaped(text) + CLOSING


def text_of(arguments: str) -> str | None:
    """Return the input for the arguments of the function. None: they are not those of such a function."""
    try:
        found = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return None
    text = found.get(_FIELD) if isinstance(found, dict) else None
    return text if isinstance(text, str) else None


def input_of(arguments: str) -> str:
    """Return the input for the arguments of the function.

    Without structured output, a model may write the text alone.
    """
    text = text_of(arguments)
    return arguments if text is None else text
