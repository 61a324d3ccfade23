"""Rules as data: what a file may say, what is refused when it is loaded, and what a violated rule tells."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from dynamo_trtllm.engines.rules import RuleSet
from dynamo_trtllm.engines.trtllm.preflight import checks
from dynamo_trtllm.engines.vllm import args as vllm
from dynamo_trtllm.messages import Role


@dataclass(frozen=True)
class Facts:
    """A worker with two arguments."""

    role: Role = Role.PREFILL
    line: tuple[int, int, int] = (1, 2, 1)
    batch: int | None = 64
    names: tuple[str, ...] = ()

    def shown(self, key: str) -> str:
        return f"{key} as set"


RULE = """\
Batches:
- warning: batch-large
  when: batch > limit
  field: batch
  why: it is large
  fix: lower it
"""


def load(tmp_path: Path, text: str) -> RuleSet[Facts]:
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    return RuleSet(file, Facts, limit=lambda facts: 32)


def found(tmp_path: Path, facts: Facts, *lines: str) -> list[dict[str, str]]:
    text = RULE + "".join(f"  {line}\n" for line in lines)
    return [asdict(finding) for finding in load(tmp_path, text).evaluate(facts)]


def test_rule_when_violated_then_its_texts_and_the_fields_value_are_reported(tmp_path: Path) -> None:
    assert found(tmp_path, Facts()) == [
        {
            "severity": "warning",
            "rule": "batch-large",
            "field": "batch",
            "value": "batch as set",
            "other": "",
            "why": "it is large",
            "fix": "lower it",
        }
    ]


@pytest.mark.parametrize("batch", [32, None], ids=["satisfied", "unknown"])
def test_rule_when_satisfied_or_a_fact_is_unknown_then_nothing_is_found(tmp_path: Path, batch: int | None) -> None:
    assert found(tmp_path, Facts(batch=batch)) == []


def test_rule_when_it_has_exact_texts_then_they_replace_the_general_ones(tmp_path: Path) -> None:
    (finding,) = found(
        tmp_path,
        Facts(),
        'exact_field: "batch_{role}"',
        'value: "{field} is {batch}"',
        "other: the limit of {limit}",
        "exact_why: found {found}",
        "exact_fix: set it to {min(batch, limit)}",
    )
    assert finding["field"] == "batch_prefill"
    assert finding["value"] == "batch_prefill is 64"
    assert finding["other"] == "the limit of 32"
    assert finding["why"] == "found True"
    assert finding["fix"] == "set it to 32"


@pytest.mark.parametrize(
    ("line", "applies"),
    [
        ("roles: [prefill]", True),
        ("roles: [decode, prefill_and_decode]", False),
        ('releases: "<1.3"', True),
        ('releases: "<1.2"', False),
        ('releases: ">=1.2"', True),
        ('releases: ">=1.2.2"', False),
        ('releases: "==1.2"', True),
        ('releases: "==1.2.0"', False),
    ],
)
def test_rule_when_it_is_for_some_roles_or_releases_then_others_are_not_judged(
    tmp_path: Path, line: str, applies: bool
) -> None:
    assert bool(found(tmp_path, Facts(), line)) is applies


def test_rule_when_its_condition_is_a_list_then_one_finding_for_each(tmp_path: Path) -> None:
    text = RULE.replace("batch > limit", "names and [names[0], names[1]]") + "  other: name {found}\n"
    rules = load(tmp_path, text)
    assert [finding.other for finding in rules.evaluate(Facts(names=("a", "b")))] == ["name a", "name b"]
    assert list(rules.evaluate(Facts())) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  fix: lower it", "  cure: lower it", "cure|fix"),
        ("  fix: lower it\n", "", "fix"),
        ("batch > limit", "batch > ceiling", "rule batch-large: unknown name ceiling"),
        ("batch > limit", "open('x')", "unknown name open"),
        ("batch > limit", "batch >", "invalid syntax"),
        ("batch > limit", "found", "unknown name found"),
        ("lower it", "lower it\n  exact_fix: set it to {ceiling}", "unknown name ceiling"),
        ("lower it", "lower it\n  other: a {batch", "expecting '}'"),
        ("lower it", "lower it\n  roles: [router]", "roles"),
        ("lower it", 'lower it\n  releases: "new"', "unknown name|invalid syntax"),
        ("  field: batch", "  field: [batch]", "field"),
    ],
)
def test_rules_when_one_is_malformed_then_loading_fails_and_says_where(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in RULE
    with pytest.raises((ValueError, SyntaxError), match=message):
        load(tmp_path, RULE.replace(old, new))


@pytest.mark.parametrize(
    "rules", [checks.WORKER_RULES, checks.PAIR_RULES, checks.PEER_RULES, vllm.WORKER_RULES, vllm.PEER_RULES]
)
def test_rules_when_loaded_then_each_has_one_name_and_severity_of_its_own(rules: RuleSet) -> None:
    found = [rule for members in rules.sections.values() for rule in members]
    assert all(bool(rule.error) + bool(rule.warning) + bool(rule.note) == 1 for rule in found)
    assert len({rule.name for rule in found}) == len(found) > 3
