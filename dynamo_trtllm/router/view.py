"""Hold the router's view of the cluster: instances by model, role and pairing key.

It also says which pairs of them are probed. A pair is (prefill, decode), or (None, id) for an
instance that runs aggregated requests.
"""

from __future__ import annotations

import asyncio
import bisect
import math
import sys
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from dynamo_trtllm.kv_transfer.base import EQUAL_LAYOUT
from dynamo_trtllm.messages import Instance, ModelDeploymentCard, Role

_REDUCED_VIEWS = 16  # cached per view
_id = attrgetter("id")
_T = TypeVar("_T", bound="PairGroup | ModelView")


def pairing_fields(instance: Instance) -> tuple[tuple[str, object], ...]:
    """Return the (field, value) pairs that must be equal in two instances for KV transfer."""
    fields: list[tuple[str, object]] = [
        ("engine", instance.engine),
        ("strategy", instance.strategy),
    ]
    fields += [(f"layout.{name}", getattr(instance.layout, name)) for name in EQUAL_LAYOUT]
    fields += sorted(instance.kv_compat.items())
    return tuple(fields)


def pairing_key(instance: Instance) -> str:
    """Return `pairing_fields` as a text.

    It is interned, because each request compares it for every instance.
    """
    return sys.intern(repr(pairing_fields(instance)))


@dataclass(frozen=True, slots=True)
class PairGroup:
    """The instances with one pairing key, sorted by id.

    KV transfer is possible between all of them.
    """

    prefill: tuple[Instance, ...] = ()
    decode: tuple[Instance, ...] = ()

    def sides(self, role: Role) -> tuple[tuple[Instance, ...], tuple[Instance, ...]]:
        """Return the instances of a role, and those of the other one."""
        if role is Role.PREFILL:
            return self.prefill, self.decode
        return self.decode, self.prefill

    def excluding(self, ids: Collection[int]) -> PairGroup:
        return PairGroup(excluding(self.prefill, ids), excluding(self.decode, ids))


@dataclass(frozen=True, slots=True)
class ModelView:
    """The instances of one model, sorted by id so that all frontends count alike.

    A changed view shares what did not change, so that a change costs microseconds with thousands of
    instances.
    """

    prefill: tuple[Instance, ...] = ()
    decode: tuple[Instance, ...] = ()
    aggregated: tuple[Instance, ...] = ()
    keys: Mapping[int, str] = field(default_factory=dict)  # by id of a prefill or decode instance
    groups: Mapping[str, PairGroup] = field(default_factory=dict)  # by pairing key
    # The instance whose card is in use. This is a decode or aggregated instance if there is one,
    # because its context length limits prompt and output.
    first: Instance | None = field(default=None, repr=False, compare=False)
    # The decode instances that have a partner.
    paired: tuple[Instance, ...] = field(init=False, repr=False, compare=False)
    _reduced: dict[frozenset[int], ModelView] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    # What readers compute from this view.
    cache: dict[Hashable, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Compute per change what requests read."""
        matching = {
            key: group for key, group in self.groups.items() if group.prefill and group.decode
        }
        paired: tuple[Instance, ...] = ()
        if len(matching) == 1:
            # Usually there is one pairing key, whose instances need no copy.
            (group,) = matching.values()
            paired = group.decode
        elif matching:
            paired = tuple(decode for decode in self.decode if self.keys[decode.id] in matching)
        object.__setattr__(self, "paired", paired)

    def including(self, instance: Instance) -> ModelView:
        """Return the view with one more instance."""
        members = (instance,) if self.first is None else (self.first, instance)
        first = first_of_model(members)
        if instance.role is Role.AGGREGATED:
            return _including(self, instance, first=first)
        key = pairing_key(instance)
        keys = {**self.keys, instance.id: key}
        group = _including(self.groups.get(key, PairGroup()), instance)
        groups = {**self.groups, key: group}
        return _including(self, instance, keys=keys, groups=groups, first=first)

    def first_of(self, pairs: Iterable[Pair]) -> Pair:
        """Return the first of `pairs` that the model has; (None, 0) if it has none."""
        return next((pair for pair in pairs if _is_pair_of(self, pair)), (None, 0))

    def excluding(self, ids: frozenset[int]) -> ModelView:
        """Return the view without these instances.

        Results are cached, because many requests exclude the same ones.
        """
        if not ids:
            return self
        reduced = self._reduced.get(ids)
        if reduced is None:
            if len(self._reduced) >= _REDUCED_VIEWS:
                self._reduced.clear()
            reduced = self._without(ids)
            self._reduced[ids] = reduced
        return reduced

    def _without(self, ids: frozenset[int]) -> ModelView:
        keys = dict(self.keys)
        changed_keys: set[str] = set()
        for instance_id in ids:
            key = keys.pop(instance_id, None)
            if key is not None:
                changed_keys.add(key)
        groups = dict(self.groups)
        for key in changed_keys:
            group = groups[key].excluding(ids)
            if group.prefill or group.decode:
                groups[key] = group
            else:
                del groups[key]
        return ModelView(
            prefill=excluding(self.prefill, ids),
            decode=excluding(self.decode, ids),
            aggregated=excluding(self.aggregated, ids),
            keys=keys,
            groups=groups,
            first=self.first,
        )

    @property
    def is_complete(self) -> bool:
        """True if a request can run.

        There is an aggregated worker, or a prefill and a decode worker that match.
        """
        return bool(self.aggregated or self.paired)

    @property
    def card(self) -> ModelDeploymentCard | None:
        """The card in use; None if there is no instance."""
        return None if self.first is None else self.first.card

    def missing_roles(self) -> list[Role]:
        """Return the roles that lack an instance; empty if requests of this model can run."""
        if self.aggregated or (self.prefill and self.decode):
            return []
        instances_of = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return [role for role, instances in instances_of.items() if not instances]


def first_of_model(instances: Iterable[Instance]) -> Instance | None:
    """Return the first decode or aggregated instance, or the first one if there is none.

    None: there are no instances.
    """
    first = None
    for instance in instances:
        if instance.role is not Role.PREFILL:
            return instance
        if first is None:
            first = instance
    return first


_NO_INSTANCES = ModelView()


class Change(NamedTuple):
    """An instance that was added or removed. A changed record is a removal and an addition."""

    instance: Instance
    is_added: bool


@dataclass(slots=True)
class ClusterView:
    """All live instances. Only the frontend's watch writes it; readers use `model()`.

    A change costs what copying references to the instances of its model costs.
    """

    _instances: dict[int, Instance] = field(default_factory=dict)
    _models: dict[str, ModelView] = field(default_factory=dict)
    _subscribers: list[deque[Change]] = field(default_factory=list)
    # It is set at the next change, and then replaced.
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def subscribe(self) -> deque[Change]:
        """Return a queue that gets every change from now on, first the instances that are there.

        The caller empties it. Thus the cost of a change does not depend on the number of instances.
        """
        changes = deque(Change(instance, is_added=True) for instance in self.instances())
        self._subscribers.append(changes)
        return changes

    def add(self, instance: Instance) -> None:
        # Its role, model or layout may have changed.
        self._remove(instance.id)
        self._instances[instance.id] = instance
        name = instance.card.name
        view = self.model(name).including(instance)
        self._put(name, view, Change(instance, is_added=True))
        self.notify_changed()

    def remove(self, instance_id: int) -> None:
        self._remove(instance_id)
        self.notify_changed()

    def _remove(self, instance_id: int) -> None:
        instance = self._instances.pop(instance_id, None)
        if instance is None:
            return
        name = instance.card.name
        view = self._models[name].excluding(frozenset((instance_id,)))
        if view.first is instance:
            members = (member for member in self._instances.values() if member.card.name == name)
            view = replace(view, first=first_of_model(members))
        self._put(name, view, Change(instance, is_added=False))

    def _put(self, name: str, view: ModelView, change: Change) -> None:
        if view.card is None:
            del self._models[name]
        else:
            self._models[name] = view
        for changes in self._subscribers:
            changes.append(change)

    def notify_changed(self) -> None:
        """Wake the tasks that wait for a change.

        Called also if only breakers changed, which changes selections.
        """
        self.changed.set()
        self.changed = asyncio.Event()

    def model(self, name: str) -> ModelView:
        return self._models.get(name, _NO_INSTANCES)

    def models(self) -> Mapping[str, ModelDeploymentCard]:
        """Return the card in use by model name, for every model that has an instance."""
        cards: dict[str, ModelDeploymentCard] = {}
        for name, view in self._models.items():
            card = view.card
            if card is not None:
                cards[name] = card
        return cards

    def instance(self, instance_id: int) -> Instance | None:
        return self._instances.get(instance_id)

    def ids(self) -> Set[int]:
        return self._instances.keys()

    def instances(self) -> list[Instance]:
        """Return all instances, sorted by id."""
        return sorted(self._instances.values(), key=_id)


def position(instances: tuple[Instance, ...], instance_id: int) -> int:
    """Return the index of the first instance whose id is not lower than `instance_id`."""
    return bisect.bisect_left(instances, instance_id, key=_id)


def _including(instances: _T, added: Instance, **changes: Any) -> _T:
    """Return a group or view with one more instance of its role, and with the other changes."""
    role = added.role.name.lower()  # the field of these instances
    others: tuple[Instance, ...] = getattr(instances, role)
    index = position(others, added.id)
    changes[role] = (*others[:index], added, *others[index:])
    return replace(instances, **changes)


def excluding(instances: tuple[Instance, ...], ids: Iterable[int | None]) -> tuple[Instance, ...]:
    """Return the instances without those of `ids`.

    Slices are copied, because a look at each would take longer.
    """
    remaining: list[Instance] = []
    begin = 0  # of the instances that are not copied yet
    for instance_id in sorted(instance_id for instance_id in ids if instance_id is not None):
        index = position(instances, instance_id)
        if index < len(instances) and instances[index].id == instance_id:
            remaining += instances[begin:index]
            begin = index + 1
    if begin == 0:
        return instances
    return (*remaining, *instances[begin:])


MAX_PAIRS: Final = 1024  # of a pairing key; see `pairs_of`
PARTNERS: Final = 4

Pair: TypeAlias = tuple[int | None, int]


def pairs_of(view: ModelView, quarantined: Iterable[Pair] = ()) -> list[Pair]:
    """Return the pairs of a model to probe.

    They are all pairs whose settings match, and (None, id) of each instance that runs aggregated
    requests. Of more than MAX_PAIRS of one pairing key, they are a few per instance, and those that
    are `quarantined`: with all of them, the probes would be the load of the deployment. The others
    get requests without a probe of their own.
    """
    pairs: dict[Pair, None] | None = view.cache.get("pairs")
    if pairs is None:
        pairs = {}
        for instance in (*view.prefill, *view.decode, *view.aggregated):
            pairs.update(dict.fromkeys(pairs_with(view, instance)))
        view.cache["pairs"] = pairs
    others = [pair for pair in quarantined if pair not in pairs and _is_pair_of(view, pair)]
    return [*pairs, *others]


def pairs_with(view: ModelView, instance: Instance) -> list[Pair]:
    """Return the pairs to probe of one instance of the view."""
    if instance.role is Role.AGGREGATED:
        return [(None, instance.id)]
    peers, others = view.groups[view.keys[instance.id]].sides(instance.role)
    chosen = _probe_partners(instance.id, peers, others)
    chosen_by = _probed_by(instance.id, peers, others)
    # Without duplicates, in this order.
    partner_ids = dict.fromkeys(partner.id for partner in (*chosen, *chosen_by))
    if instance.role is Role.PREFILL:
        return [(instance.id, partner_id) for partner_id in partner_ids]
    return [(partner_id, instance.id) for partner_id in partner_ids]


def new_pairs(view: ModelView, change: Change) -> list[Pair]:
    """Return the pairs to probe that a change may have added to the view.

    Later changes may be in the view as well.
    """
    instance = change.instance
    if change.is_added:
        is_present = instance.id in view.keys or instance in view.aggregated
        return pairs_with(view, instance) if is_present else []
    group = view.groups.get(pairing_key(instance), PairGroup())
    peers, others = group.sides(instance.role)
    # The instances that chose the removed one now choose another one.
    pairs: list[Pair] = []
    for other in _probed_by(instance.id, peers, others):
        pairs += pairs_with(view, other)
    return pairs


def is_probed(view: ModelView, pair: Pair, quarantined: Collection[Pair]) -> bool:
    """Return True if `pairs_of` contains the pair."""
    prefill, decode = pair
    if prefill is None:
        return excluding(view.aggregated, (decode,)) is not view.aggregated
    if not _is_pair_of(view, pair):
        return False
    group = view.groups[view.keys[decode]]
    if len(group.prefill) * len(group.decode) <= MAX_PAIRS or pair in quarantined:
        return True
    chosen_by_decode = _probe_partners(decode, group.decode, group.prefill)
    if any(instance.id == prefill for instance in chosen_by_decode):
        return True
    chosen_by_prefill = _probe_partners(prefill, group.prefill, group.decode)
    return any(instance.id == decode for instance in chosen_by_prefill)


def _is_pair_of(view: ModelView, pair: Pair) -> bool:
    """Return True if the view has both instances, and their pairing keys are equal."""
    prefill, decode = pair
    if prefill is None or decode not in view.keys:
        return False
    return view.keys[decode] == view.keys.get(prefill)


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
        others: those of the other role.
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
    # An instance chooses PARTNERS of these peers, so those that choose this one follow the peer
    # that comes PARTNERS before it. The index may be negative: after the last comes the first one.
    peer_before = peers[position(peers, instance_id) - PARTNERS].id
    begin = position(others, peer_before)
    end = position(others, instance_id)
    if peer_before < instance_id:
        return others[begin:end]
    return others[begin:] + others[:end]


def format_pair(pair: Pair) -> str:
    """Format a pair for logs and errors."""
    prefill, decode = pair
    if prefill is None:
        return f"instance {decode:x}"
    return f"pair {prefill:x} -> {decode:x}"


COOLDOWN_S = 5.0


class Cooldown:
    """The instances that selection avoids for COOLDOWN_S seconds, if there are others.

    `ids` is read per request. It returns the same set object until an instance is added or removed.
    """

    def __init__(self) -> None:
        self._until: dict[int, float] = {}
        self._ids: frozenset[int] = frozenset()
        self._next_until = math.inf  # when the next instance is tried again

    def start(self, instance_id: int, now: float) -> None:
        """Avoid an instance from now on. `now` is in seconds of a monotonic clock."""
        self._until[instance_id] = now + COOLDOWN_S
        self._changed()

    def forget(self, instance_id: int) -> None:
        """Stop avoiding an instance, because it worked."""
        if self._until.pop(instance_id, None) is not None:
            self._changed()

    def ids(self, now: float) -> frozenset[int]:
        if self._next_until <= now:
            self._until = {
                instance_id: until for instance_id, until in self._until.items() if until > now
            }
            self._changed()
        return self._ids

    def _changed(self) -> None:
        self._next_until = min(self._until.values(), default=math.inf)
        if self._ids != self._until.keys():
            self._ids = frozenset(self._until)
