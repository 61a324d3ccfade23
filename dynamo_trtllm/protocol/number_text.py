"""Read numbers that a user or a client has written: in flags, variables, headers and queries.

All of them follow one rule: ASCII digits, perhaps with a sign, a decimal point and an exponent.
White space around a number is ignored. Python also reads `1_000`, `nan`, `inf` and the digits of
other scripts. Other programs do not, and in a limit such a text is more likely a mistake.
"""

from __future__ import annotations

import math
import re
from typing import Final

NUMBER_RULE: Final = "expected a number with the digits 0 to 9, such as 8 or 0.5"
_NUMBER: Final = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_WHOLE: Final = re.compile(r"[+-]?[0-9]+")
_MAX_CHARS: Final = 400  # a longer text is no number; Python needs long for very long ones


def parse_float(text: str) -> float:
    """Return the number that a text has. Raise ValueError if it has none, or one too large."""
    stripped = text.strip()
    if len(stripped) > _MAX_CHARS or not _NUMBER.fullmatch(stripped):
        raise ValueError(NUMBER_RULE)
    value = float(stripped)
    if not math.isfinite(value):
        raise ValueError(f"{NUMBER_RULE}; this one is too large")
    return value + 0.0  # "-0" gives 0.0


def parse_int(text: str) -> int:
    """Return the whole number that a text has. Raise ValueError if it has none."""
    stripped = text.strip()
    if len(stripped) > _MAX_CHARS or not _WHOLE.fullmatch(stripped):
        raise ValueError("expected a whole number with the digits 0 to 9")
    return int(stripped)


def is_digits(text: str) -> bool:
    """Return True if a text has only the digits 0 to 9, and at least one."""
    return text.isascii() and text.isdecimal()


def is_number_of_python_only(text: str) -> bool:
    """Return True if Python reads a number from a text that breaks the rule of this module."""
    try:
        float(text)
    except ValueError:
        return False
    return not _NUMBER.fullmatch(text.strip())
