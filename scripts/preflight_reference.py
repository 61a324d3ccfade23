"""Writes the tables of preflight rules in docs/preflight.md and docs/vllm.md: `python -m scripts.preflight_reference`.

A test compares the pages with this output.
"""

from __future__ import annotations

import re
from pathlib import Path

from dynamo_trtllm.engines.trtllm.preflight import checks
from dynamo_trtllm.engines.vllm import args as vllm
from scripts.config_reference import table

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {
    "preflight.md": (checks.WORKER_RULES, checks.PAIR_RULES, checks.PEER_RULES),
    "vllm.md": (vllm.WORKER_RULES, vllm.PEER_RULES),
}


def page(name: str) -> str:
    """Return a page with the rules of each section in the table under the heading of the same name.

    Raises:
        ValueError: the page has no such heading or no table under it.
    """
    text = (DOCS / name).read_text(encoding="utf-8")
    for rules in PAGES[name]:
        for section, members in rules.sections.items():
            rows = [(f"`{rule.name}`", rule.severity, f"`{rule.field}`", rule.why, rule.fix) for rule in members]
            written = table(("rule", "severity", "field", "why", "fix"), rows)
            found = re.search(rf"^#+ {re.escape(section)}\n(?:(?![#|]).*\n)*((?:\|.*\n)+)", text, re.MULTILINE)
            if found is None:
                raise ValueError(f"{name} has no table under a heading {section!r}")
            text = text[: found.start(1)] + written + text[found.end(1) :]
    return text


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(page(name), encoding="utf-8")
