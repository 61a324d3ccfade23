"""What preflight found, as tables for people and as JSON for machines. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dynamo_trtllm.engines.base import Finding
from dynamo_trtllm.engines.trtllm.preflight import MemoryTable, RoleFacts
from dynamo_trtllm.engines.trtllm.preflight.memory import WORKSPACE_BYTES
from dynamo_trtllm.messages import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleReport:
    """One role."""

    role: Role
    facts: RoleFacts | None  # None: its arguments were refused
    notes: tuple[str, ...]  # what merging the arguments had to say
    findings: tuple[Finding, ...]
    memory: MemoryTable | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    release: str
    gpu: str | None
    roles: tuple[RoleReport, ...]
    pair: tuple[Finding, ...] = ()
    handoff_tokens: int | None = None
    handoff_s: Mapping[str, float] = field(default_factory=dict)

    def findings(self) -> Iterator[tuple[str, Finding]]:
        """(role or "pair", finding), role by role."""
        for judged in self.roles:
            yield from ((str(judged.role), finding) for finding in judged.findings)
        yield from (("pair", finding) for finding in self.pair)

    def count(self, severity: str) -> int:
        return sum(finding.severity == severity for _, finding in self.findings())


def as_json(report: Report) -> str:
    body: dict[str, Any] = {
        "release": report.release,
        "gpu": report.gpu,
        "errors": report.count("error"),
        "warnings": report.count("warning"),
        "findings": [{"role": role, **asdict(finding)} for role, finding in report.findings()],
        "memory": [asdict(judged.memory) for judged in report.roles if judged.memory is not None],
        "handoff": {"tokens": report.handoff_tokens, "seconds": dict(report.handoff_s)},
    }
    return json.dumps(body, indent=2) + "\n"


def as_text(report: Report) -> str:
    blocks = [_head(report), *_findings(report), *_notes(report), _memory(report), _handoff(report), _end(report)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _head(report: Report) -> str:
    return f"TensorRT-LLM {report.release} on {report.gpu or 'an unknown GPU (see --gpu)'}"


def _findings(report: Report) -> Iterator[str]:
    rows = [(finding.severity, role, finding.rule, finding) for role, finding in report.findings()]
    order = ("error", "warning", "note")
    for severity, role, rule, finding in sorted(rows, key=lambda row: order.index(row[0])):
        sides = [finding.value, finding.other] if finding.other else [finding.value]
        lines = [
            f"{severity:<8} {role}: {finding.field}  [{rule}]",
            *(f"         {side}" for side in sides),
            f"         why:  {finding.why}",
            f"         cure: {finding.cure}",
        ]
        yield "\n".join(lines)


def _notes(report: Report) -> Iterator[str]:
    lines = [f"  {judged.role}: {note}" for judged in report.roles for note in judged.notes]
    if lines:
        yield "how the arguments were read:\n" + "\n".join(lines)


_ROWS: Sequence[tuple[str, Callable[[MemoryTable], str]]] = (
    ("GPU memory", lambda table: _gib(table.gpu_bytes)),
    ("weights", lambda table: _gib(table.weights_bytes)),
    ("transfer buffers", lambda table: _gib(table.buffer_bytes)),
    ("to work in (a guess)", lambda _: _gib(WORKSPACE_BYTES)),
    ("memory for KV", lambda table: _gib(table.kv_memory_bytes)),
    ("KV of one token", lambda table: f"{table.kv_token_bytes / 1024:.1f} KiB"),
    ("  if windows are freed", lambda table: f"{table.windowed_token_bytes / 1024:.1f} KiB"),
    ("KV blocks", lambda table: _count(table.blocks)),
    ("tokens of KV", lambda table: _count(table.pool_tokens)),
    ("tokens of one request", lambda table: _count(table.request_tokens)),
    ("requests at once", lambda table: _concurrency(table)),
)


def _memory(report: Report) -> str:
    tables = [(judged, judged.memory) for judged in report.roles if judged.memory is not None]
    if not tables:
        return "no memory estimate: it needs --model-path" if report.roles else ""
    head = ["memory of one GPU, estimated", *(_who(judged) for judged, _ in tables)]
    rows = [head, *([name, *(shown(table) for _, table in tables)] for name, shown in _ROWS)]
    return _aligned(rows)


def _who(judged: RoleReport) -> str:
    facts = judged.facts
    ranks = facts.tensor_parallel if facts is not None else 1
    return f"{judged.role}, {ranks} GPU{'s' if ranks > 1 else ''}"


def _handoff(report: Report) -> str:
    if not report.handoff_s:
        return ""
    rows = [[f"hand-off of {report.handoff_tokens} tokens at full rate", "time"]]
    rows += [[link, f"{seconds * 1000:.1f} ms"] for link, seconds in report.handoff_s.items()]
    return _aligned(rows)


def _end(report: Report) -> str:
    return f"{report.count('error')} errors, {report.count('warning')} warnings, {report.count('note')} notes"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(_line(row, widths) for row in rows)


def _line(row: Iterable[str], widths: Sequence[int]) -> str:
    first, *others = row
    cells = [f"{text:>{width}}" for text, width in zip(others, widths[1:], strict=True)]
    return "  ".join([f"{first:<{widths[0]}}", *cells]).rstrip()


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / (1 << 30):.1f} GiB"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _concurrency(table: MemoryTable) -> str:
    return "-" if table.concurrency is None else f"{table.concurrency:,} (by {table.limited_by})"
