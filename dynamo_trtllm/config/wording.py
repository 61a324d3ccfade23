"""How settings are told to people: the name that was meant, and tables. Every process needs it: nothing heavy here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name most like `name`, if one is alike at all."""
    found = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return found[0] if found else None


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of texts as lines, in columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)] if rows else []
    return "".join("  ".join([*map(str.ljust, row, widths), row[-1]]) + "\n" for row in rows)
