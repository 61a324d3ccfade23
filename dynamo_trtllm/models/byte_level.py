"""Map bytes to the characters with which byte-level vocabularies (GPT-2's and most later ones)
write tokens.
"""

from __future__ import annotations

from typing import Final


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character.

    As in GPT-2, bytes that are not printable have characters from U+0100 on.
    """
    printable: list[int] = []
    for first, last in ("!~", "¡¬", "®ÿ"):
        printable += range(ord(first), ord(last) + 1)
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


BYTE_OF: Final = _byte_level_alphabet()  # the byte of each character
CHARACTER_OF: Final = {byte: char for char, byte in BYTE_OF.items()}
