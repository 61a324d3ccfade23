"""The three questions that preflight answers: one role alone, a pair, a worker against registered ones. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_trtllm.engines.base import Finding
from dynamo_trtllm.engines.rules import evaluate, to_finding
from dynamo_trtllm.engines.trtllm.preflight.facts import RoleFacts
from dynamo_trtllm.engines.trtllm.preflight.pair import PAIR_RULES
from dynamo_trtllm.engines.trtllm.preflight.peers import evaluate_peers
from dynamo_trtllm.engines.trtllm.preflight.table import ROLE_RULES
from dynamo_trtllm.messages import Instance

_ORDER = {"error": 0, "warning": 1, "note": 2}


def check_role(facts: RoleFacts) -> list[Finding]:
    """What is wrong with one role alone, the worst first."""
    return sorted(evaluate(ROLE_RULES, facts), key=_severity)


def check_pair(prefill: RoleFacts, decode: RoleFacts) -> list[Finding]:
    """What is wrong between the two roles alone, the worst first; each role has `check_role` of its own."""
    findings: list[Finding] = []
    for rule in PAIR_RULES:
        clash = rule.test(prefill, decode)
        if clash is not None:
            value = clash.value or f"prefill: {prefill.shown(clash.field or rule.field)}"
            findings.append(to_finding(rule, clash, value))
    return sorted(findings, key=_severity)


def check_peers(mine: RoleFacts, peers: Sequence[Instance], pairing: dict[str, str] | None = None) -> list[Finding]:
    """What keeps `mine` from working with registered instances of the other role, the worst first.

    `pairing`: what this worker will register beside its layout; None: not compared.
    """
    return sorted(evaluate_peers(mine, peers, pairing), key=_severity)


def _severity(finding: Finding) -> int:
    return _ORDER[finding.severity]
