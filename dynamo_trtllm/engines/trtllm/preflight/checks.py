"""The three questions that preflight answers: one role alone, a pair, a worker against registered ones. Pure."""

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
        why="TensorRT-LLM refuses settings of Ray when another launcher starts the ranks",
        cure="set orchestrator_type: ray, or leave it out",
        test=_ray_without_ray,
    ),
    RoleRule(
        name="dummy-weights",
        severity="warning",
        field="load_format",
        why="the weights are random numbers: answers have no meaning",
        cure="leave load_format out, except for measuring",
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
    """What is wrong with one role alone, the worst first."""
    return sorted(evaluate(ROLE_RULES, facts), key=_severity)


def check_pair(prefill: RoleFacts, decode: RoleFacts) -> list[Finding]:
    """What is wrong between the two roles alone, the worst first; each role has `check_role` of its own."""
    findings: list[Finding] = []
    for rule in PAIR_RULES:
        violation = rule.test(prefill, decode)
        if violation is not None:
            value = violation.value or f"prefill: {prefill.shown(violation.field or rule.field)}"
            findings.append(to_finding(rule, violation, value))
    return sorted(findings, key=_severity)


def check_peers(mine: RoleFacts, peers: Sequence[Instance], kv_compat: dict[str, str] | None = None) -> list[Finding]:
    """What keeps `mine` from working with registered instances of the other role, the worst first.

    `kv_compat`: what this worker will register beside its layout; None: not compared.
    """
    return sorted(evaluate_peers(mine, peers, kv_compat), key=_severity)


def _severity(finding: Finding) -> int:
    return _ORDER[finding.severity]
