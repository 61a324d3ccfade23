"""Cache the instance records of a watcher, and turn lists and changes into events.

No I/O, no clock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from dynamo_trtllm.cluster.discovery.discovery_interface import Added, Event, Rejected, Removed
from dynamo_trtllm.cluster.discovery.records import (
    BadRecord,
    card_mismatch,
    parse_instance_key,
    read_instance,
    shown_key,
)
from dynamo_trtllm.protocol.messages import Instance, ModelDeploymentCard, Role

log = logging.getLogger(__name__)

MAX_REJECTED: Final = 10_000  # stored rejected keys, because any client of etcd can write more


class _ModelInstances:
    """The instances of one model that are in use, by key, in the order of their records' writes."""

    def __init__(self) -> None:
        self._instances: dict[str, Instance] = {}
        self._decode: dict[str, Instance] = {}  # decode and aggregated instances

    def __len__(self) -> int:
        return len(self._instances)

    def __getitem__(self, key: str) -> Instance:
        return self._instances[key]

    def keys(self) -> Iterable[str]:
        return self._instances.keys()

    @property
    def card_in_use(self) -> ModelDeploymentCard:
        """The card with which a frontend renders requests, as in the router's view."""
        instances = self._decode or self._instances
        first = next(iter(instances.values()))
        return first.card

    def put(self, key: str, instance: Instance) -> None:
        """Add an instance whose record was written just now."""
        self.discard(key)
        self._instances[key] = instance
        if instance.role is not Role.PREFILL:
            self._decode[key] = instance

    def discard(self, key: str) -> None:
        """Remove an instance if it is there."""
        self._instances.pop(key, None)
        self._decode.pop(key, None)

    def mismatch(self, instance: Instance) -> str:
        """Return why the card of another instance does not fit these; "" if it fits."""
        if not self._instances:
            return ""
        first = next(iter(self._instances.values()))
        first_decode = next(iter(self._decode.values()), None)
        return card_mismatch(instance, first, first_decode)


class InstanceCache:
    """Cache of valid and rejected instance records by key. An unchanged record produces no event.

    A record that is missing in a list does not prove that its worker left: the store may have lost
    it, and the worker will register again. So an instance is removed only after lists have lacked
    it for `grace_s` seconds. A deleted record is removed at once.

    Records that conflict with earlier ones are rejected:

    * a key with an instance id that an earlier key has
    * an instance whose card does not fit the earlier instances of its model, so that it can't take
      over the model

    Earlier means that the record was written earlier. A record that is written again counts as new,
    also if it has not changed, because a list has the records in the order in which they were last
    written. So a cache that has followed all changes orders them as one that has read a list.

    When an earlier instance is removed, a new list is needed to check the rejected records again.
    They must fit the instances that are in use, although these may have been written later.
    """

    def __init__(self, *, grace_s: float = 0.0) -> None:
        self._grace_s = grace_s
        self._records: dict[str, bytes] = {}
        self._owners: dict[int, str] = {}  # instance id -> key of the valid record
        # key -> time from which a list without the key removes its instance
        self._missing: dict[str, float] = {}
        self._rejected: dict[str, str] = {}  # shown key -> reason
        self._contested: set[int] = set()  # ids of instances that another, rejected key has, too
        self._models: dict[str, _ModelInstances] = {}
        self._model_of: dict[str, str] = {}  # key -> model, of the instances in `_models`
        # key -> model, of records that were rejected for their card
        self._unfit: dict[str, str] = {}
        self._needs_list = False  # an instance was removed, and rejected records may be valid now
        self._has_logged_full = False

    @property
    def next_list_s(self) -> float | None:
        """Return the time at which a new list is needed; 0.0: at once; None: it is not needed."""
        if self._needs_list:
            return 0.0
        return min(self._missing.values(), default=None)

    def restart_grace(self) -> None:
        """Give missing instances the whole grace time again.

        They can't register while the store is down.
        """
        self._missing.clear()

    def relist(self, listed: Mapping[str, bytes], now_s: float = 0.0) -> list[Event]:
        """Return the events for a new list: first removed instances, then added and changed ones.

        Args:
            listed: all records in the store, by key, in the order in which they were last written.
            now_s: time of the list, of any monotonic clock.
        """
        events: list[Event] = []
        if self._rejected:
            listed_shown = {shown_key(key) for key in listed}
            gone = [shown for shown in self._rejected if shown not in listed_shown]
            for shown in gone:
                del self._rejected[shown]
                events.append(Rejected(shown, None))
        missing = [key for key in self._records if key not in listed]
        for key in missing:
            removed_at_s = self._missing.setdefault(key, now_s + self._grace_s)
            if removed_at_s <= now_s:
                events += self._remove(key)
        self._needs_list = False
        self._unfit.clear()
        return events + self._put_listed(listed)

    def _put_listed(self, listed: Mapping[str, bytes]) -> list[Event]:
        """Return the events for the records of a list that changed, or whose order did."""
        events: list[Event] = []
        reordered: set[str] = set()  # models of which an instance was moved behind the others
        # model -> the listed keys of its instances, in the order so far
        unvisited: dict[str, Iterator[str]] = {}
        for model, instances in self._models.items():
            keys = [key for key in instances.keys() if key in listed]
            unvisited[model] = iter(keys)
        for key, record in listed.items():
            if self._records.get(key) == record:
                model = self._model_of[key]
                if model not in reordered:
                    key_so_far = next(unvisited[model], None)
                    if key_so_far == key:
                        self._missing.pop(key, None)
                        continue
            events += self.put(key, record)
            # The records that follow in the list were written later, so they go behind this one.
            if key in self._model_of:
                reordered.add(self._model_of[key])
        return events

    def put(self, key: str, record: bytes) -> list[Event]:
        """Return the events for a record that was written.

        A rejected record is logged once per key.
        """
        if self._records.get(key) != record:
            return self._put(key, record)
        model = self._model_of[key]
        card_before = self._models[model].card_in_use
        events = self._put(key, record)
        # Its instance is the last of its model now. That needs an event if the card in use changed.
        is_still_valid = key in self._records
        if is_still_valid and self._models[model].card_in_use == card_before:
            return []
        return events

    def _put(self, key: str, record: bytes) -> list[Event]:
        """Check a record and add its instance behind the others of its model. Return the events."""
        self._missing.pop(key, None)
        self._unfit.pop(key, None)
        try:
            instance = read_instance(key, record)
        except BadRecord as exc:
            return [*self._remove(key), *self._reject(key, str(exc))]
        owner = self._owners.get(instance.id, key)
        if owner != key:
            self._contested.add(instance.id)
            reason = (
                f"instance id {instance.id:x} is already registered under the key"
                f" {shown_key(owner)}"
            )
            # There is nothing to remove: the owner's instance has this id.
            return self._reject(key, reason)
        model = instance.card.name
        self._leave_model(key)
        instances = self._models.get(model) or _ModelInstances()
        mismatch = instances.mismatch(instance)
        if mismatch:
            self._unfit[key] = model
            return [*self._remove(key), *self._reject(key, mismatch)]
        events = self._clear_rejected(key)
        self._records[key] = record
        self._owners[instance.id] = key
        instances.put(key, instance)
        self._models[model] = instances
        self._model_of[key] = model
        return [*events, Added(instance)]

    def delete(self, key: str) -> list[Event]:
        """Return the events for a key that was deleted."""
        self._unfit.pop(key, None)
        return [*self._clear_rejected(key), *self._remove(key)]

    def _remove(self, key: str) -> list[Event]:
        if self._records.pop(key, None) is None:
            return []
        self._missing.pop(key, None)
        _, instance_id = parse_instance_key(key)
        del self._owners[instance_id]
        self._leave_model(key)
        if instance_id in self._contested:
            # The rejected key with the same id may be valid now.
            self._needs_list = True
            self._contested.discard(instance_id)
        return [Removed(instance_id)]

    def _leave_model(self, key: str) -> None:
        """Remove the instance of a key from its model, if it is in one."""
        model = self._model_of.pop(key, None)
        if model is None:
            return
        self._models[model].discard(key)
        if not self._models[model]:
            del self._models[model]
        if model in self._unfit.values():
            self._needs_list = True

    def _reject(self, key: str, reason: str) -> list[Event]:
        shown = shown_key(key)
        known = self._rejected.get(shown)
        if known == reason:
            return []
        if known is None:
            if len(self._rejected) >= MAX_REJECTED:
                if not self._has_logged_full:
                    text = (
                        "%d etcd records rejected, not logging further ones; check which client"
                        " writes them"
                    )
                    log.warning(text, MAX_REJECTED)
                self._has_logged_full = True
                return []
            log.warning("etcd record rejected: %s (key %s)", reason, shown)
        self._rejected[shown] = reason
        return [Rejected(shown, reason)]

    def _clear_rejected(self, key: str) -> list[Event]:
        """Return the events for a key that is no longer rejected."""
        if not self._rejected:
            return []
        shown = shown_key(key)
        if self._rejected.pop(shown, None) is None:
            return []
        return [Rejected(shown, None)]
