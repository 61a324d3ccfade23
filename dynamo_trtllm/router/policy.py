"""Hold the view of the cluster that discovery reports, and select the instances of a request. The selection is pure."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from dynamo_trtllm.errors import NoInstances, TransferMismatch
from dynamo_trtllm.kv_transfer.params import EQUAL_LAYOUT
from dynamo_trtllm.messages import Instance, ModelDeploymentCard, Role
from dynamo_trtllm.router.pair_breakers import Pair, PairBreakers

_REDUCED_VIEWS = 16  # cached per view

PairingKey: TypeAlias = tuple[tuple[str, object], ...]


def pairing_key(instance: Instance) -> PairingKey:
    """Return the (field, value) pairs that must be equal in two instances for KV transfer between them."""
    layout = ((f"layout.{name}", getattr(instance.layout, name)) for name in EQUAL_LAYOUT)
    own = sorted(instance.kv_compat.items())
    return ("engine", instance.engine), ("strategy", instance.strategy), *layout, *own


@dataclass(frozen=True, slots=True)
class ModelView:
    """The instances of one model, sorted by id so that all frontends count alike."""

    prefill: tuple[Instance, ...] = ()
    decode: tuple[Instance, ...] = ()
    aggregated: tuple[Instance, ...] = ()
    keys: Mapping[int, PairingKey] = field(init=False)  # by instance id; computed per change, read per request
    _reduced: dict[frozenset[int], ModelView] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        keys = {instance.id: pairing_key(instance) for instance in (*self.prefill, *self.decode)}
        object.__setattr__(self, "keys", keys)

    def excluding(self, ids: frozenset[int]) -> ModelView:
        """Return the view without these instances. Results are cached, because many requests exclude the same ones."""
        if not ids:
            return self
        reduced = self._reduced.get(ids)
        if reduced is None:
            groups = (self.prefill, self.decode, self.aggregated)
            if len(self._reduced) >= _REDUCED_VIEWS:
                self._reduced.clear()
            reduced = self._reduced[ids] = ModelView(*(tuple(i for i in each if i.id not in ids) for each in groups))
        return reduced

    @property
    def is_complete(self) -> bool:
        """True if a request can run: there is an aggregated worker, or a prefill and a decode worker that match.

        The time is linear in the number of instances, not of pairs.
        """
        keys = [{self.keys[instance.id] for instance in role} for role in (self.prefill, self.decode)]
        return bool(self.aggregated) or not keys[0].isdisjoint(keys[1])

    def missing_roles(self) -> list[Role]:
        """Return the roles that lack an instance; empty if requests of this model can run."""
        if self.aggregated or (self.prefill and self.decode):
            return []
        have = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return [role for role, instances in have.items() if not instances]


_NO_INSTANCES = ModelView()


@dataclass(slots=True)
class ClusterView:
    """All live instances. Only the frontend's watch writes it; readers use `model()`."""

    _instances: dict[int, Instance] = field(default_factory=dict)
    _models: dict[str, ModelView] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # set at the next change, then replaced

    def add(self, instance: Instance) -> None:
        self._instances[instance.id] = instance
        self._rebuild()

    def remove(self, instance_id: int) -> None:
        self._instances.pop(instance_id, None)
        self._rebuild()

    def notify_changed(self) -> None:
        """Wake the tasks that wait for a change. Called also if only breakers changed, which changes selections."""
        self.changed.set()
        self.changed = asyncio.Event()

    def model(self, name: str) -> ModelView:
        return self._models.get(name, _NO_INSTANCES)

    def models(self) -> dict[str, ModelDeploymentCard]:
        """Return the card in use by model name, for every model that has an instance.

        The cards of decode and aggregated instances take precedence over those of prefill instances, because their
        context length limits prompt and output together. Among equals, the lowest id takes precedence.
        """
        last_counts = sorted(self._instances.values(), key=lambda i: (i.role is not Role.PREFILL, -i.id))
        return {instance.card.name: instance.card for instance in last_counts}

    def instances(self) -> list[Instance]:
        return sorted(self._instances.values(), key=lambda i: i.id)

    def _rebuild(self) -> None:
        """Rebuild the views of all models per change, so that a request costs only a dictionary look-up."""
        self.notify_changed()
        names = {i.card.name for i in self._instances.values()}
        self._models = {name: _model_view(i for i in self.instances() if i.card.name == name) for name in names}


def _model_view(instances: Iterable[Instance]) -> ModelView:
    by_role: dict[Role, list[Instance]] = {role: [] for role in Role}
    for instance in instances:
        by_role[instance.role].append(instance)
    return ModelView(
        prefill=tuple(by_role[Role.PREFILL]),
        decode=tuple(by_role[Role.DECODE]),
        aggregated=tuple(by_role[Role.AGGREGATED]),
    )


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


def _partners(view: ModelView, decode: Instance) -> list[int]:
    return [p.id for p in view.prefill if view.keys[p.id] == view.keys[decode.id]]


def _all_open(model: str, breakers: PairBreakers, pairs: list[Pair]) -> NoInstances:
    reasons = dict.fromkeys(breakers.status(pair).reason or "not probed yet" for pair in pairs)
    return NoInstances(
        f"every pair (or aggregated worker) of model {model!r} is new or quarantined: {'; '.join(reasons)}; see /health"
    )


def differences(a: Instance, b: Instance) -> str:
    """Return the fields in which two instances must be equal but differ, with both values, as text for people."""
    ours, theirs = dict(pairing_key(a)), dict(pairing_key(b))
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return "; ".join(f"{name} is {ours.get(name)!r} at {a.role} and {theirs.get(name)!r} at {b.role}" for name in names)
