"""docs/preflight.md has every rule as it is in the tables, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from dynamo_trtllm.engines.trtllm.preflight.checks import ROLE_RULES
from dynamo_trtllm.engines.trtllm.preflight.pair import PAIR_RULES, PEER_RULES

DOCS = Path(__file__).resolve().parents[4] / "docs" / "preflight.md"
ROW = re.compile(r"^\| `(?P<rule>[a-z0-9-]+)` \| (?P<rest>.+) \|$", re.MULTILINE)


def test_docs_when_compared_then_each_rule_is_there_word_for_word() -> None:
    rules = {
        rule.name: f"{rule.severity} | `{rule.field}` | {rule.why} | {rule.fix}" for rule in (*ROLE_RULES, *PAIR_RULES)
    }
    rules |= {name: f"{why} | {fix}" for name, (why, fix) in PEER_RULES.items()}
    rows = [(row["rule"], row["rest"]) for row in ROW.finditer(DOCS.read_text(encoding="utf-8"))]
    assert dict(rows) == rules
    assert len(rows) == len(rules)
