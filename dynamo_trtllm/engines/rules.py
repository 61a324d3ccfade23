"""Define preflight rules, which are independent of the engine, and convert their violations to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from dynamo_trtllm.engines.base import Finding

Severity = Literal["error", "warning", "note"]


class WorkerFacts(Protocol):
    """Facts about one worker before it loads. Each engine adds its own."""

    def shown(self, key: str) -> str:
        """Return an argument's value and its source as text."""
        ...


F = TypeVar("F", bound=WorkerFacts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A violated rule. Texts that are set here replace those of the rule."""

    other: str = ""  # what the field conflicts with
    value: str = ""  # default: the field's value and source
    field: str = ""
    fix: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRule(Generic[F]):
    """A rule about one worker."""

    name: str  # stable, as in docs/preflight.md and docs/vllm.md
    severity: Severity
    field: str
    why: str
    fix: str
    test: Callable[[F], Violation | None]  # None: the rule is satisfied


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRule(Generic[F]):
    """A rule about a pair of workers. `test` receives prefill, then decode."""

    name: str
    severity: Severity
    field: str
    why: str
    fix: str
    test: Callable[[F, F], Violation | None]


def evaluate(rules: Sequence[RoleRule[F]], facts: F) -> Iterator[Finding]:
    """Yield a finding for each rule that one worker violates, in the order of the rules."""
    for rule in rules:
        violation = rule.test(facts)
        if violation is not None:
            yield to_finding(rule, violation, violation.value or facts.shown(violation.field or rule.field))


def to_finding(rule: RoleRule[F] | PairRule[F], violation: Violation, value: str) -> Finding:
    """Convert a violation to a finding.

    Args:
        rule: the violated rule.
        violation: texts that replace those of the rule.
        value: the field's value and source.
    """
    return Finding(
        severity=rule.severity,
        rule=rule.name,
        field=violation.field or rule.field,
        value=value,
        other=violation.other,
        why=violation.why or rule.why,
        fix=violation.fix or rule.fix,
    )
