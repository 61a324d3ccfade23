"""Texts about settings for people: suggestions for a wrong name, and tables. All processes import it: keep it light."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_ALIKE = 0.7  # of 1; at 0.6 --help was offered for --tp


def suggest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name that `name` is probably a mistyping of, or None. Dashes and capitals don't count."""
    plain = {_plain(each): each for each in allowed}
    found = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=_ALIKE)
    return plain[found[0]] if found else None


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of texts as lines, in columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)] if rows else []
    return "".join("  ".join([*map(str.ljust, row, widths), row[-1]]) + "\n" for row in rows)
