"""Write a count with its noun: 1 request, 2 requests."""

from __future__ import annotations


def counted(count: float, noun: str, shown: str = "") -> str:
    """Return a count and its noun, which has a plural with "s".

    Args:
        count: the count.
        noun: the noun in the singular.
        shown: the count as text. Default: as Python writes it.
    """
    return f"{shown or count} {noun}{'' if count == 1 else 's'}"


def counted_are(count: int, noun: str) -> str:
    """Return a count, its noun and the verb: `1 request is`, `2 requests are`."""
    return f"{counted(count, noun)} {'is' if count == 1 else 'are'}"
