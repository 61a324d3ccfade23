"""A worker against the instances that are registered already: what their records tell of a pair. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from dynamo_trtllm.engines.base import Finding
from dynamo_trtllm.engines.trtllm.preflight.facts import RoleFacts
from dynamo_trtllm.kv_transfer.params import EQUAL_LAYOUT
from dynamo_trtllm.messages import Instance, Role

_OPPOSITE = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
_SAME = (
    "start both workers with the same model and settings (one that was killed stays registered for --lease-ttl-s; "
    "roll changed settings out under another --namespace)"
)


def evaluate_peers(mine: RoleFacts, peers: Sequence[Instance], pairing: Mapping[str, str] | None) -> Iterator[Finding]:
    """A difference keeps the two from pairing: an error if no peer of the other role is left, else a warning."""
    others = [peer for peer in peers if peer.role is _OPPOSITE.get(mine.role)]
    found = {peer.id: list(_differences(mine, peer, pairing)) for peer in others}
    alone = all(found.values())
    for peer in others:
        for difference in found[peer.id]:
            yield _finding(difference, peer, "error" if alone else "warning")


class _Difference(NamedTuple):
    rule: str
    field: str
    ours: str
    theirs: str


def _differences(mine: RoleFacts, peer: Instance, pairing: Mapping[str, str] | None) -> Iterator[_Difference]:
    """Everything that must fit and does not."""
    if peer.engine != "trtllm":
        yield _Difference("peer-engine", "engine", "trtllm", peer.engine)
        return
    if peer.strategy != mine.strategy:
        yield _Difference("peer-strategy", "disaggregation_strategy", mine.strategy, peer.strategy)
    layout = mine.layout()
    for name in EQUAL_LAYOUT if layout is not None else ():
        ours, theirs = getattr(layout, name), getattr(peer.layout, name)
        if ours != theirs:
            yield _Difference("peer-layout", f"layout.{name}", str(ours), str(theirs))
    if pairing is not None:
        for name in sorted({*pairing, *peer.pairing}):
            if pairing.get(name) != peer.pairing.get(name):
                texts = (str(side.get(name, "unset")) for side in (pairing, peer.pairing))
                yield _Difference("peer-pairing", name, *texts)
    if not _lengths_fit(mine, peer):
        yield _Difference("peer-context", "max_seq_len", mine.shown("max_seq_len"), str(peer.card.context_length))


def _lengths_fit(mine: RoleFacts, peer: Instance) -> bool:
    """Decode must take what prefill lets in."""
    ours, theirs = mine.max_seq_len, peer.card.context_length
    if ours is None or not theirs:
        return True
    return ours <= theirs if mine.role is Role.PREFILL else theirs <= ours


def _finding(difference: _Difference, peer: Instance, severity: Literal["error", "warning"]) -> Finding:
    why, cure = PEER_RULES[difference.rule]
    return Finding(
        severity=severity,
        rule=difference.rule,
        field=difference.field,
        value=difference.ours,
        other=f"{_name(peer)}: {difference.theirs}",
        why=why,
        cure=cure,
    )


def _name(peer: Instance) -> str:
    return f"{peer.role} worker {peer.id:x}"


# Why and cure, by rule.
PEER_RULES: Mapping[str, tuple[str, str]] = {
    "peer-engine": ("KV of one engine means nothing to another", "start both workers with the same --engine"),
    "peer-strategy": ("prefill and decode would wait for one another", "give both the same --disaggregation-strategy"),
    "peer-layout": ("blocks are copied as they are, so both sides must lay KV out alike", _SAME),
    "peer-pairing": ("both sides must share this to hand KV over", _SAME),
    "peer-context": (
        "prefill would take prompts whose request does not fit decode",
        "set prefill's max_seq_len to at most decode's",
    ),
}
