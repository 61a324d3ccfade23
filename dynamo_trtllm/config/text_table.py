"""Format rows of texts as a table."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of texts as lines with aligned columns."""
    widths = (
        [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
        if rows
        else []
    )
    return "".join("  ".join([*map(str.ljust, row, widths), row[-1]]) + "\n" for row in rows)
