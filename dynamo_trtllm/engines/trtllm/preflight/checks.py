"""Run the preflight rules for one role, for a pair of roles, and for a worker against registered
workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dynamo_trtllm.engines.engine_interface import Finding
from dynamo_trtllm.engines.preflight_rules import PeerFacts, RuleSection, Severity, evaluate
from dynamo_trtllm.engines.trtllm.preflight.facts import RoleFacts
from dynamo_trtllm.engines.trtllm.preflight.rules import (
    environment,
    features,
    gpu,
    lengths,
    memory,
    pair,
    parallelism,
    peers,
    transfer,
    values,
)
from dynamo_trtllm.protocol.messages import Instance, Role

# In the order of docs/preflight.md.
WORKER_SECTIONS: tuple[RuleSection[RoleFacts], ...] = (
    values.SECTION,
    lengths.SECTION,
    parallelism.SECTION,
    transfer.SECTION,
    features.SECTION,
    environment.SECTION,
    gpu.SECTION,
    memory.SECTION,
)
PAIR_SECTIONS = (pair.SECTION,)
PEER_SECTIONS = (peers.SECTION,)


def check_role(facts: RoleFacts) -> list[Finding]:
    """Return the findings for one role alone, most severe first."""
    return evaluate(WORKER_SECTIONS, facts)


def check_pair(prefill: RoleFacts, decode: RoleFacts) -> list[Finding]:
    """Return the findings between two roles, most severe first.

    Findings within a role come from `check_role`.
    """
    return evaluate(PAIR_SECTIONS, pair.PairFacts(prefill, decode))


def check_peers(
    mine: RoleFacts, instances: Sequence[Instance], kv_compat: dict[str, str] | None = None
) -> list[Finding]:
    """Return a finding for each difference to a peer. The findings are errors if no peer of the
    other role matches, and warnings if one matches.

    Args:
        mine: facts about this worker.
        instances: registered workers; workers of the same role are ignored.
        kv_compat: values that this worker will register besides its layout. If it is None, these
            values are not compared.
    """
    found = []
    for instance in instances:
        if {mine.role, instance.role} == {Role.PREFILL, Role.DECODE}:
            facts = PeerFacts(mine=mine, peer=instance, kv_compat=kv_compat)
            found.append(evaluate(PEER_SECTIONS, facts))
    has_matching_peer = any(not findings for findings in found)
    severity: Severity = "warning" if has_matching_peer else "error"
    return [replace(finding, severity=severity) for findings in found for finding in findings]
