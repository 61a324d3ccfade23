"""A worker against the instances that are registered already: what their records tell of a pair. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dynamo_trtllm.engine.base import Finding
from dynamo_trtllm.engine.trtllm.preflight.facts import RoleFacts
from dynamo_trtllm.handoff.tickets import EQUAL_LAYOUT
from dynamo_trtllm.messages import Instance, Role

PEER_RULES = ("peer-engine", "peer-strategy", "peer-layout", "peer-pairing", "peer-context")
_OPPOSITE = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
_SAME = "start both workers with the same model and settings"


def judged_peers(mine: RoleFacts, peers: Sequence[Instance], pairing: Mapping[str, str] | None) -> Iterator[Finding]:
    """A difference keeps the two from pairing: an error with every peer of the other role, a warning with some."""
    wanted = _OPPOSITE.get(mine.role)
    if wanted is None:
        return
    others = [peer for peer in peers if peer.role is wanted]
    found = {peer.id: list(_differences(mine, peer, pairing)) for peer in others}
    alone = bool(others) and all(found.values())
    for peer in others:
        for rule, field, value, other in found[peer.id]:
            yield _finding(rule, field, value, f"{_name(peer)}: {other}", "error" if alone else "warning")
    for peer in others:
        yield from _contexts(mine, peer)


def _differences(
    mine: RoleFacts, peer: Instance, pairing: Mapping[str, str] | None
) -> Iterator[tuple[str, str, str, str]]:
    """(rule, field, our value, theirs) of everything that must be equal and is not."""
    if peer.engine != "trtllm":
        yield "peer-engine", "engine", "trtllm", peer.engine
        return
    if peer.strategy != mine.strategy:
        yield "peer-strategy", "disaggregation_strategy", mine.strategy, peer.strategy
    layout = mine.layout()
    for name in EQUAL_LAYOUT if layout is not None else ():
        ours, theirs = getattr(layout, name), getattr(peer.layout, name)
        if ours != theirs:
            yield "peer-layout", f"layout.{name}", str(ours), str(theirs)
    for name in sorted({*pairing, *peer.pairing}) if pairing is not None else ():
        if pairing is not None and pairing.get(name) != peer.pairing.get(name):
            yield "peer-pairing", name, str(pairing.get(name, "unset")), str(peer.pairing.get(name, "unset"))


def _contexts(mine: RoleFacts, peer: Instance) -> Iterator[Finding]:
    """Decode must take what prefill lets in; a card is one per model, so any difference is worth saying."""
    ours, theirs = mine.max_seq_len, peer.card.context_length
    if ours is None or not theirs:
        return
    prefill, decode = (ours, theirs) if mine.role is Role.PREFILL else (theirs, ours)
    if prefill > decode:
        yield _finding("peer-context", "max_seq_len", mine.shown("max_seq_len"), f"{_name(peer)}: {theirs}", "error")


def _finding(rule: str, field: str, value: str, other: str, severity: str) -> Finding:
    why, cure = _WORDS[rule]
    return Finding(
        severity="error" if severity == "error" else "warning",
        rule=rule,
        field=field,
        value=value,
        other=other,
        why=why,
        cure=cure,
    )


def _name(peer: Instance) -> str:
    return f"{peer.role} worker {peer.id:x}"


_WORDS = {
    "peer-engine": ("KV of one engine means nothing to another", "start both workers with the same --engine"),
    "peer-strategy": ("the two legs would wait for one another", "give both the same --disaggregation-strategy"),
    "peer-layout": ("blocks are copied as they are, so both sides must lay KV out alike", _SAME),
    "peer-pairing": ("both sides must share this to hand KV over", _SAME),
    "peer-context": (
        "prefill would take prompts whose request does not fit decode",
        "set prefill's max_seq_len to at most decode's",
    ),
}
