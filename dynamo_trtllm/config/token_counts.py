"""Read numbers of tokens, which may have a suffix: `8k` is 8,000 tokens, and `8K` is 8,192."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from dynamo_trtllm.protocol.number_types import MAX_INT64

# As in vLLM: small letters are powers of 1,000, capital letters powers of 1,024.
_FACTORS: Final = {"": 1, "k": 1_000, "m": 1_000_000, "K": 1 << 10, "M": 1 << 20}
_NUMBER: Final = re.compile(r"(?P<number>[+-]?[0-9]{1,18}(\.[0-9]{1,6})?)(?P<suffix>[kmKM]?)")


def parse_tokens(text: str) -> int:
    """Return the number of tokens that a text names.

    Raises:
        ValueError: it names no whole number of tokens.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is not None:
        count = Decimal(match["number"]) * _FACTORS[match["suffix"]]
        if count == int(count):
            return int(count)
    raise ValueError("expected a number of tokens, such as 8192, 8k (8,000) or 8K (8,192)")


def _from_text(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return parse_tokens(given)
    except ValueError as exc:
        # Errors of this type show the value, also that of a file.
        raise PydanticCustomError("token_count", "{problem}", {"problem": str(exc)}) from exc


TokenCount = Annotated[int, BeforeValidator(_from_text), Field(gt=0, le=MAX_INT64)]
