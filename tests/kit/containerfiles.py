"""The Containerfiles, read instruction by instruction."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTAINERFILES = sorted((ROOT / "deploy" / "container").glob("Containerfile.*"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return each instruction with its arguments in one line."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.M).replace("\\\n", " ")
    found = []
    for line in filter(str.strip, text.splitlines()):
        word, _, rest = line.strip().partition(" ")
        found.append((word, re.sub(r"\s+", " ", rest.strip())))
    return found


def arguments(path: Path) -> dict[str, str]:
    """Return the values of ARG."""
    return dict(
        rest.split("=", 1) for word, rest in instructions(path) if word == "ARG" and "=" in rest
    )


def bases(path: Path) -> list[str]:
    """Return the images of FROM, without those that the file itself builds."""
    stages: set[str] = set()
    found = []
    for word, rest in instructions(path):
        if word == "FROM":
            without_platform = re.sub(r"^--platform=\S+ ", "", rest)
            image = re.sub(r"\$\{(\w+)\}", lambda m: arguments(path)[m[1]], without_platform)
            name, _, stage = image.partition(" AS ")
            if name not in stages:
                found.append(name)
            stages.add(stage)
    return found
