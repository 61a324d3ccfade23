"""Hold the router's view of the cluster: instances by model, role and pairing key, and the pairs of
them to probe.

A pair is (prefill, decode), or (None, id) for an instance that runs aggregated requests.
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
    """Return the (field, value) pairs that must be equal in two instances for KV transfer between
    them.
    """
    layout = ((f"layout.{name}", getattr(instance.layout, name)) for name in EQUAL_LAYOUT)
    own = sorted(instance.kv_compat.items())
    return ("engine", instance.engine), ("strategy", instance.strategy), *layout, *own


def pairing_key(instance: Instance) -> str:
    """Return `pairing_fields` as an interned text, which each request compares for every
    instance.
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
        return (self.prefill, self.decode) if role is Role.PREFILL else (self.decode, self.prefill)

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
    # decode instances that have a partner
    paired: tuple[Instance, ...] = field(init=False, repr=False, compare=False)
    _reduced: dict[frozenset[int], ModelView] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    # of the readers
    cache: dict[Hashable, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Compute per change what requests read."""
        matching = {
            key: group for key, group in self.groups.items() if group.prefill and group.decode
        }
        if len(matching) == 1:
            (paired,) = (group.decode for group in matching.values())
        else:
            paired = (
                tuple(decode for decode in self.decode if self.keys[decode.id] in matching)
                if matching
                else ()
            )
        object.__setattr__(self, "paired", paired)

    def including(self, instance: Instance) -> ModelView:
        """Return the view with one more instance."""
        first = first_of_model((instance,) if self.first is None else (self.first, instance))
        if instance.role is Role.AGGREGATED:
            return _including(self, instance, first=first)
        key = pairing_key(instance)
        groups = {**self.groups, key: _including(self.groups.get(key, PairGroup()), instance)}
        return _including(
            self, instance, keys={**self.keys, instance.id: key}, groups=groups, first=first
        )

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
            keys, groups = dict(self.keys), dict(self.groups)
            for key in {key for id_ in ids if (key := keys.pop(id_, None)) is not None}:
                groups[key] = groups[key].excluding(ids)
                if not groups[key].prefill and not groups[key].decode:
                    del groups[key]
            prefill, decode, aggregated = (
                excluding(each, ids) for each in (self.prefill, self.decode, self.aggregated)
            )
            reduced = self._reduced[ids] = ModelView(
                prefill, decode, aggregated, keys, groups, self.first
            )
        return reduced

    @property
    def is_complete(self) -> bool:
        """True if a request can run: there is an aggregated worker, or a prefill and a decode
        worker that match.
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
        have = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return [role for role, instances in have.items() if not instances]


def first_of_model(instances: Iterable[Instance]) -> Instance | None:
    """Return the first decode or aggregated instance, or the first one if there is none; None
    without instances.
    """
    first = None
    for instance in instances:
        if instance.role is not Role.PREFILL:
            return instance
        first = first or instance
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
    # set at the next change, then replaced
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def subscribe(self) -> deque[Change]:
        """Return a queue that gets every change from now on, first the instances that are there.

        The caller empties it.

        Thus the cost of a change does not depend on the number of instances.
        """
        changes = deque(Change(instance, is_added=True) for instance in self.instances())
        self._subscribers.append(changes)
        return changes

    def add(self, instance: Instance) -> None:
        self._remove(instance.id)  # its role, model or layout may have changed
        self._instances[instance.id] = instance
        name = instance.card.name
        self._put(
            name,
            self._models.get(name, _NO_INSTANCES).including(instance),
            Change(instance, is_added=True),
        )
        self.notify_changed()

    def remove(self, instance_id: int) -> None:
        self._remove(instance_id)
        self.notify_changed()

    def _remove(self, instance_id: int) -> None:
        instance = self._instances.pop(instance_id, None)
        if instance is not None:
            name = instance.card.name
            view = self._models[name].excluding(frozenset((instance_id,)))
            if view.first is instance:
                members = (
                    member for member in self._instances.values() if member.card.name == name
                )
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
        return {
            name: card for name, view in self._models.items() if (card := view.card) is not None
        }

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
    at = position(others, added.id)
    changes[role] = (*others[:at], added, *others[at:])
    return replace(instances, **changes)


def excluding(instances: tuple[Instance, ...], ids: Iterable[int | None]) -> tuple[Instance, ...]:
    """Return the instances without those of `ids`.

    Slices are copied, because a look at each would take longer.
    """
    left: list[Instance] = []
    begin = 0
    for instance_id in sorted(each for each in ids if each is not None):
        at = position(instances, instance_id)
        if at < len(instances) and instances[at].id == instance_id:
            left += instances[begin:at]
            begin = at + 1
    return (*left, *instances[begin:]) if begin else instances


MAX_PAIRS: Final = 1024  # of a pairing key; see `pairs_of`
PARTNERS: Final = 4

Pair: TypeAlias = tuple[int | None, int]


def pairs_of(view: ModelView, quarantined: Iterable[Pair] = ()) -> list[Pair]:
    """Return the pairs of a model to probe, and (None, id) of instances that run aggregated
    requests.

    They are all pairs whose settings match. Of more than MAX_PAIRS of one pairing key, they are a
    few per instance, and those that are `quarantined`: with all of them, the probes would be the
    load of the deployment. The others get requests without a probe of their own.
    """
    pairs: dict[Pair, None] | None = view.cache.get("pairs")
    if pairs is None:
        every = (*view.prefill, *view.decode, *view.aggregated)
        pairs = view.cache["pairs"] = dict.fromkeys(
            pair for each in every for pair in pairs_with(view, each)
        )
    return [
        *pairs,
        *(pair for pair in quarantined if pair not in pairs and _is_pair_of(view, pair)),
    ]


def pairs_with(view: ModelView, instance: Instance) -> list[Pair]:
    """Return the pairs to probe of one instance of the view."""
    if instance.role is Role.AGGREGATED:
        return [(None, instance.id)]
    own, others = view.groups[view.keys[instance.id]].sides(instance.role)
    partners = (*_partners(instance.id, others, own), *_choosers(instance.id, own, others))
    ids = dict.fromkeys(each.id for each in partners)
    return [
        (instance.id, each) if instance.role is Role.PREFILL else (each, instance.id)
        for each in ids
    ]


def new_pairs(view: ModelView, change: Change) -> list[Pair]:
    """Return the pairs to probe that a change may have added to the view.

    Later changes may be in the view as well.
    """
    instance = change.instance
    if change.is_added:
        is_present = instance.id in view.keys or instance in view.aggregated
        return pairs_with(view, instance) if is_present else []
    group = view.groups.get(pairing_key(instance), PairGroup())
    others = _choosers(instance.id, *group.sides(instance.role))
    return [pair for other in others for pair in pairs_with(view, other)]


def is_probed(view: ModelView, pair: Pair, quarantined: Collection[Pair]) -> bool:
    """Return True if `pairs_of` contains the pair."""
    prefill, decode = pair
    if prefill is None:
        return excluding(view.aggregated, (decode,)) is not view.aggregated
    if not _is_pair_of(view, pair):
        return False
    group = view.groups[view.keys[decode]]
    return (
        len(group.prefill) * len(group.decode) <= MAX_PAIRS
        or any(each.id == prefill for each in _partners(decode, group.prefill, group.decode))
        or any(each.id == decode for each in _partners(prefill, group.decode, group.prefill))
        or pair in quarantined
    )


def _is_pair_of(view: ModelView, pair: Pair) -> bool:
    prefill, decode = pair
    return (
        prefill is not None and decode in view.keys and view.keys[decode] == view.keys.get(prefill)
    )


def _partners(
    instance_id: int, others: tuple[Instance, ...], peers: tuple[Instance, ...]
) -> tuple[Instance, ...]:
    """Return the instances of the other role with which this one chooses to be probed.

    Of too many pairs they are those whose ids follow its own. Ids are random, so this spreads the
    probes evenly, and an instance that joins or leaves changes a few pairs only.
    """
    if len(others) * len(peers) <= MAX_PAIRS or len(others) <= PARTNERS:
        return others
    begin = position(others, instance_id)
    return others[begin : begin + PARTNERS] + others[: max(0, begin + PARTNERS - len(others))]


def _choosers(
    instance_id: int, peers: tuple[Instance, ...], others: tuple[Instance, ...]
) -> tuple[Instance, ...]:
    """Return the instances of the other role that choose this one, or chose it before it left
    `peers`.
    """
    if len(others) * len(peers) <= MAX_PAIRS or len(peers) <= PARTNERS:
        return others
    before = peers[position(peers, instance_id) - PARTNERS].id
    begin, end = position(others, before), position(others, instance_id)
    return others[begin:end] if before < instance_id else others[begin:] + others[:end]


def format_pair(pair: Pair) -> str:
    """Format a pair for logs and errors."""
    prefill, decode = pair
    return f"instance {decode:x}" if prefill is None else f"pair {prefill:x} -> {decode:x}"


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
