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
    round_robin_index: int,
    breakers: PairBreakers,
    *,
    avoid: int | None = None,
    decode_fallback: bool = False,
) -> WorkerSelection:
    """Select the workers of one request, round robin per role.

    Prefill and decode are paired only when engine, strategy and KV layout are equal and the pair's breaker is closed.
    Pairs are preferred to aggregated instances, because a cluster that has pairs was built for them.

    Args:
        round_robin_index: number of requests of this model so far.
        avoid: prefill instance to use only when no other can work with the same decode instance.
        decode_fallback: let a decode instance that can serve aggregated requests do so while there is no prefill
            instance.

    Raises:
        NoInstances: a role has no instance, or the breakers of all pairs are open; the message says which.
        TransferMismatch: both roles have instances and none can be paired; names the fields that differ.
    """
    if not view.prefill or not view.decode:
        return WorkerSelection(None, _whole(view, model, round_robin_index, breakers, decode_fallback=decode_fallback))
    keys = view.keys
    available = {keys[p.id] for p in view.prefill}
    decodes = [d for d in view.decode if keys[d.id] in available]
    if not decodes:
        why = differences(view.prefill[0], view.decode[0])
        raise TransferMismatch(f"no prefill worker of model {model!r} matches a decode worker: {why}")
    if breakers.any_open:
        decodes = [d for d in decodes if any(not breakers.is_open((p, d.id)) for p in _partners(view, d))]
        if not decodes:
            raise _all_open(model, breakers, [(p, d.id) for d in view.decode for p in _partners(view, d)])
    if avoid is not None:  # a decode instance that works only with this prefill instance would use it again
        decodes = [
            d for d in decodes if any(p != avoid and not breakers.is_open((p, d.id)) for p in _partners(view, d))
        ] or decodes
    decode = decodes[round_robin_index % len(decodes)]
    prefills = [p for p in view.prefill if keys[p.id] == keys[decode.id] and not breakers.is_open((p.id, decode.id))]
    prefills = [p for p in prefills if p.id != avoid] or prefills
    # Turns are counted among the decodes of one key: counted over all, they would skip prefills of the same key.
    peers = [d for d in decodes if keys[d.id] == keys[decode.id]]
    index_in_key = round_robin_index // len(decodes) * len(peers) + peers.index(decode)
    # One further per round: else two and two would only ever meet as two of the four pairs.
    mismatched = index_in_key + index_in_key // math.lcm(len(peers), len(prefills))
    return WorkerSelection(prefills[mismatched % len(prefills)], decode)


def _whole(
    view: ModelView, model: str, round_robin_index: int, breakers: PairBreakers, *, decode_fallback: bool
) -> Instance:
    able = view.aggregated
    if not able and decode_fallback:
        able = tuple(instance for instance in view.decode if instance.can_aggregate)
    if not able:
        missing = " and no ".join(role.value for role in view.missing_roles())
        raise NoInstances(f"model {model!r} has no {missing} worker now; start one or retry later")
    instances = [instance for instance in able if not breakers.is_open((None, instance.id))]
    if not instances:
        raise _all_open(model, breakers, [(None, instance.id) for instance in able])
    return instances[round_robin_index % len(instances)]


def _partners(view: ModelView, decode: Instance) -> list[int]:
    return [p.id for p in view.prefill if view.keys[p.id] == view.keys[decode.id]]


def _all_open(model: str, breakers: PairBreakers, pairs: list[Pair]) -> NoInstances:
    reasons = dict.fromkeys(breakers.status(pair).reason or "not tried yet" for pair in pairs)
    return NoInstances(f"every pair of model {model!r} is new or quarantined: {'; '.join(reasons)}; see /health")


def differences(a: Instance, b: Instance) -> str:
    """The pairing fields in which two instances differ, with both values, for people."""
    ours, theirs = dict(pairing_key(a)), dict(pairing_key(b))
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return "; ".join(f"{name} is {ours.get(name)!r} at {a.role} and {theirs.get(name)!r} at {b.role}" for name in names)
