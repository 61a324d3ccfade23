"""A rule is for its roles and releases, and its texts are in its finding unless the violation has
more exact ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dynamo_trtllm.engines.preflight_rules import RuleSection, Severity, Violation, evaluate
from dynamo_trtllm.engines.trtllm.preflight import checks
from dynamo_trtllm.engines.vllm import preflight as vllm
from dynamo_trtllm.protocol.messages import Role
from tests.kit.cases import each_case


@dataclass(frozen=True)
class Batch:
    """The facts that the rules of these tests check."""

    size: int = 64
    role: Role = Role.PREFILL
    line: tuple[int, ...] = (1, 2, 1)

    def value_with_source(self, key: str) -> str:
        return f"{key} as set"


def section_with(
    check,
    severity: Severity = "warning",
    name: str = "batch-large",
    **limits: tuple[Role, ...] | tuple[int, ...],
) -> RuleSection[Batch]:
    section: RuleSection[Batch] = RuleSection("Batches")
    section.rule(severity, name, field="batch", why="it is large", fix="lower it", **limits)(check)
    return section


def test_violated_rule_reports_its_texts_and_value() -> None:
    (finding,) = evaluate([section_with(lambda facts: Violation())], Batch())
    assert (finding.severity, finding.rule, finding.field) == ("warning", "batch-large", "batch")
    assert (finding.value, finding.other) == ("batch as set", "")
    assert (finding.why, finding.fix) == ("it is large", "lower it")


def test_violation_texts_replace_the_general_ones() -> None:
    violation = Violation(
        field="batch_1", other="the limit of 32", why="it is 64", fix="set it to 32"
    )
    (finding,) = evaluate([section_with(lambda facts: violation)], Batch())
    assert (finding.field, finding.value) == ("batch_1", "batch_1 as set")
    assert (finding.other, finding.why, finding.fix) == (
        "the limit of 32",
        "it is 64",
        "set it to 32",
    )


@pytest.mark.parametrize("found", [None, []])
def test_rule_when_satisfied_then_nothing_is_found(found: list[Violation] | None) -> None:
    assert evaluate([section_with(lambda facts: found)], Batch()) == []


def test_rule_with_several_violations_reports_each() -> None:
    section = section_with(lambda facts: [Violation(value="a"), Violation(value="b")])
    assert [finding.value for finding in evaluate([section], Batch())] == ["a", "b"]


@each_case(
    ("limits", "applies"),
    [
        ({"roles": (Role.PREFILL,)}, True),
        ({"roles": (Role.DECODE, Role.AGGREGATED)}, False),
        ({"before": (1, 3)}, True),
        ({"before": (1, 2)}, False),
        ({"before": (1, 2, 2)}, True),
        ({"since": (1, 2)}, True),
        ({"since": (1, 2, 2)}, False),
        ({"since": (1, 2), "before": (1, 3)}, True),
        ({"since": (1, 2, 0), "before": (1, 2, 1)}, False),
    ],
)
def test_rule_checks_only_its_roles_and_releases(
    limits: dict[str, tuple[Role, ...] | tuple[int, ...]], applies: bool
) -> None:
    section = section_with(lambda facts: Violation(), **limits)
    assert bool(evaluate([section], Batch())) is applies


def test_violated_rules_are_sorted_by_severity() -> None:
    severities: tuple[Severity, ...] = ("note", "error", "warning", "error")
    sections = [
        section_with(lambda facts: Violation(), severity=severity, name=f"rule-{number}")
        for number, severity in enumerate(severities)
    ]
    assert [finding.rule for finding in evaluate(sections, Batch())] == [
        "rule-1",
        "rule-3",
        "rule-2",
        "rule-0",
    ]


@pytest.mark.parametrize(
    "sections",
    [
        (*checks.WORKER_SECTIONS, *checks.PAIR_SECTIONS, *checks.PEER_SECTIONS),
        (vllm.WORKER, vllm.PEERS),
    ],
    ids=["trtllm", "vllm"],
)
def test_rules_have_unique_names_and_all_texts(sections: tuple[RuleSection, ...]) -> None:
    rules = [rule for section in sections for rule in section.rules]
    assert len({rule.name for rule in rules}) == len(rules) > 10
    assert all(rule.field and rule.why and rule.fix for rule in rules)
