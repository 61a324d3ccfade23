"""Rules about a worker and a live worker of the other role."""

from __future__ import annotations

from dynamo_trtllm.engines.preflight_rules import PeerFacts, RuleSection, Violation
from dynamo_trtllm.engines.trtllm.preflight.facts import RoleFacts
from dynamo_trtllm.kv_transfer.transfer_backend import EQUAL_LAYOUT
from dynamo_trtllm.protocol.messages import Role

SECTION: RuleSection[PeerFacts[RoleFacts]] = RuleSection("Against live workers")
_ENGINE = "trtllm"
_SAME = (
    "start both workers with the same model and settings (a killed worker stays registered for "
    "--lease-ttl-s; roll out changed settings under another --namespace)"
)


@SECTION.rule(
    "error",
    "peer-engine",
    field="engine",
    why="the KV of one engine is invalid for another",
    fix="start both workers with the same --engine",
)
def peer_engine(facts: PeerFacts[RoleFacts]) -> Violation | None:
    """Find a worker of another engine. The other rules are about workers of this engine."""
    if facts.peer.engine == _ENGINE:
        return None
    return Violation(value=_ENGINE, other=f"{facts.name}: {facts.peer.engine}")


@SECTION.rule(
    "error",
    "peer-strategy",
    field="disaggregation_strategy",
    why="prefill and decode would wait for each other",
    fix="use the same --disaggregation-strategy on both sides",
)
def peer_strategy(facts: PeerFacts[RoleFacts]) -> Violation | None:
    """Find a worker with another strategy."""
    mine = facts.mine.strategy
    theirs = facts.peer.strategy
    if facts.peer.engine != _ENGINE or theirs == mine:
        return None
    return Violation(value=mine, other=f"{facts.name}: {theirs}")


@SECTION.rule(
    "error",
    "peer-layout",
    field="layout",
    why="KV blocks are copied without conversion, so both sides need the same layout",
    fix=_SAME,
)
def peer_layout(facts: PeerFacts[RoleFacts]) -> list[Violation]:
    """Find each difference between the layouts of the KV."""
    layout = facts.mine.layout()
    if layout is None or facts.peer.engine != _ENGINE:
        return []
    found = []
    for name in EQUAL_LAYOUT:
        mine = getattr(layout, name)
        theirs = getattr(facts.peer.layout, name)
        if mine != theirs:
            found.append(
                Violation(field=f"layout.{name}", value=str(mine), other=f"{facts.name}: {theirs}")
            )
    return found


@SECTION.rule(
    "error",
    "peer-pairing",
    field="kv_compat",
    why="both sides must have the same value for KV transfers",
    fix=_SAME,
)
def peer_pairing(facts: PeerFacts[RoleFacts]) -> list[Violation]:
    """Find each difference between the values that pairs must share."""
    if facts.kv_compat is None or facts.peer.engine != _ENGINE:
        return []
    found = []
    for name in sorted({*facts.kv_compat, *facts.peer.kv_compat}):
        mine = facts.kv_compat.get(name, "unset")
        theirs = facts.peer.kv_compat.get(name, "unset")
        if mine != theirs:
            found.append(Violation(field=name, value=mine, other=f"{facts.name}: {theirs}"))
    return found


@SECTION.rule(
    "error",
    "peer-context",
    field="max_seq_len",
    why="prefill would accept requests that are too long for decode",
    fix="set prefill's max_seq_len to at most decode's",
)
def peer_context(facts: PeerFacts[RoleFacts]) -> Violation | None:
    """Find a prefill worker that accepts longer requests than its decode worker."""
    mine = facts.mine.max_seq_len
    theirs = facts.peer.card.context_length
    if facts.peer.engine != _ENGINE or mine is None or not theirs:
        return None
    prefill, decode = (mine, theirs) if facts.mine.role is Role.PREFILL else (theirs, mine)
    if prefill <= decode:
        return None
    return Violation(other=f"{facts.name}: {theirs}")
