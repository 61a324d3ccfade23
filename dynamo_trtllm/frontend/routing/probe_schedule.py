"""Choose the pairs of instances that are probed: all, or some of too many."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from dynamo_trtllm.frontend.routing.cluster_view import (
    Change,
    ModelView,
    PairGroup,
    excluding,
    position,
)
from dynamo_trtllm.frontend.routing.pairs import Pair, pairing_key
from dynamo_trtllm.protocol.messages import Instance, Role

MAX_PAIRS: Final = 1024  # limit of the pairs of a pairing key; see `pairs_of`
# How many instances of the other role each instance chooses for probes if there are more pairs.
PARTNERS: Final = 4


def pairs_of(view: ModelView, quarantined: Iterable[Pair] = ()) -> list[Pair]:
    """Return the pairs of a model to probe.

    They are all pairs whose settings match, and (None, id) of each instance that runs aggregated
    requests. An elastic instance has pairs in both directions, whatever its shares are, so that its
    role can change at once.

    If a pairing key has more than MAX_PAIRS pairs, they are a few pairs per instance, and the
    `quarantined` ones: if all pairs were probed, the probes would be the load of the deployment.
    The other pairs get requests without a probe of their own.
    """
    pairs: dict[Pair, None] | None = view.cache.get("pairs")
    if pairs is None:
        pairs = {}
        for instance in (*view.prefill, *view.decode, *view.aggregated):
            pairs.update(dict.fromkeys(pairs_with(view, instance)))
        view.cache["pairs"] = pairs
    others = [pair for pair in quarantined if pair not in pairs and view.has_pair(pair)]
    return [*pairs, *others]


def pairs_with(view: ModelView, instance: Instance) -> list[Pair]:
    """Return the pairs to probe of one instance of the view."""
    if instance.role is Role.AGGREGATED:
        return [(None, instance.id)]
    if instance.role is not Role.ELASTIC:
        return _pairs_in_role(view, instance, instance.role)
    # An elastic instance runs whole requests, too, and is no pair with itself.
    pairs: list[Pair] = [(None, instance.id)]
    for role in (Role.PREFILL, Role.DECODE):
        pairs += [pair for pair in _pairs_in_role(view, instance, role) if pair[0] != pair[1]]
    return pairs


def _pairs_in_role(view: ModelView, instance: Instance, role: Role) -> list[Pair]:
    """Return the pairs to probe of one instance as a prefill or decode instance."""
    peers, others = view.groups[view.keys[instance.id]].sides(role)
    chosen = _probe_partners(instance.id, peers, others)
    chosen_by = _probed_by(instance.id, peers, others)
    # Without duplicates, in this order.
    partner_ids = dict.fromkeys(partner.id for partner in (*chosen, *chosen_by))
    if role is Role.PREFILL:
        return [(instance.id, partner_id) for partner_id in partner_ids]
    return [(partner_id, instance.id) for partner_id in partner_ids]


def new_pairs(view: ModelView, change: Change) -> list[Pair]:
    """Return the pairs to probe that a change may have added to the view.

    The view may already have later changes, too.
    """
    instance = change.instance
    if change.is_added:
        is_present = instance.id in view.keys or instance in view.aggregated
        return pairs_with(view, instance) if is_present else []
    group = view.groups.get(pairing_key(instance), PairGroup())
    roles = [instance.role]
    if instance.role is Role.ELASTIC:
        roles = [Role.PREFILL, Role.DECODE]
    # The instances that had chosen the removed instance now choose another partner.
    pairs: list[Pair] = []
    for role in roles:
        peers, others = group.sides(role)
        for other in _probed_by(instance.id, peers, others):
            pairs += pairs_with(view, other)
    return pairs


def is_probed(view: ModelView, pair: Pair, quarantined: Collection[Pair]) -> bool:
    """Return True if `pairs_of` contains the pair."""
    prefill, decode = pair
    if prefill is None:
        # `excluding` returns the same tuple if the instance is not in it.
        is_aggregated = excluding(view.aggregated, (decode,)) is not view.aggregated
        return is_aggregated or decode in view.shares
    if not view.has_pair(pair):
        return False
    group = view.groups[view.keys[decode]]
    if len(group.prefill) * len(group.decode) <= MAX_PAIRS or pair in quarantined:
        return True
    chosen_by_decode = _probe_partners(decode, group.decode, group.prefill)
    if any(instance.id == prefill for instance in chosen_by_decode):
        return True
    chosen_by_prefill = _probe_partners(prefill, group.prefill, group.decode)
    return any(instance.id == decode for instance in chosen_by_prefill)


def _probe_partners(
    instance_id: int, peers: tuple[Instance, ...], others: tuple[Instance, ...]
) -> tuple[Instance, ...]:
    """Return the instances of the other role with which this one chooses to be probed.

    With more than MAX_PAIRS pairs, they are the PARTNERS instances whose ids come next. Ids are
    random, so this spreads the probes evenly, and an instance that joins or leaves changes a few
    pairs only.

    Args:
        instance_id: id of this instance.
        peers: the instances of its role and pairing key.
        others: the instances of the other role.
    """
    if len(others) * len(peers) <= MAX_PAIRS or len(others) <= PARTNERS:
        return others
    begin = position(others, instance_id)
    end = begin + PARTNERS
    # After the last instance comes the first one.
    num_from_start = max(0, end - len(others))
    return others[begin:end] + others[:num_from_start]


def _probed_by(
    instance_id: int, peers: tuple[Instance, ...], others: tuple[Instance, ...]
) -> tuple[Instance, ...]:
    """Return the instances of the other role that choose this one (see `_probe_partners`).

    If it has left `peers`, return those that chose it before.
    """
    if len(others) * len(peers) <= MAX_PAIRS or len(peers) <= PARTNERS:
        return others
    # Each of the others chooses the PARTNERS peers whose ids come next. So the instances that
    # choose this one have ids from the peer that comes PARTNERS places before it up to its own id.
    # The index may be negative: before the first peer comes the last one.
    peer_before = peers[position(peers, instance_id) - PARTNERS].id
    begin = position(others, peer_before)
    end = position(others, instance_id)
    if peer_before < instance_id:
        return others[begin:end]
    return others[begin:] + others[:end]
