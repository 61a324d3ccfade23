"""The figures of `plan` in docs/simulate.md are those that its command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dynamo_trtllm.cli import plan

PAGE = Path(__file__).parents[3] / "docs" / "simulate.md"


def test_plan_prints_the_rows_and_the_advice_of_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    command = re.search(r"^dynamo-trtllm plan (.*)$", text, re.MULTILINE)
    printed = re.search(r"^```text\n(requests/s .*?)```", text, re.DOTALL | re.MULTILINE)
    assert command is not None
    assert printed is not None
    arguments = shlex.split(command[1])
    without_files = arguments[: arguments.index("--out")]
    # The page has the rows of the given rate only; the others take most of the time.
    monkeypatch.setattr(plan, "RATE_FACTORS", (1.0,))
    with pytest.raises(SystemExit, match="0"):
        plan.main(without_files)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in printed[1].splitlines() if line.split() not in lines] == []
