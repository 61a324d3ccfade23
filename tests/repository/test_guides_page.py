"""docs/guide-commands.md has a row for each command of the guides, and tests/data/guide_tests.txt has the
tests of each row.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dynamo_trtllm.config.config_base import Config
from dynamo_trtllm.config.flags import flags_of
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig

ROOT = Path(__file__).parents[2]
GUIDES = ("000", "001", "002", "003", "004")
REQUESTS: dict[str, Any] = json.loads((ROOT / "tests/data/guide_requests.json").read_text())


class Row(NamedTuple):
    guides: tuple[str, ...]
    patterns: tuple[str, ...]  # one of them; … stands for anything
    here: str
    key: str

    def tells_of(self, command: str) -> bool:
        spaced = " ".join(command.split())
        return any(
            re.fullmatch(
                ".*".join(re.escape(part.strip()) for part in pattern.split("…")), spaced, re.DOTALL
            )
            for pattern in self.patterns
        )


def commands() -> list[tuple[str, str]]:
    """(guide, command), in order."""
    found = []
    for part in (ROOT / "tests/data/guide_commands.txt").read_text().split("== ")[1:]:
        guide, _, text = part.partition("\n")
        found += [(guide, command.strip()) for command in text.split("\n\n") if command.strip()]
    return found


def rows() -> list[Row]:
    lines = (ROOT / "docs/guide-commands.md").read_text().splitlines()
    split = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in lines
        if line.startswith("| 00")
    ]
    cells = [row for row in split if len(row) == 3]
    return [
        Row(tuple(g.split(", ")), tuple(re.findall(r"`(.+?)`", c)), h, f"{g} | {c}")
        for g, c, h in cells
    ]


def covering() -> dict[str, list[str]]:
    """For each row, by its first two columns, the tests of its counterpart, or why there is
    none.
    """
    found: dict[str, list[str]] = {}
    row = ""
    for line in (ROOT / "tests/data/guide_tests.txt").read_text().splitlines():
        if line.startswith(" "):
            found[row].append(line.strip())
        else:
            row = line
            found[row] = []
    return found


ROWS = rows()


def test_commands_when_counted_then_those_of_all_five_guides() -> None:
    counted = [sum(guide == name for guide, _ in commands()) for name in GUIDES]
    assert counted == [27, 22, 23, 17, 7]


@pytest.mark.parametrize(
    ("guide", "command"), [pytest.param(*c, id=f"{c[0]}-{i}") for i, c in enumerate(commands())]
)
def test_command_has_exactly_one_row_of_its_guide(guide: str, command: str) -> None:
    assert len([row for row in ROWS if guide in row.guides and row.tells_of(command)]) == 1, command


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.guides[0]}-{row.patterns[0][:40]}")
def test_row_names_guides_that_have_its_command(row: Row) -> None:
    for guide in row.guides:
        assert [
            command for command in commands() if command[0] == guide and row.tells_of(command[1])
        ], guide
    assert row.here


def test_rows_have_existing_tests_or_a_reason() -> None:
    tests = covering()
    assert list(tests) == [row.key for row in ROWS]
    for named in tests.values():
        if not (len(named) == 1 and re.match(r"not here: \w.{8,}", named[0])):
            assert named
            for file, _, function in (name.partition("::") for name in named):
                assert re.search(
                    rf"^(async )?def {function}\(", (ROOT / file).read_text(), re.MULTILINE
                ), (
                    file,
                    function,
                )


def test_bodies_when_sent_by_curl_then_the_tests_send_the_same() -> None:
    sent = [request["body"] for request in REQUESTS["requests"]]
    curls = [
        shlex.split(command.replace("\\\n", " "))
        for _, command in commands()
        if command.startswith("curl")
    ]
    bodies = [json.loads(words[words.index("-d") + 1]) for words in curls if "-d" in words]
    assert len(bodies) == 10
    for body in bodies:
        assert body | {"model": "MODEL"} in sent


@pytest.mark.parametrize(
    ("title", "model"),
    [("Flags of workers", WorkerConfig), ("Flags of the frontend", FrontendConfig)],
)
def test_flags_documented_as_same_exist(title: str, model: type[Config]) -> None:
    page = (ROOT / "docs/guides.md").read_text(encoding="utf-8")
    section = page.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    same = [row for row in section.splitlines() if row.startswith("| `") and "| the same" in row]
    named = {flag for row in same for flag in re.findall(r"`(--[\w-]+)", row.split(" | ")[0])}
    assert len(named) >= 3
    assert named <= {name for flag in flags_of(model) for name in flag.names}
