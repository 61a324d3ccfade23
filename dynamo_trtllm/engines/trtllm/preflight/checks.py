"""Run the preflight rules for one role, for a pair of roles, and for a worker against registered workers."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_trtllm.engines.base import Finding
from dynamo_trtllm.engines.rules import RoleRule, Violation, evaluate, to_finding
from dynamo_trtllm.engines.trtllm.preflight import hardware, lengths, memory, parallel, transfer
from dynamo_trtllm.engines.trtllm.preflight.facts import RoleFacts
from dynamo_trtllm.engines.trtllm.preflight.pair import PAIR_RULES, evaluate_peers
from dynamo_trtllm.messages import Instance

_RAY = ("ray_worker_extension_cls", "ray_placement_config", "ray_worker_nsight_options")


def _ray_without_ray(facts: RoleFacts) -> Violation | None:
    if facts.args.get("orchestrator_type") == "ray":
        return None
    for key in _RAY:
        if facts.section(key):
            return Violation(field=key, value="set", other=f"orchestrator_type {facts.shown('orchestrator_type')}")
    return None


def _dummy_weights(facts: RoleFacts) -> Violation | None:
    return Violation() if str(facts.args.get("load_format")).rpartition(".")[2].upper() == "DUMMY" else None


VALUE_RULES = (
    RoleRule(
        name="ray-without-ray",
        severity="error",
        field="ray_placement_config",
        why="TensorRT-LLM rejects Ray settings unless Ray starts the ranks",
        fix="set orchestrator_type: ray, or remove the setting",
        test=_ray_without_ray,
    ),
    RoleRule(
        name="dummy-weights",
        severity="warning",
        field="load_format",
        why="the weights are random, so the output is meaningless",
        fix="remove load_format, except for benchmarks",
        test=_dummy_weights,
    ),
)


ROLE_RULES = (
    *VALUE_RULES,
    *lengths.RULES,
    *parallel.RULES,
    *transfer.RULES,
    *hardware.ENVIRONMENT_RULES,
    *hardware.RULES,
    *memory.MEMORY_RULES,
)


_ORDER = {"error": 0, "warning": 1, "note": 2}


def check_role(facts: RoleFacts) -> list[Finding]:
    """Return the findings for one role alone, most severe first."""
    return sorted(evaluate(ROLE_RULES, facts), key=_severity)


def check_pair(prefill: RoleFacts, decode: RoleFacts) -> list[Finding]:
    """Return the findings between two roles, most severe first. Findings within a role come from `check_role`."""
    findings: list[Finding] = []
    for rule in PAIR_RULES:
        violation = rule.test(prefill, decode)
        if violation is not None:
            value = violation.value or f"prefill: {prefill.shown(violation.field or rule.field)}"
            findings.append(to_finding(rule, violation, value))
    return sorted(findings, key=_severity)


def check_peers(mine: RoleFacts, peers: Sequence[Instance], kv_compat: dict[str, str] | None = None) -> list[Finding]:
    """Return the findings between this worker and registered workers of the other role, most severe first.

    Args:
        mine: facts about this worker.
        peers: registered workers; those of the same role are ignored.
        kv_compat: values that this worker will register besides its layout; None: they are not compared.
    """
    return sorted(evaluate_peers(mine, peers, kv_compat), key=_severity)


def _severity(finding: Finding) -> int:
    return _ORDER[finding.severity]
