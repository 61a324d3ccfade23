"""Format rows of texts as a table."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of texts as lines with aligned columns. The last column is not padded."""
    if not rows:
        return ""
    num_padded = len(rows[0]) - 1
    widths = [max(len(row[column]) for row in rows) for column in range(num_padded)]
    lines = []
    for row in rows:
        padded = [text.ljust(width) for text, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*padded, row[-1]]) + "\n")
    return "".join(lines)
