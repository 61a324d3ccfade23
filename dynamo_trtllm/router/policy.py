"""Decides which instances serve a request. Pure: the same arguments give the same placement."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dynamo_trtllm.errors import NoInstances, TransferMismatch
from dynamo_trtllm.messages import Instance
from dynamo_trtllm.router.pair_breakers import Pair, PairBreakers
from dynamo_trtllm.router.view import ModelView, pairing_key


@dataclass(frozen=True, slots=True)
class WorkerSelection:
    """`prefill` is None when the decode instance does the whole request."""

    prefill: Instance | None
    decode: Instance


def select(
    view: ModelView,
    model: str,
    turn: int,
    book: PairBreakers,
    *,
    avoid: int | None = None,
    decode_fallback: bool = False,
) -> WorkerSelection:
    """Round robin per role. Prefill and decode are paired only when engine kind, strategy and KV layout are equal.

    `turn` counts the requests of this model; pairs that `book` has shut are left out; `avoid` is a prefill instance to
    leave out as long as there is another for the same decode instance. With `decode_fallback` a decode instance that
    can does the whole request while there is no prefill instance at all. Disaggregated pairs are preferred to
    aggregated instances, because a cluster that has pairs was built for them. Raises NoInstances naming the missing
    roles or why all pairs are shut, or TransferMismatch naming the fields when there are both roles and no pair
    matches.
    """
    if not view.prefill or not view.decode:
        return WorkerSelection(None, _whole(view, model, turn, book, decode_fallback=decode_fallback))
    keys = view.keys
    offered = {keys[p.id] for p in view.prefill}
    decodes = [d for d in view.decode if keys[d.id] in offered]
    if not decodes:
        why = differences(view.prefill[0], view.decode[0])
        raise TransferMismatch(f"no prefill worker of model {model!r} matches a decode worker: {why}")
    if book.has_shut:
        decodes = [d for d in decodes if any(not book.is_shut((p, d.id)) for p in _partners(view, d))]
        if not decodes:
            raise _all_shut(model, book, [(p, d.id) for d in view.decode for p in _partners(view, d)])
    if avoid is not None:  # a decode instance that works only with this prefill instance would use it again
        decodes = [
            d for d in decodes if any(p != avoid and not book.is_shut((p, d.id)) for p in _partners(view, d))
        ] or decodes
    decode = decodes[turn % len(decodes)]
    prefills = [p for p in view.prefill if keys[p.id] == keys[decode.id] and not book.is_shut((p.id, decode.id))]
    prefills = [p for p in prefills if p.id != avoid] or prefills
    # Turns are counted among the decodes of one key: counted over all, they would skip prefills of the same key.
    peers = [d for d in decodes if keys[d.id] == keys[decode.id]]
    turn_in_key = turn // len(decodes) * len(peers) + peers.index(decode)
    # One further per round: else two and two would only ever meet as two of the four pairs.
    skewed = turn_in_key + turn_in_key // math.lcm(len(peers), len(prefills))
    return WorkerSelection(prefills[skewed % len(prefills)], decode)


def _whole(view: ModelView, model: str, turn: int, book: PairBreakers, *, decode_fallback: bool) -> Instance:
    able = view.aggregated
    if not able and decode_fallback:
        able = tuple(instance for instance in view.decode if instance.can_aggregate)
    if not able:
        missing = " and no ".join(role.value for role in view.missing_roles())
        raise NoInstances(f"model {model!r} has no {missing} worker now; start one or retry later")
    instances = [instance for instance in able if not book.is_shut((None, instance.id))]
    if not instances:
        raise _all_shut(model, book, [(None, instance.id) for instance in able])
    return instances[turn % len(instances)]


def _partners(view: ModelView, decode: Instance) -> list[int]:
    return [p.id for p in view.prefill if view.keys[p.id] == view.keys[decode.id]]


def _all_shut(model: str, book: PairBreakers, pairs: list[Pair]) -> NoInstances:
    reasons = dict.fromkeys(book.record(pair).reason or "not tried yet" for pair in pairs)
    return NoInstances(f"every pair of model {model!r} is new or quarantined: {'; '.join(reasons)}; see /health")


def differences(a: Instance, b: Instance) -> str:
    """The pairing fields in which two instances differ, with both values, for people."""
    ours, theirs = dict(pairing_key(a)), dict(pairing_key(b))
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return "; ".join(f"{name} is {ours.get(name)!r} at {a.role} and {theirs.get(name)!r} at {b.role}" for name in names)
