"""Decides which instances serve a request. Pure: the same arguments give the same placement."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_trtllm.errors import NoInstances, TicketMismatch
from dynamo_trtllm.messages import Instance
from dynamo_trtllm.router.view import ModelView, pairing_key


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` is None when the decode instance does the whole request."""

    prefill: Instance | None
    decode: Instance


def place(
    view: ModelView, model: str, turn: int, *, avoid: int | None = None, decode_fallback: bool = False
) -> Placement:
    """Round robin per role. Prefill and decode are paired only when engine kind, strategy and KV layout are equal.

    `turn` counts the requests of this model; `avoid` is a prefill instance to leave out as long as there is another
    for the same decode instance. With `decode_fallback` a decode instance that can does the whole request while there
    is no prefill instance at all. Disaggregated pairs are preferred to aggregated instances, because a
    cluster that has pairs was built for them. Raises NoInstances naming the missing roles, or TicketMismatch naming
    the fields when there are both roles and no pair matches.
    """
    if not view.prefill or not view.decode:
        if view.aggregated:
            return Placement(None, view.aggregated[turn % len(view.aggregated)])
        whole = [instance for instance in view.decode if instance.serves_whole]
        if decode_fallback and whole:
            return Placement(None, whole[turn % len(whole)])
        missing = " and no ".join(role.value for role in view.missing_roles())
        raise NoInstances(f"model {model!r} has no {missing} worker now; start one or retry later")
    keys = view.keys
    offered = {keys[p.id] for p in view.prefill}
    decodes = [d for d in view.decode if keys[d.id] in offered]
    if not decodes:
        why = differences(view.prefill[0], view.decode[0])
        raise TicketMismatch(f"no prefill worker of model {model!r} matches a decode worker: {why}")
    decode = decodes[turn % len(decodes)]
    prefills = [p for p in view.prefill if keys[p.id] == keys[decode.id]]
    prefills = [p for p in prefills if p.id != avoid] or prefills
    # Turns are counted among the decodes of one key: counted over all, they would skip prefills of the same key.
    peers = [d for d in decodes if keys[d.id] == keys[decode.id]]
    turn_in_key = turn // len(decodes) * len(peers) + peers.index(decode)
    return Placement(prefills[turn_in_key % len(prefills)], decode)


def differences(a: Instance, b: Instance) -> str:
    """The pairing fields in which two instances differ, with both values, for people."""
    ours, theirs = dict(pairing_key(a)), dict(pairing_key(b))
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return "; ".join(f"{name} is {ours.get(name)!r} at {a.role} and {theirs.get(name)!r} at {b.role}" for name in names)
