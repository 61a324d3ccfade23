"""Evaluate preflight rules, which are data in YAML files, against the facts about a worker, a pair or a live peer.

A file maps each section of the documentation to its rules; `Rule` describes their keys. Conditions are Python
expressions over the facts, and the texts of findings are f-strings. The files are part of the package and as trusted
as its code.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec

from dynamo_trtllm.engines.base import Finding
from dynamo_trtllm.messages import Instance, Role

_FUNCTIONS = {"getattr", "int", "max", "min", "str"}  # what expressions may call besides the facts' methods
_SEVERITIES = ("error", "warning", "note")
_TEXTS = ("field", "value", "other", "why", "fix")  # fields of `Finding`


class WorkerFacts(Protocol):
    """Facts about one worker before it loads. Each engine adds its own."""

    def shown(self, key: str) -> str:
        """Return an argument's value and its source as text."""


F = TypeVar("F", bound=WorkerFacts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFacts(Generic[F]):
    """Facts about one worker and a registered worker of the other role."""

    mine: F
    peer: Instance
    kv_compat: Mapping[str, str] | None = None  # values that this worker will register; None: not compared

    @property
    def name(self) -> str:
        return f"{self.peer.role} worker {self.peer.id:x}"

    def shown(self, key: str) -> str:
        """Return this worker's value of an argument and its source as text."""
        return self.mine.shown(key)


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule. Its first key is its severity, and the value of that key is its name.

    The rule is violated if its condition is true, and once for each element if the condition is a list. If a fact that
    the condition names is None, it is unknown and the rule is skipped.
    """

    error: str = ""
    warning: str = ""
    note: str = ""
    roles: tuple[Role, ...] = ()  # default: all
    releases: str = ""  # such as "<1.3" or "==1.2"; default: all
    when: str  # the condition
    field: str  # dotted name of the argument
    why: str
    fix: str
    # Texts of findings. `found` is the value of the condition, or its element, and `field` the field.
    value: str = "{shown(field)}"
    other: str = ""  # what the field conflicts with
    exact_field: str = ""  # replaces `field`, as the next ones replace `why` and `fix`
    exact_why: str = ""
    exact_fix: str = ""

    def __post_init__(self) -> None:
        if [bool(self.error), bool(self.warning), bool(self.note)].count(True) != 1:
            raise ValueError("a rule has one of error, warning and note")

    @property
    def name(self) -> str:
        return self.error or self.warning or self.note

    @property
    def severity(self) -> Literal["error", "warning", "note"]:
        return "error" if self.error else "warning" if self.warning else "note"

    def expressions(self) -> dict[str, str]:
        """Return the condition and the texts of findings as Python expressions; texts by their field of `Finding`."""
        condition = f"({self.when})"
        if self.releases:
            comparison = self.releases.rstrip("0123456789.")
            numbers = self.releases.removeprefix(comparison).split(".")
            condition = f"line[:{len(numbers)}] {comparison} ({', '.join(numbers)},) and {condition}"
        if self.roles:
            condition = f"role in {[str(role) for role in self.roles]} and {condition}"
        sources = {"when": condition}
        for key in _TEXTS:
            text = getattr(self, f"exact_{key}", getattr(self, key))
            sources[key] = f'f"""{text}"""' if text else repr(getattr(self, key))
        return sources


class RuleSet(Generic[F]):
    """The rules of one file about one kind of facts."""

    def __init__(self, file: Path, facts: type[F], **derived: Callable[[F], object]) -> None:
        """Read and compile the rules.

        Args:
            file: YAML file.
            facts: class whose attributes are the names that expressions may use.
            derived: functions that return further facts, by name.

        Raises:
            msgspec.ValidationError: a rule has an unknown key, an invalid value, or no or two severities.
            ValueError: an expression has an unknown name.
            SyntaxError: an expression can't be parsed.
        """
        self.sections = msgspec.yaml.decode(file.read_bytes(), type=dict[str, tuple[Rule, ...]])
        self._derived = derived
        self._known = {*dir(facts), *derived}
        every = [rule for rules in self.sections.values() for rule in rules]
        self._compiled = {
            rule: {key: self._compile(rule, key, source) for key, source in rule.expressions().items()}
            for rule in sorted(every, key=lambda rule: _SEVERITIES.index(rule.severity))
        }

    def evaluate(self, facts: F) -> Iterator[Finding]:
        """Yield a finding for each violation, the most severe first, then in the order of the rules."""
        for rule, compiled in self._compiled.items():
            code, names = compiled["when"]
            values = self._values(names, facts)
            found = None if any(value is None for value in values.values()) else eval(code, values)
            for each in found if isinstance(found, list) else [found] if found else []:
                texts: dict[str, Any] = {}
                for key in _TEXTS:
                    code, names = compiled[key]
                    texts[key] = eval(code, self._values(names, facts), {"found": each} | texts)
                yield Finding(severity=rule.severity, rule=rule.name, **texts)

    def _compile(self, rule: Rule, key: str, source: str) -> tuple[CodeType, set[str]]:
        tree = ast.parse(source, mode="eval")
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - _FUNCTIONS
        if key != "when":
            names -= {"found", "field"}
        if unknown := names - self._known:
            raise ValueError(f"rule {rule.name}: unknown name {', '.join(sorted(unknown))} in {source}")
        return compile(tree, rule.name, "eval"), names

    def _values(self, names: set[str], facts: F) -> dict[str, Any]:
        derived = {name: self._derived[name](facts) for name in names & self._derived.keys()}
        return derived | {name: getattr(facts, name) for name in names - self._derived.keys()}
