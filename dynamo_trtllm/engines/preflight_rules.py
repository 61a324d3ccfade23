"""Define preflight rules, and evaluate them against facts about a worker, a pair of workers, or a
live peer.

A rule is a function that receives the facts and returns the violations that it found. Its name,
severity and texts are in its decorator. docs/preflight.md and docs/preflight-vllm.md are generated
from the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from dynamo_trtllm.engines.engine_interface import Finding
from dynamo_trtllm.protocol.messages import Instance, Role

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


class Facts(Protocol):
    """The interface that all kinds of facts have in common."""

    @property
    def role(self) -> Role | None:
        """The role of the worker; None for facts about a pair."""

    @property
    def line(self) -> tuple[int, ...]:
        """The release of the library as numbers: (1, 2, 1)."""

    def value_with_source(self, key: str) -> str:
        """Return an argument's value and its source as text."""


F = TypeVar("F", bound=Facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFacts(Generic[F]):
    """Facts about one worker and a registered worker of the other role."""

    mine: F
    peer: Instance
    # values that this worker will register; None if they are not to be compared
    kv_compat: Mapping[str, str] | None = None

    @property
    def name(self) -> str:
        """The peer's role and id, for texts."""
        return f"{self.peer.role} worker {self.peer.id:x}"

    @property
    def role(self) -> Role | None:
        """See `Facts.role`."""
        return self.mine.role

    @property
    def line(self) -> tuple[int, ...]:
        """See `Facts.line`."""
        return self.mine.line

    def value_with_source(self, key: str) -> str:
        """Return this worker's value of an argument and its source as text."""
        return self.mine.value_with_source(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A violation that a rule found. Each text that is not empty replaces the text of the rule."""

    field: str = ""
    value: str = ""  # default: the value of the field and its source
    other: str = ""  # what the field conflicts with
    why: str = ""
    fix: str = ""


Check = Callable[[F], Violation | Sequence[Violation] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Generic[F]):
    """One rule: the workers to which it applies, its texts, and the function that looks for
    violations.
    """

    name: str
    severity: Severity
    field: str  # dotted name of the argument
    why: str
    fix: str
    roles: tuple[Role, ...] = ()  # default: all
    since: tuple[int, ...] = ()  # first release to which it applies; default: all
    before: tuple[int, ...] = ()  # first release to which it no longer applies; default: none
    check: Check[F]

    def findings(self, facts: F) -> Iterator[Finding]:
        """Yield a finding for each violation."""
        if not self._applies_to(facts):
            return
        found = self.check(facts)
        if found is None:
            return
        violations = [found] if isinstance(found, Violation) else found
        for violation in violations:
            name = violation.field or self.field
            yield Finding(
                severity=self.severity,
                rule=self.name,
                field=name,
                value=violation.value or facts.value_with_source(name),
                other=violation.other,
                why=violation.why or self.why,
                fix=violation.fix or self.fix,
            )

    def _applies_to(self, facts: F) -> bool:
        if self.roles and facts.role not in self.roles:
            return False
        if self.since and facts.line < self.since:
            return False
        return not self.before or facts.line < self.before


@dataclass(frozen=True, slots=True)
class RuleSection(Generic[F]):
    """The rules under one heading of the documentation, in its order."""

    title: str
    rules: list[Rule[F]] = field(default_factory=list)

    def rule(
        self,
        severity: Severity,
        name: str,
        *,
        field: str,
        why: str,
        fix: str,
        roles: tuple[Role, ...] = (),
        since: tuple[int, ...] = (),
        before: tuple[int, ...] = (),
    ) -> Callable[[Check[F]], Check[F]]:
        """Return a decorator that adds a function to this section as a rule.

        Args:
            severity: the severity of its findings.
            name: stable name, as in the documentation.
            field: dotted name of the argument that the rule is about.
            why: what happens if the rule is violated.
            fix: what to do then.
            roles: roles of workers to which the rule applies; default: all.
            since: first release to which the rule applies, as numbers; default: all.
            before: first release to which the rule no longer applies; default: none.
        """

        def add(check: Check[F]) -> Check[F]:
            self.rules.append(
                Rule(
                    name=name,
                    severity=severity,
                    field=field,
                    why=why,
                    fix=fix,
                    roles=roles,
                    since=since,
                    before=before,
                    check=check,
                )
            )
            return check

        return add


def evaluate(sections: Sequence[RuleSection[F]], facts: F) -> list[Finding]:
    """Return the findings of all rules, the most severe first, then in the order of the rules."""
    findings: list[Finding] = []
    for section in sections:
        for rule in section.rules:
            findings.extend(rule.findings(facts))
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
