"""Convert the text input of a tool to the arguments of a function with one string parameter, and
back.
"""

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
# The arguments before and after the escaped text, for a text that arrives in parts.
OPENING: Final = f'{{"{_FIELD}":"'
CLOSING: Final = '"}'


def escaped(text: str) -> str:
    """Return a part of a text as it is written between OPENING and CLOSING."""
    return orjson.dumps(text)[1:-1].decode()


def arguments_of(text: str) -> str:
    """Return the arguments of the function for an input."""
    return OPENING + escaped(text) + CLOSING


def text_of(arguments: str) -> str | None:
    """Return the input for the arguments of the function; None if they are not an object with the
    input as a string.
    """
    try:
        found = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return None
    text = found.get(_FIELD) if isinstance(found, dict) else None
    return text if isinstance(text, str) else None


def input_of(arguments: str) -> str:
    """Return the input for the arguments of the function.

    Other arguments are returned unchanged: without structured output, a model may write only the
    text.
    """
    text = text_of(arguments)
    return arguments if text is None else text
