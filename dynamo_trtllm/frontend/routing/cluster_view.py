"""Hold the router's view of the cluster: instances by model, role and pairing key."""

from __future__ import annotations

import asyncio
import bisect
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from dynamo_trtllm.frontend.routing.pairs import Pair, pairing_key
from dynamo_trtllm.protocol.messages import Instance, Role
from dynamo_trtllm.protocol.shares import Shares

_REDUCED_VIEWS = 16  # limit of the views without some instances that a view caches
_MAX_CACHED = 256  # limit of the entries of `ModelView.cache`
_SIDES = (Role.PREFILL, Role.DECODE)
_id = attrgetter("id")
_T = TypeVar("_T", bound="PairGroup | ModelView")


@dataclass(frozen=True, slots=True)
class PairGroup:
    """The instances with one pairing key, sorted by id.

    KV transfer is possible between all of them. An elastic instance is in both tuples.
    """

    prefill: tuple[Instance, ...] = ()
    decode: tuple[Instance, ...] = ()

    def sides(self, role: Role) -> tuple[tuple[Instance, ...], tuple[Instance, ...]]:
        """Return the instances of a role, and the instances of the other role."""
        if role is Role.PREFILL:
            return self.prefill, self.decode
        return self.decode, self.prefill

    def excluding(self, ids: Collection[int]) -> PairGroup:
        return PairGroup(excluding(self.prefill, ids), excluding(self.decode, ids))

    def sharing(self, shares: Mapping[int, Shares]) -> PairGroup:
        """Return the group without elastic instances in roles in which their share is 0."""
        idle_prefills = [id_ for id_, share in shares.items() if not share.prefill]
        idle_decodes = [id_ for id_, share in shares.items() if not share.decode]
        return PairGroup(
            excluding(self.prefill, idle_prefills), excluding(self.decode, idle_decodes)
        )


@dataclass(frozen=True, slots=True)
class ModelView:
    """The instances of one model, sorted by id so that all frontends count alike.

    An elastic instance is a prefill and a decode instance.

    A changed view shares the unchanged parts with the view before, so that a change costs
    microseconds with thousands of instances.
    """

    prefill: tuple[Instance, ...] = ()
    decode: tuple[Instance, ...] = ()
    aggregated: tuple[Instance, ...] = ()
    # Pairing keys, by id of a prefill or decode instance.
    keys: Mapping[int, str] = field(default_factory=dict)
    groups: Mapping[str, PairGroup] = field(default_factory=dict)  # the groups, by pairing key
    shares: Mapping[int, Shares] = field(default_factory=dict)  # those of elastic instances, by id
    # The decode instances that have a partner.
    paired: tuple[Instance, ...] = field(init=False, repr=False, compare=False)
    _reduced: dict[frozenset[int], ModelView] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    # Results that readers of this view have computed from it.
    cache: dict[Hashable, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Compute `paired` once per change, because each request reads it."""
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
        if instance.role is Role.AGGREGATED:
            return _including(self, instance)
        key = pairing_key(instance)
        keys = {**self.keys, instance.id: key}
        group = _including(self.groups.get(key, PairGroup()), instance)
        groups = {**self.groups, key: group}
        shares = self.shares
        if instance.role is Role.ELASTIC:
            shares = {**shares, instance.id: instance.shares}
        return _including(self, instance, keys=keys, groups=groups, shares=shares)

    def with_shares(self, shares: Mapping[int, Shares]) -> ModelView:
        """Return the view with other shares of its elastic instances."""
        return replace(self, shares=shares)

    def sharing(self) -> ModelView:
        """Return the view without elastic instances in roles in which their share is 0.

        If no request could run in this view, instances without a share fill the roles that have no
        instance. The result is cached.
        """
        if not self.shares:
            return self
        sharing: ModelView | None = self.cache.get("sharing")
        if sharing is None:
            groups = {key: group.sharing(self.shares) for key, group in self.groups.items()}
            can_run = any(group.prefill and group.decode for group in groups.values())
            if not can_run and not self.aggregated:
                groups = {
                    key: PairGroup(
                        group.prefill or self.groups[key].prefill,
                        group.decode or self.groups[key].decode,
                    )
                    for key, group in groups.items()
                }
            sharing = replace(
                self,
                prefill=_in_groups(self.prefill, [group.prefill for group in groups.values()]),
                decode=_in_groups(self.decode, [group.decode for group in groups.values()]),
                groups=groups,
            )
            self.cache["sharing"] = sharing
        return sharing

    def share(self, instance: Instance, role: Role) -> float:
        """Return the share that an instance has of the work of prefill or decode workers."""
        shares = self.shares.get(instance.id)
        if shares is None:
            return 1.0
        return shares.prefill if role is Role.PREFILL else shares.decode

    def cumulative_shares(self, instances: tuple[Instance, ...], role: Role) -> Sequence[float]:
        """Return the sums of the shares of the first one, two, … of some instances.

        If all shares are 0, each counts as 1. The result is cached for tuples of this view.
        """
        # The cache refers to the tuple, so that the tuple lives on and no other one gets its id.
        key = "cumulative_shares", role, id(instances)
        cached: tuple[tuple[Instance, ...], list[float]] | None = self.cache.get(key)
        if cached is None:
            sums = list(accumulate(self.share(instance, role) for instance in instances))
            if not sums[-1]:
                sums = [float(count) for count in range(1, len(instances) + 1)]
            if len(self.cache) > _MAX_CACHED:
                return sums
            cached = instances, sums
            self.cache[key] = cached
        return cached[1]

    def has_pair(self, pair: Pair) -> bool:
        """Return True if the model has both instances, and their pairing keys are equal."""
        prefill, decode = pair
        if prefill is None or decode not in self.keys:
            return False
        return self.keys[decode] == self.keys.get(prefill)

    def first_pair_of(self, pairs: Iterable[Pair]) -> Pair:
        """Return the first of `pairs` that the model has; (None, 0) if it has none."""
        return next((pair for pair in pairs if self.has_pair(pair)), (None, 0))

    def excluding(self, ids: frozenset[int]) -> ModelView:
        """Return the view without these instances.

        Results are cached, because many requests exclude the same instances.
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

    def without_decodes(self, ids: frozenset[int]) -> ModelView:
        """Return the view in which these instances are no decode instances.

        Elastic ones stay prefill instances. The result is cached.
        """
        if not ids:
            return self
        key = "without_decodes", ids
        reduced: ModelView | None = self.cache.get(key)
        if reduced is None:
            reduced = replace(
                self,
                decode=excluding(self.decode, ids),
                groups={
                    name: PairGroup(group.prefill, excluding(group.decode, ids))
                    for name, group in self.groups.items()
                },
            )
            if len(self.cache) < _MAX_CACHED:
                self.cache[key] = reduced
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
            shares={id_: share for id_, share in self.shares.items() if id_ not in ids},
        )

    @property
    def is_complete(self) -> bool:
        """True if a request can run.

        There is an aggregated worker, or a prefill and a decode worker that match.
        """
        return bool(self.aggregated or self.paired)

    @property
    def is_empty(self) -> bool:
        """True if the model has no instance."""
        return not (self.prefill or self.decode or self.aggregated)

    def missing_roles(self) -> list[Role]:
        """Return the roles that lack an instance; empty if requests of this model can run."""
        if self.aggregated or (self.prefill and self.decode):
            return []
        instances_of = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return [role for role, instances in instances_of.items() if not instances]


_NO_INSTANCES = ModelView()


class Change(NamedTuple):
    """An instance that was added or removed. A changed record is a removal and an addition."""

    instance: Instance
    is_added: bool


@dataclass(slots=True)
class ClusterView:
    """All live instances. Only the frontend's watch writes it; readers use `model()`.

    A change costs as much as a copy of the references to the instances of its model.
    """

    _instances: dict[int, Instance] = field(default_factory=dict)
    _models: dict[str, ModelView] = field(default_factory=dict)
    _subscribers: list[deque[Change]] = field(default_factory=list)
    _shares: Mapping[int, Shares] = field(default_factory=dict)  # those of the share table
    # The event is set at the next change, and then replaced by a new event.
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def subscribe(self) -> deque[Change]:
        """Return a queue that gets every change from now on. It begins with all instances.

        The caller empties the queue. So it need not look at all instances after each change.
        """
        changes = deque(Change(instance, is_added=True) for instance in self.instances())
        self._subscribers.append(changes)
        return changes

    def add(self, instance: Instance) -> None:
        # The role, the model or the layout of the instance may have changed.
        self._remove(instance.id)
        self._instances[instance.id] = instance
        name = instance.card.name
        view = self._with_shares(self.model(name).including(instance))
        self._put(name, view, Change(instance, is_added=True))
        self.notify_changed()

    def set_shares(self, shares: Mapping[int, Shares]) -> None:
        """Use these shares, by id of elastic instances.

        Elastic instances without an entry have the shares of their own record.
        """
        self._shares = shares
        for name, view in self._models.items():
            if view.shares:
                self._models[name] = self._with_shares(view)
        self.notify_changed()

    def _with_shares(self, view: ModelView) -> ModelView:
        """Return a view with the shares of its elastic instances as they are now."""
        if not view.shares:
            return view
        shares: dict[int, Shares] = {}
        for instance_id in view.shares:
            registered = self._instances[instance_id].shares
            shares[instance_id] = self._shares.get(instance_id, registered)
        return view if shares == view.shares else view.with_shares(shares)

    def remove(self, instance_id: int) -> None:
        self._remove(instance_id)
        self.notify_changed()

    def _remove(self, instance_id: int) -> None:
        instance = self._instances.pop(instance_id, None)
        if instance is None:
            return
        name = instance.card.name
        view = self._models[name].excluding(frozenset((instance_id,)))
        self._put(name, view, Change(instance, is_added=False))

    def _put(self, name: str, view: ModelView, change: Change) -> None:
        if view.is_empty:
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

    def models(self) -> Set[str]:
        """Return the names of the models that have an instance."""
        return self._models.keys()

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
    """Return a group or view with one more instance of its role, and with the other changes.

    An elastic instance has two roles.
    """
    roles = _SIDES if added.role is Role.ELASTIC else (added.role,)
    for role in roles:
        name = role.name.lower()  # the field of these instances
        others: tuple[Instance, ...] = getattr(instances, name)
        index = position(others, added.id)
        changes[name] = (*others[:index], added, *others[index:])
    return replace(instances, **changes)


def _in_groups(
    instances: tuple[Instance, ...], groups: Sequence[tuple[Instance, ...]]
) -> tuple[Instance, ...]:
    """Return the instances that are in one of these groups."""
    if len(groups) == 1:
        return groups[0]
    ids = {instance.id for group in groups for instance in group}
    return tuple(instance for instance in instances if instance.id in ids)


def excluding(instances: tuple[Instance, ...], ids: Iterable[int | None]) -> tuple[Instance, ...]:
    """Return the instances whose id is not in `ids`; the same tuple if none has to be left out.

    The slices between excluded instances are copied, because a test of each instance would take
    longer.
    """
    remaining: list[Instance] = []
    # The index of the first instance that is not copied yet.
    begin = 0
    known_ids = [instance_id for instance_id in ids if instance_id is not None]
    for instance_id in sorted(known_ids):
        index = position(instances, instance_id)
        if index < len(instances) and instances[index].id == instance_id:
            remaining += instances[begin:index]
            begin = index + 1
    is_unchanged = begin == 0
    if is_unchanged:
        return instances
    return (*remaining, *instances[begin:])
