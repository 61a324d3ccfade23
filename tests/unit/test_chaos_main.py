"""The command line of the chaos runs, and what it says of verdicts. Starts no deployment."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.main import as_json, is_good, line, main, table
from benchmarks.chaos.verdict import Outcome, Verdict


def test_command_when_asked_for_the_faults_then_they_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["--list"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        *FAULTS,
        "migration",
    ]


def test_page_of_faults_has_exactly_the_faults() -> None:
    page = (Path(__file__).parents[2] / "docs/faults.md").read_text()
    tables = [part.split("\n\n")[0] for part in page.split("| `scripts/chaos` |\n")[1:]]
    rows = [line.split("|") for table in tables for line in table.splitlines()]
    cases = {name for row in rows for name in re.findall(r"`([^`]+)`", row[-2])}
    assert cases == {*FAULTS, "migration"}


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["no-such-fault"],
        ["--engine", "none", "rolling"],
        ["rolling", "--seconds", "nan"],
        ["rolling", "--seconds", "inf"],
        ["rolling", "--streams", "0"],
        ["rolling", "--osl", "0"],
        ["rolling", "--stall-timeout-s", "-1"],
        ["rolling", "--hung-s", "nan"],
    ],
)
def test_command_when_it_is_called_wrongly_then_it_says_so(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.chaos.main.run_all", None)  # nothing starts
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m benchmarks.chaos")


@pytest.mark.parametrize(("name", "good"), [("kill-decode", False), ("kill-nats", True)])
def test_verdict_of_needless_rejection_is_bad(name: str, good: bool) -> None:
    verdict = Verdict(fault=name, sent=2, early_errors=1)
    verdict.counts[Outcome.NAMED_ERROR] = 1
    assert is_good(verdict) is good
    assert table([verdict]).rstrip().endswith("BAD") is not good
    assert line(verdict).endswith("BAD") is not good


def test_json_of_verdicts_has_a_row_per_fault() -> None:
    verdict = Verdict(fault="kill-decode", sent=3)
    verdict.counts[Outcome.RIGHT] = 3
    verdict.add_leaks(["decode-1 running 1"])
    printed = json.loads(as_json([verdict, Verdict(fault="rolling")]))
    assert printed["faults"][0] == {
        "fault": "kill-decode",
        "sent": 3,
        "right": 3,
        "named_error": 0,
        "cut": 0,
        "wrong": 0,
        "lost": 0,
        "hung": 0,
        "leaked": 1,
    }
    assert [row["fault"] for row in printed["faults"]] == ["kill-decode", "rolling"]
    assert printed["notes"] == ["kill-decode: leaked: decode-1 running 1"]
