"""Find out how far the text that a model writes is a JSON object, while the text arrives."""

from __future__ import annotations

import re
from enum import StrEnum, auto
from typing import Final

_BLANKS: Final = re.compile(r"[ \t\r\n]*")
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')  # the characters of a string without escapes
_SCALAR: Final = re.compile(r"[A-Za-z0-9+.\-]*")
_LITERALS: Final = ("true", "false", "null")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_START: Final = re.compile(
    r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][+-]?[0-9]*)?)?"
)
# Longer numbers count as errors: each part of a number is compared with all of it.
_MAX_SCALAR_CHARS: Final = 512
_ESCAPED: Final = frozenset('"\\/bfnrt')
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_NUM_HEX_DIGITS: Final = 4  # after \u
_HIGH_SURROGATES: Final = range(0xD800, 0xDC00)
_LOW_SURROGATES: Final = range(0xDC00, 0xE000)
_CLOSERS: Final = {"{": "}", "[": "]"}


class _Next(StrEnum):
    """What may come next, apart from blanks."""

    OBJECT = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    VALUE = auto()
    VALUE_OR_END = auto()
    COMMA_OR_END = auto()
    # within a string
    CHARACTER = auto()
    ESCAPED = auto()
    HEX_DIGIT = auto()
    # within a number or a literal
    SCALAR = auto()
    # after the object, or after an error
    NOTHING = auto()


class ObjectScanner:
    """Scans streamed text that should be one JSON object. Its cost is linear in the text."""

    def __init__(self) -> None:
        self.is_complete = False  # the object has ended
        self._next = _Next.OBJECT
        self._closers: list[str] = []  # of the objects and lists that are open
        self._is_key = False  # the current string is a key
        self._hex_digits = ""  # the digits of the current escape so far
        self._needs_low = False  # the second half of a surrogate pair must come next
        self._scalar = ""  # the current number or literal

    def valid_part(self, text: str) -> str:
        """Return the beginning of the next text that continues the object.

        The rest is not part of an object: it follows the end of the object, or an error.
        """
        at = 0
        while at < len(text) and self._next is not _Next.NOTHING:
            at = self._scan(text, at)
        return text[:at]

    def _scan(self, text: str, at: int) -> int:
        """Scan some text from an index on. Return the index after what is valid."""
        match self._next:
            case _Next.CHARACTER:
                return self._string(text, at)
            case _Next.ESCAPED:
                return self._escape(text, at)
            case _Next.HEX_DIGIT:
                return self._hex_digit(text, at)
            case _Next.SCALAR:
                return self._scalar_part(text, at)
        found = _BLANKS.match(text, at)
        at = at if found is None else found.end()
        return at if at == len(text) else self._structure(text, at)

    def _fail(self, at: int) -> int:
        self._next = _Next.NOTHING
        return at

    def _string(self, text: str, at: int) -> int:
        """Scan a part of a string, after its first quote."""
        found = None if self._needs_low else _PLAIN.match(text, at)
        at = at if found is None else found.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._next = _Next.ESCAPED
        elif text[at] == '"' and not self._needs_low:
            self._next = _Next.COLON if self._is_key else _Next.COMMA_OR_END
        else:  # half of a surrogate pair, or a control character, which must be escaped
            return self._fail(at)
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        """Scan the character after a backslash."""
        char = text[at]
        if char == "u":
            self._hex_digits = ""
            self._next = _Next.HEX_DIGIT
        elif char in _ESCAPED and not self._needs_low:
            self._next = _Next.CHARACTER
        else:
            return self._fail(at)
        return at + 1

    def _hex_digit(self, text: str, at: int) -> int:
        """Scan a digit after \\u."""
        if text[at] not in _HEX:
            return self._fail(at)
        self._hex_digits += text[at]
        if len(self._hex_digits) == _NUM_HEX_DIGITS:
            code = int(self._hex_digits, 16)
            if self._needs_low != (code in _LOW_SURROGATES):
                return self._fail(at)
            self._needs_low = code in _HIGH_SURROGATES
            self._next = _Next.CHARACTER
        return at + 1

    def _scalar_part(self, text: str, at: int) -> int:
        """Scan a part of a number or a literal, or find its end."""
        found = _SCALAR.match(text, at)
        end = at if found is None else found.end()
        if end == at:
            is_whole = self._scalar in _LITERALS or _NUMBER.fullmatch(self._scalar) is not None
            self._next = _Next.COMMA_OR_END if is_whole else _Next.NOTHING
            return at
        self._scalar += text[at:end]
        is_start = _NUMBER_START.fullmatch(self._scalar) is not None or any(
            literal.startswith(self._scalar) for literal in _LITERALS
        )
        if not is_start or len(self._scalar) > _MAX_SCALAR_CHARS:
            return self._fail(at)
        return end

    def _structure(self, text: str, at: int) -> int:
        """Scan a character outside of strings, numbers and literals."""
        char = text[at]
        expected = self._next
        if expected in (_Next.VALUE, _Next.VALUE_OR_END) and char not in "]},:":
            return self._begin_value(text, at)
        if expected is _Next.OBJECT and char == "{":
            return self._open(char, at)
        may_end = expected in (_Next.KEY_OR_END, _Next.VALUE_OR_END, _Next.COMMA_OR_END)
        if may_end and char == self._closers[-1]:
            self._closers.pop()
            self.is_complete = not self._closers
            self._next = _Next.NOTHING if self.is_complete else _Next.COMMA_OR_END
        elif expected in (_Next.KEY, _Next.KEY_OR_END) and char == '"':
            self._is_key = True
            self._next = _Next.CHARACTER
        elif expected is _Next.COLON and char == ":":
            self._next = _Next.VALUE
        elif expected is _Next.COMMA_OR_END and char == ",":
            self._next = _Next.KEY if self._closers[-1] == "}" else _Next.VALUE
        else:
            return self._fail(at)
        return at + 1

    def _begin_value(self, text: str, at: int) -> int:
        char = text[at]
        if char in _CLOSERS:
            return self._open(char, at)
        if char == '"':
            self._is_key = False
            self._next = _Next.CHARACTER
            return at + 1
        self._scalar = ""
        self._next = _Next.SCALAR
        return at

    def _open(self, char: str, at: int) -> int:
        """Begin an object or a list."""
        self._closers.append(_CLOSERS[char])
        self._next = _Next.KEY_OR_END if char == "{" else _Next.VALUE_OR_END
        return at + 1
