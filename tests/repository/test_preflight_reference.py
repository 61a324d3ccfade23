"""The tables of docs/preflight.md and docs/preflight-vllm.md have every rule as it is in the code,
and no other.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import preflight_reference
from scripts.preflight_reference import DOCS, PAGES

ROW = re.compile(r"^\| `(?P<rule>[a-z0-9-]+)` \| (?P<rest>.+) \|$", re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_page_when_written_again_then_as_committed(name: str) -> None:
    assert preflight_reference.page(name) == (DOCS / name).read_text(encoding="utf-8"), (
        "run scripts/docs"
    )


def test_docs_have_every_rule_verbatim() -> None:
    rules = [rule for section in PAGES["preflight.md"] for rule in section.rules]
    rows = [
        (row["rule"], row["rest"])
        for row in ROW.finditer((DOCS / "preflight.md").read_text(encoding="utf-8"))
    ]
    assert rows == [
        (rule.name, f"{rule.severity} | `{rule.field}` | {rule.why} | {rule.fix}") for rule in rules
    ]


def test_page_when_a_section_has_no_table_then_an_error_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preflight_reference, "DOCS", tmp_path)
    (tmp_path / "preflight-vllm.md").write_text("## Preflight\n")
    with pytest.raises(ValueError, match="no table under a heading 'One worker'"):
        preflight_reference.page("preflight-vllm.md")
