"""The tables of SECURITY.md name tests that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
HEADER = ["who", "what", "prevented by", "tested in"]
TOPICS = {
    "HTTP",
    "Contents of requests",
    "Records and messages",
    "KV transfers",
    "Other users of the host",
    "Containers and pods",
    "Supply chain",
}


class Threat(NamedTuple):
    """A row of a table, and the heading above it."""

    topic: str
    cells: list[str]


def threats(text: str) -> Iterator[Threat]:
    """Yield the rows of the tables that have the column "tested in"."""
    topic = ""
    columns: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            topic = line.lstrip("# ")
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not columns:
            columns = cells
        elif columns[-1] == HEADER[-1] and not set(line) <= set("|- "):
            yield Threat(topic, cells)


@cache
def names_in(path: Path) -> set[str]:
    """Return the names of the tests in a file."""
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


def unproven(threat: Threat) -> list[str]:
    """Return what is wrong with the last cell of a row."""
    named = re.findall(r"`([^`]+)`", threat.cells[-1])
    wrong = []
    for name in named:
        path, _, test = name.partition("::")
        if not test.startswith("test_") or test not in names_in(ROOT / "tests" / path):
            wrong.append(name)
    return wrong if named else ["no test"]


THREATS = list(threats((ROOT / "SECURITY.md").read_text()))


def test_tables_cover_every_topic() -> None:
    assert {threat.topic for threat in THREATS} >= TOPICS


@pytest.mark.parametrize("threat", THREATS, ids=lambda threat: threat.cells[1][:50])
def test_threat_names_tests_that_exist(threat: Threat) -> None:
    assert len(threat.cells) == len(HEADER)
    assert all(threat.cells)
    assert unproven(threat) == []


def test_missing_file_and_missing_test_are_found() -> None:
    own = "repository/test_threats.py::test_tables_cover_every_topic"
    text = "## A\n\n| who | what | prevented by | tested in |\n|---|---|---|---|\n"
    text += f"| a | b | c | `{own}` |\n"
    (threat,) = threats(text)
    assert threat.topic == "A"
    assert unproven(threat) == []
    assert unproven(Threat("A", ["`repository/test_threat.py::test_x`"])) != []
    assert unproven(Threat("A", ["`repository/test_threats.py::test_x`"])) != []
    assert unproven(Threat("A", ["`repository/test_threats.py`"])) != []
    assert unproven(Threat("A", ["by hand"])) == ["no test"]
