"""Read the cases of tests/data/preflight_corpus/ and check them as the preflight command does.

Each case is a small configuration of our own after a shape that was seen in public, with the
verdict that is right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from dynamo_trtllm.cli.preflight import Report, evaluate
from dynamo_trtllm.config.commands import PreflightConfig
from dynamo_trtllm.models.checkpoint import SHAPES
from dynamo_trtllm.protocol.messages import Role

DATA = Path(__file__).resolve().parents[3] / "data"
CORPUS = DATA / "preflight_corpus"
MODELS = msgspec.yaml.decode(
    (DATA / "preflight_models.yaml").read_bytes(), type=dict[str, dict[str, Any]]
)

CaseRole = Literal["prefill", "decode", "agg"]


class RightFinding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A finding that a report must have. Without `field`, the finding's field is not compared."""

    role: Literal["prefill", "decode", "agg", "pair"]
    severity: Literal["error", "warning", "note"]
    rule: str
    field: str | None = None


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One file of the corpus. It has either `findings` or `refused`."""

    source: str  # repository and path, pull request, issue or API page where the shape was seen
    shape: str  # what is taken from it
    right: str  # why the verdict is right
    release: str
    model: str | None = None  # a bundled shape, or a name in preflight_models.yaml
    gpu: str | None = None
    load: dict[Literal["isl", "osl", "concurrency"], int] = {}
    flags: dict[CaseRole, str] = {}  # of the worker, beside its file
    prefill: dict[str, Any] | None = None
    decode: dict[str, Any] | None = None
    agg: dict[str, Any] | None = None
    findings: list[RightFinding] | None = None  # all of them, in any order
    # parts of the command's error, for settings that it does not check at all
    refused: list[str] = []
    # what the engine is passed, by dotted key; null: nothing
    arguments: dict[CaseRole, dict[str, Any]] = {}


def read_case(path: Path) -> Case:
    """Read one file of the corpus.

    Raises msgspec.ValidationError for a key or value that a case can't have.
    """
    text = path.read_text(encoding="utf-8")
    return msgspec.convert(yaml.load(text, Loader=yaml.CSafeLoader), Case)


def check(case: Case, folder: Path) -> Report:
    """Run the command's check on one case.

    Args:
        case: the case.
        folder: an empty folder, where its files are written.

    Raises:
        ConfigError: the command refuses the settings.
    """
    given: dict[str, Any] = {"release": case.release, "gpu": case.gpu, **case.load}
    if case.model is not None:
        given["model_path"] = _model(case.model, folder)
    for role in ("prefill", "decode", "agg"):
        arguments = getattr(case, role)
        if arguments is None:
            continue
        path = folder / f"{role}.yaml"
        path.write_text(yaml.safe_dump(arguments), encoding="utf-8")
        given[role] = path
        given[f"{role}_args"] = case.flags.get(role)
    return evaluate(PreflightConfig(**given))


def _model(name: str, folder: Path) -> str:
    if name in SHAPES:
        return name
    (folder / "config.json").write_text(json.dumps(MODELS[name]), encoding="utf-8")
    return str(folder)


def found(report: Report, right: list[RightFinding]) -> list[RightFinding]:
    """Return a report's findings in a fixed order, without the fields that the right ones leave
    open.
    """
    open_fields = {(finding.role, finding.rule) for finding in right if finding.field is None}
    findings = []
    for role, finding in report.findings:
        name: Any = "agg" if role == str(Role.AGGREGATED) else role
        is_open = (name, finding.rule) in open_fields
        findings.append(
            RightFinding(
                role=name,
                severity=finding.severity,
                rule=finding.rule,
                field=None if is_open else finding.field,
            )
        )
    return in_order(findings)


def in_order(findings: list[RightFinding]) -> list[RightFinding]:
    """Return findings sorted by role, rule, severity and field."""
    return sorted(
        findings,
        key=lambda finding: (finding.role, finding.rule, finding.severity, finding.field or ""),
    )


def passed(report: Report, role: CaseRole) -> dict[str, Any]:
    """Return the arguments that the engine of one role is passed, by dotted key."""
    wanted = Role.AGGREGATED if role == "agg" else Role(role)
    (facts,) = [facts for facts in report.roles if facts.role is wanted]
    return {key: leaf.value for key, leaf in facts.args.leaves.items()}
