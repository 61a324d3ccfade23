"""Read and write the corpus of a target: a JSON string a line, of which each character is a byte.

So a change of the corpus can be read, and hundreds of inputs are one file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).with_name("corpus")


def path_of(name: str, folder: Path = FOLDER) -> Path:
    """Return the file of a target's corpus."""
    return folder / f"{name}.jsonl"


def read(name: str, folder: Path = FOLDER) -> list[bytes]:
    """Return the inputs of a target's corpus; none if it has no file."""
    path = path_of(name, folder)
    if not path.exists():
        return []
    return [json.loads(line).encode("latin-1") for line in path.read_text().splitlines()]


def write(name: str, inputs: Iterable[bytes], folder: Path = FOLDER) -> None:
    """Replace a target's corpus. Short inputs come first."""
    ordered = sorted(set(inputs), key=lambda data: (len(data), data))
    lines = [f"{json.dumps(data.decode('latin-1'))}\n" for data in ordered]
    path_of(name, folder).write_text("".join(lines))
