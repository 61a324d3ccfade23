"""Write the tables of preflight rules in docs/preflight.md and docs/preflight-vllm.md.

`python -m scripts.preflight_reference` runs it. A test compares the pages with this output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo_trtllm.engines.preflight_rules import RuleSection
from dynamo_trtllm.engines.trtllm.preflight import checks
from dynamo_trtllm.engines.vllm import preflight as vllm
from scripts.config_reference import table

DOCS = Path(__file__).parents[1] / "docs"
PAGES: Mapping[str, Sequence[RuleSection[Any]]] = {
    "preflight.md": (*checks.WORKER_SECTIONS, *checks.PAIR_SECTIONS, *checks.PEER_SECTIONS),
    "preflight-vllm.md": (vllm.WORKER, vllm.PEERS),
}


def page(name: str) -> str:
    """Return a page with the rules of each section in the table under the heading of the same name.

    Raises:
        ValueError: the page has no such heading or no table under it.
    """
    text = (DOCS / name).read_text(encoding="utf-8")
    for section in PAGES[name]:
        rows = [
            (f"`{rule.name}`", rule.severity, f"`{rule.field}`", rule.why, rule.fix)
            for rule in section.rules
        ]
        written = table(("rule", "severity", "field", "why", "fix"), rows)
        heading = rf"^#+ {re.escape(section.title)}\n"
        # The heading, lines of text, and then the lines of the first table.
        match = re.search(rf"{heading}(?:(?![#|]).*\n)*((?:\|.*\n)+)", text, re.MULTILINE)
        if match is None:
            raise ValueError(f"{name} has no table under a heading {section.title!r}")
        text = text[: match.start(1)] + written + text[match.end(1) :]
    return text


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(page(name), encoding="utf-8")
