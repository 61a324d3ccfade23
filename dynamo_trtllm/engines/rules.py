"""The shape of a preflight rule, and how one becomes a finding. Pure; knows no engine's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from dynamo_trtllm.engines.base import Finding

Severity = Literal["error", "warning", "note"]


class WorkerFacts(Protocol):
    """What is known of one worker before it loads; the rest is each engine's own."""

    def shown(self, key: str) -> str:
        """An argument's value for people, with the place it comes from."""
        ...


F = TypeVar("F", bound=WorkerFacts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """What a rule found, where it says more than the rule itself."""

    other: str = ""  # what the field disagrees with
    value: str = ""  # "": the field as it is, with its source
    field: str = ""  # "": the rule's
    cure: str = ""  # "": the rule's
    why: str = ""  # "": the rule's


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRule(Generic[F]):
    """One thing that can be wrong with one role. `test` gives None when it is not."""

    name: str  # stable, as in docs/preflight.md and docs/vllm.md
    severity: Severity
    field: str
    why: str
    cure: str
    test: Callable[[F], Violation | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRule(Generic[F]):
    """One thing that can be wrong between prefill (first) and decode (second)."""

    name: str
    severity: Severity
    field: str
    why: str
    cure: str
    test: Callable[[F, F], Violation | None]


def evaluate(rules: Sequence[RoleRule[F]], facts: F) -> Iterator[Finding]:
    """The findings of one role, in the rules' order."""
    for rule in rules:
        violation = rule.test(facts)
        if violation is not None:
            yield to_finding(rule, violation, violation.value or facts.shown(violation.field or rule.field))


def to_finding(rule: RoleRule[F] | PairRule[F], violation: Violation, value: str) -> Finding:
    """`value`: the field as it is, with its source."""
    return Finding(
        severity=rule.severity,
        rule=rule.name,
        field=violation.field or rule.field,
        value=value,
        other=violation.other,
        why=violation.why or rule.why,
        cure=violation.cure or rule.cure,
    )
