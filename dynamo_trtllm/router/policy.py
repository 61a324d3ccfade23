"""Select the instances of a request. Pure: the same arguments give the same selection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_trtllm.errors import NoInstances, TransferMismatch, UnsupportedParameter
from dynamo_trtllm.messages import GenerateRequest, Instance, Role
from dynamo_trtllm.router.view import ModelView, Pair, PairBreakers, pairing_fields


@dataclass(frozen=True, slots=True)
class WorkerSelection:
    """The instances of a request. `prefill` is None if `decode` runs the aggregated request."""

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

    Prefill and decode are paired only if engine, strategy and KV layout are equal and the pair's breaker is closed.
    Pairs are preferred to aggregated instances, because a deployment with pairs was built for them.

    Args:
        round_robin_index: number of requests of this model so far.
        avoid: prefill instance to use only if no other matches the decode instance.
        decode_fallback: without a prefill instance, let a decode instance that can run aggregated requests do so.

    Raises:
        NoInstances: a role has no instance, or the breakers of all pairs are open; the message says which.
        TransferMismatch: both roles have instances, but none match; the message names the fields that differ.
    """
    if not view.prefill or not view.decode:
        return WorkerSelection(
            None, _select_aggregated(view, model, round_robin_index, breakers, decode_fallback=decode_fallback)
        )
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
    # Requests are counted per key: an index over the decodes of all keys would skip prefills of this key.
    peers = [d for d in decodes if keys[d.id] == keys[decode.id]]
    index_in_key = round_robin_index // len(decodes) * len(peers) + peers.index(decode)
    # After each full cycle of decodes and prefills, shift by one: otherwise two and two would use two of four pairs.
    shifted = index_in_key + index_in_key // math.lcm(len(peers), len(prefills))
    return WorkerSelection(prefills[shifted % len(prefills)], decode)


def incapable(view: ModelView, request: GenerateRequest) -> frozenset[int]:
    """Return the instances that can't run this request, because they would ignore when or where it wants to run.

    Raises:
        UnsupportedParameter: the other instances are not enough to run it; `field` is the client's name.
    """
    if not request.priority and request.dp_rank is None and request.prefill_dp_rank is None:
        return frozenset()  # nearly all requests
    lacking: dict[int, str] = {}  # the field that an instance does not support
    for instance in (*view.prefill, *view.decode, *view.aggregated):
        for field, feature in _needs(request, instance.role).items():
            if feature not in instance.supported_features:
                lacking[instance.id] = field
    ids = frozenset(lacking)
    if view.excluding(ids).missing_roles() and not view.missing_roles():
        field = next(iter(lacking.values()))
        raise UnsupportedParameter(
            f"{field} is not supported by the workers of {request.model}, as they are configured now; leave it out",
            field=field,
        )
    return ids


def _needs(request: GenerateRequest, role: Role) -> dict[str, str]:
    """Return the features that a worker of this role needs, by the field that needs them."""
    needs = {"priority": "priority"} if request.priority else {}
    if role is not Role.PREFILL and request.dp_rank is not None:
        needs["nvext.dp_rank"] = "dp_rank"
    if role is not Role.DECODE and request.prefill_dp_rank is not None:
        needs["nvext.prefill_dp_rank"] = "dp_rank" if role is Role.PREFILL else "separate prefill workers"
    return needs


def _select_aggregated(
    view: ModelView, model: str, round_robin_index: int, breakers: PairBreakers, *, decode_fallback: bool
) -> Instance:
    candidates = view.aggregated
    if not candidates and decode_fallback:
        candidates = tuple(instance for instance in view.decode if instance.can_aggregate)
    if not candidates:
        missing = " and no ".join(role.value for role in view.missing_roles())
        raise NoInstances(f"model {model!r} has no {missing} worker now; start one or retry later")
    instances = [instance for instance in candidates if not breakers.is_open((None, instance.id))]
    if not instances:
        raise _all_open(model, breakers, [(None, instance.id) for instance in candidates])
    return instances[round_robin_index % len(instances)]


def _partners(view: ModelView, decode: Instance) -> Sequence[int]:
    return view.prefill_ids.get(view.keys[decode.id], ())


def _all_open(model: str, breakers: PairBreakers, pairs: list[Pair]) -> NoInstances:
    reasons = dict.fromkeys(breakers.status(pair).reason or "not probed yet" for pair in pairs)
    return NoInstances(
        f"every pair (or aggregated worker) of model {model!r} is new or quarantined: {'; '.join(reasons)}; see /health"
    )


def differences(a: Instance, b: Instance) -> str:
    """Return the fields in which two instances must be equal but differ, with both values, as text for people."""
    ours, theirs = dict(pairing_fields(a)), dict(pairing_fields(b))
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return "; ".join(f"{name} is {ours.get(name)!r} at {a.role} and {theirs.get(name)!r} at {b.role}" for name in names)
