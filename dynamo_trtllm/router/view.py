"""Hold the router's view of the cluster: instances by model and role, as reported by discovery."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from dynamo_trtllm.kv_transfer.params import EQUAL_LAYOUT
from dynamo_trtllm.messages import Instance, ModelDeploymentCard, Role

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
