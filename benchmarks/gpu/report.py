"""Prints result files as Markdown tables, one for each run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .result import Result, Row, read

_MARKS = {True: "yes", False: "**no**", None: ""}


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table with a line per row."""
    lines = ["| step | what | found | bar | met |", "|---|---|---|---|---|"]
    lines += [_line(found.step, row) for found in results for row in found.rows]
    return "\n".join(lines)


def _line(step: str, row: Row) -> str:
    cells = (step, row.what, row.value, row.bar, _MARKS[row.met])
    return "| " + " | ".join(_cell(text) for text in cells) + " |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def section(folder: Path) -> str:
    """Return all results under `folder` as Markdown, one heading per run (a folder each), newest
    last.
    """
    runs: dict[Path, list[Result]] = {}
    for path in sorted(folder.glob("*/*.json")):
        runs.setdefault(path.parent, []).append(read(path))
    parts = []
    for place, results in sorted(
        runs.items(), key=lambda item: min(found.date for found in item[1])
    ):
        results.sort(key=lambda found: found.date)
        parts.append(_run(place.relative_to(folder), results))
    return "\n\n".join(parts)


def _run(place: Path, results: Sequence[Result]) -> str:
    first = results[0]
    setup = ", ".join(
        f"{name.replace('_', ' ')} {value}"
        for name, value in first.setup.items()
        if _is_plain(value)
    )
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    head = [
        f"### {place}",
        (
            f"{first.date}, commit {first.commit}. {first.machine.get('gpus', 'no GPU')};"
            f" {first.machine.get('cpus', '?')} CPUs; driver {first.machine.get('driver', '-')};"
            f" {versions}."
        ),
        f"Set-up: {setup}.",
    ]
    return "\n\n".join([*head, table(results)])


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float | bool)


def main() -> None:
    """Print the results of a folder."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.report", description=__doc__)
    folder = Path("benchmarks/results/gpu")
    parser.add_argument(
        "--results", type=Path, default=folder, help=f"folder with runs (default: {folder})"
    )
    sys.stdout.write(section(parser.parse_args().results) + "\n")


if __name__ == "__main__":
    main()
