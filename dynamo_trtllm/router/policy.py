"""Decides which instances serve a request. Pure: the same arguments give the same placement."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_trtllm.errors import NoInstances, TicketMismatch
from dynamo_trtllm.messages import Instance, KvLayout
from dynamo_trtllm.router.view import ModelView

_Key = tuple[str, str, KvLayout]


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` is None when the decode instance does the whole request."""

    prefill: Instance | None
    decode: Instance


def place(view: ModelView, model: str, turn: int, *, avoid: int | None = None) -> Placement:
    """Round robin per role. Prefill and decode are paired only when engine kind, strategy and KV layout are equal.

    `turn` counts the requests of this model; `avoid` is a prefill instance to leave out as long as there is another
    for the same decode instance. Disaggregated pairs are preferred to aggregated instances, because a
    cluster that has pairs was built for them. Raises NoInstances naming the missing roles, or TicketMismatch naming
    the fields when there are both roles and no pair matches.
    """
    if not view.prefill or not view.decode:
        if view.aggregated:
            return Placement(None, view.aggregated[turn % len(view.aggregated)])
        missing = " and no ".join(role.value for role in view.missing_roles())
        raise NoInstances(f"model {model!r} has no {missing} worker now; start one or retry later")
    decodes = [d for d in view.decode if any(pairing_key(p) == pairing_key(d) for p in view.prefill)]
    if not decodes:
        why = differences(view.prefill[0], view.decode[0])
        raise TicketMismatch(f"no prefill worker of model {model!r} matches a decode worker: {why}")
    decode = decodes[turn % len(decodes)]
    prefills = [p for p in view.prefill if pairing_key(p) == pairing_key(decode)]
    prefills = [p for p in prefills if p.id != avoid] or prefills
    # Turns are counted among the decodes of one key: counted over all, they would skip prefills of the same key.
    peers = [d for d in decodes if pairing_key(d) == pairing_key(decode)]
    turn_in_key = turn // len(decodes) * len(peers) + peers.index(decode)
    return Placement(prefills[turn_in_key % len(prefills)], decode)


def pairing_key(instance: Instance) -> _Key:
    """What two instances must share to hand KV over."""
    return instance.engine, instance.strategy, instance.layout


def differences(a: Instance, b: Instance) -> str:
    """The pairing fields in which two instances differ, with both values, for people."""
    pairs = [("engine", a.engine, b.engine), ("strategy", a.strategy, b.strategy)]
    pairs += [(f"layout.{f}", getattr(a.layout, f), getattr(b.layout, f)) for f in KvLayout.__struct_fields__]
    return "; ".join(f"{name} is {x!r} at {a.role} and {y!r} at {b.role}" for name, x, y in pairs if x != y)
