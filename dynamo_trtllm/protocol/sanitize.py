"""Make untrusted text safe to show in logs, errors and tables: escape, shorten and mask it."""

from __future__ import annotations

import re

MASK = "***"

# Control characters of ASCII and Latin-1, line and paragraph separators, invisible and
# bidirectional formatting characters, lone surrogates, and tags: each can end a line, move the
# cursor or reorder what a terminal shows.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_WORD = re.compile(r"[^\s'\"]+")
_PEM = re.compile(r"(-----BEGIN [A-Z ]{0,64}-----).*?(?:(?=-----END )|\Z)", re.DOTALL)
_PORT = re.compile(r"(\d{1,5}/?)?")


def escape_controls(text: str) -> str:
    """Return `text` with each character that could break or reorder a line escaped, for example as
    `\\u2028`.
    """
    # Nearly all texts are printable ASCII. This check is ten times as fast as the pattern.
    if text.isascii() and text.isprintable():
        return text
    return _UNSAFE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode("ascii")


def shown(value: object) -> str:
    """Return the representation of a value of a program, whose `__repr__` may raise."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - it is code of the program
        # An error text that names the type helps more than the error of `__repr__`.
        return f"<{type(value).__name__}>"


def shorten(text: str, max_chars: int) -> str:
    """Return `text`, or its beginning and its end if it has more than `max_chars` characters."""
    half = max_chars // 2
    return text if len(text) <= max_chars else f"{text[:half]} … {text[-half:]}"


def mask_credentials(text: str) -> str:
    """Return `text` with user and password of each address masked and the content of PEM blocks
    removed.
    """
    if "@" in text:
        text = _WORD.sub(_without_credentials, text)
    return _PEM.sub(rf"\1 {MASK} ", text) if "-----BEGIN " in text else text


def _without_credentials(match: re.Match[str]) -> str:
    word = match.group()
    before, at, after = word.rpartition("@")
    # Without a colon, it is an email address or a decorator.
    if ":" not in before:
        return word
    scheme, separator, _ = before.partition("://")
    prefix = f"{scheme}{separator}" if separator else ""
    return f"{prefix}{MASK}{at}{after}"


def mask_address(value: str) -> str:
    """Return an address setting with user and password masked, even if it is not a valid
    address.
    """
    if "@" in value:
        scheme, separator, _ = value.partition("://")
        prefix = f"{scheme}{separator}" if separator else ""
        _, _, server = value.rpartition("@")
        return f"{prefix}{MASK}@{server}"
    scheme, separator, rest = value.rpartition("://")
    host, colon, port = rest.partition(":")
    is_address = rest.startswith("[") or not colon or "," in rest or _PORT.fullmatch(port)
    # What is not an address may be a user and a password without their `@host`.
    return value if is_address else f"{scheme}{separator}{host}:{MASK}"
