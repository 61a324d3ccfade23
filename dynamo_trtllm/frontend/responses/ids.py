"""Names of responses and items. Pure.

A response's name begins with its frontend's mark, an item's name holds that of its response: so a frontend can say
where a response that it does not have was made, and find the response of an item that is only referred to.
"""

from __future__ import annotations

import re
from typing import Final

PREFIX: Final = "resp_"
MARK_CHARS: Final = 8
_RESPONSE: Final = re.compile(r"resp_[0-9a-f]{40}")
_ITEM: Final = re.compile(r"(?:msg|rs|fc|fco)_([0-9a-f]{40})[io][0-9a-f]{4,}")


def is_response_id(text: str) -> bool:
    return _RESPONSE.fullmatch(text) is not None


def mark_of(response_id: str) -> str:
    """The mark of the frontend that made the response."""
    return response_id[len(PREFIX) : len(PREFIX) + MARK_CHARS]


def response_of(item_id: str) -> str | None:
    """The response that the item is of; None when the name is not one of ours."""
    match = _ITEM.fullmatch(item_id)
    return None if match is None else PREFIX + match.group(1)


def input_id(kind: str, response_id: str, index: int) -> str:
    return f"{kind}_{response_id.removeprefix(PREFIX)}i{index:04x}"


def output_id(kind: str, response_id: str, index: int) -> str:
    return f"{kind}_{response_id.removeprefix(PREFIX)}o{index:04x}"
