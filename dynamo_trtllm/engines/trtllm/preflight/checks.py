"""Run the preflight rules for one role, for a pair of roles, and for a worker against registered workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dynamo_trtllm.engines.base import Finding
from dynamo_trtllm.engines.rules import PeerFacts, RuleSet
from dynamo_trtllm.engines.trtllm.preflight.facts import DERIVED, RoleFacts
from dynamo_trtllm.kv_transfer.params import EQUAL_LAYOUT
from dynamo_trtllm.messages import Instance, Role

_FOLDER = Path(__file__).parent
_ORDER = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True, slots=True)
class PairFacts:
    """Facts about a prefill worker and a decode worker."""

    prefill: RoleFacts
    decode: RoleFacts

    def shown(self, key: str) -> str:
        """Return prefill's value of an argument and its source as text."""
        return f"prefill: {self.prefill.shown(key)}"


def check_role(facts: RoleFacts) -> list[Finding]:
    """Return the findings for one role alone, most severe first."""
    return sorted(WORKER_RULES.evaluate(facts), key=_severity)


def check_pair(prefill: RoleFacts, decode: RoleFacts) -> list[Finding]:
    """Return the findings between two roles, most severe first. Findings within a role come from `check_role`."""
    found = PAIR_RULES.evaluate(PairFacts(prefill, decode))
    findings = [replace(each, other=each.other or f"decode: {decode.shown(each.field)}") for each in found]
    return sorted(findings, key=_severity)


def check_peers(mine: RoleFacts, peers: Sequence[Instance], kv_compat: dict[str, str] | None = None) -> list[Finding]:
    """Return a finding for each difference to a peer: an error if no peer of the other role matches, else a warning.

    Args:
        mine: facts about this worker.
        peers: registered workers; those of the same role are ignored.
        kv_compat: values that this worker will register besides its layout; None: they are not compared.
    """
    found = [
        list(PEER_RULES.evaluate(PeerFacts(mine=mine, peer=peer, kv_compat=kv_compat)))
        for peer in peers
        if {mine.role, peer.role} == {Role.PREFILL, Role.DECODE}
    ]
    severity: Literal["error", "warning"] = "error" if all(found) else "warning"
    return [replace(finding, severity=severity) for findings in found for finding in findings]


def _severity(finding: Finding) -> int:
    return _ORDER[finding.severity]


def _model_difference(pair: PairFacts) -> str | None:
    """Return the first property in which the models differ; None if there is none or a model is unknown."""
    mine, theirs = pair.prefill.model, pair.decode.model
    if mine is None or theirs is None:
        return None
    names = ("model_type", "num_layers", "num_kv_heads", "head_dim", "vocab_size", "quantization")
    return next((name for name in names if getattr(mine, name) != getattr(theirs, name)), None)


def _layout_differences(facts: PeerFacts[RoleFacts]) -> list[str]:
    layout = facts.mine.layout()
    names = EQUAL_LAYOUT if layout is not None else ()
    return [name for name in names if getattr(layout, name) != getattr(facts.peer.layout, name)]


def _pairing_differences(facts: PeerFacts[RoleFacts]) -> list[str]:
    ours, theirs = facts.kv_compat or {}, facts.peer.kv_compat
    return [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]


def _lengths_fit(facts: PeerFacts[RoleFacts]) -> bool:
    """Return True if decode accepts requests as long as prefill's."""
    ours, theirs = facts.mine.max_seq_len, facts.peer.card.context_length
    return ours is None or not theirs or (ours <= theirs if facts.mine.role is Role.PREFILL else theirs <= ours)


WORKER_RULES = RuleSet(_FOLDER / "worker_rules.yaml", RoleFacts, **DERIVED)
PAIR_RULES = RuleSet(_FOLDER / "pair_rules.yaml", PairFacts, model_difference=_model_difference)
PEER_RULES = RuleSet(
    _FOLDER / "peer_rules.yaml",
    PeerFacts[RoleFacts],
    layout_differences=_layout_differences,
    pairing_differences=_pairing_differences,
    lengths_fit=_lengths_fit,
)
