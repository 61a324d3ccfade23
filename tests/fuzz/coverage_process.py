"""Measure the coverage of inputs: `python -m tests.fuzz.coverage_process TARGET FOLDER`.

Prints a JSON object: the lines and branches of the target's files, how many of them were reached,
and the names of a few inputs that reach as much as all of them together.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import coverage

_PACKAGE = Path(__file__).parents[2] / "dynamo_trtllm"


def main() -> None:
    """Measure the target and the folder of the command line."""
    name, folder = sys.argv[1:]
    logging.disable(logging.WARNING)
    inputs = sorted(Path(folder).iterdir(), key=lambda path: (path.stat().st_size, path.name))
    measured = coverage.Coverage(
        data_file=None, branch=True, include=[f"{_PACKAGE}/*"], config_file=False
    )
    measured.start()
    # Imported here: what runs at the import of a module counts, too.
    from tests.fuzz.registry import load

    target = load(name)
    for path in inputs:
        measured.switch_context(path.name)
        target.check(path.read_bytes())
    measured.stop()
    files = [str(_PACKAGE / file) for file in target.files]
    result = _totals(measured, files) | {"inputs": _chosen(measured, inputs)}
    sys.stdout.write(json.dumps(result))


def _totals(measured: coverage.Coverage, files: Sequence[str]) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        measured.json_report(include=files, outfile=file.name)
        totals = json.loads(Path(file.name).read_text())["totals"]
    names = ("covered_lines", "num_statements", "covered_branches", "num_branches")
    return {name: totals[name] for name in names}


def _chosen(measured: coverage.Coverage, inputs: Sequence[Path]) -> list[str]:
    """Return the inputs that reach a branch of any file which no shorter one reaches."""
    data = measured.get_data()
    reached: set[Any] = set()
    chosen = []
    for path in inputs:
        data.set_query_contexts([f"^{path.name}$"])
        arcs = {(file, arc) for file in data.measured_files() for arc in data.arcs(file) or ()}
        if arcs - reached:
            reached |= arcs
            chosen.append(path.name)
    return chosen


if __name__ == "__main__":
    main()
