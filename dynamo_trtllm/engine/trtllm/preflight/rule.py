"""The shape of a rule, and how one becomes a finding. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dynamo_trtllm.engine.base import Finding
from dynamo_trtllm.engine.trtllm.preflight.facts import RoleFacts

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clash:
    """What a rule found, where it says more than the rule itself."""

    other: str = ""  # what the field disagrees with
    value: str = ""  # "": the field as it is, with its source
    field: str = ""  # "": the rule's
    cure: str = ""  # "": the rule's
    why: str = ""  # "": the rule's


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRule:
    """One thing that can be wrong with one role. `test` gives None when it is not."""

    name: str  # stable, as in docs/preflight.md
    severity: Severity
    field: str
    why: str
    cure: str
    test: Callable[[RoleFacts], Clash | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRule:
    """One thing that can be wrong between prefill (first) and decode (second)."""

    name: str
    severity: Severity
    field: str
    why: str
    cure: str
    test: Callable[[RoleFacts, RoleFacts], Clash | None]


def judged(rules: Sequence[RoleRule], facts: RoleFacts) -> Iterator[Finding]:
    """The findings of one role, in the rules' order."""
    for rule in rules:
        clash = rule.test(facts)
        if clash is not None:
            yield found(rule, clash, clash.value or facts.shown(clash.field or rule.field))


def found(rule: RoleRule | PairRule, clash: Clash, value: str) -> Finding:
    """`value`: the field as it is, with its source."""
    return Finding(
        severity=rule.severity,
        rule=rule.name,
        field=clash.field or rule.field,
        value=value,
        other=clash.other,
        why=clash.why or rule.why,
        cure=clash.cure or rule.cure,
    )
