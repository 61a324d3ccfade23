"""Cache the records of a watch, and turn lists and changes of records into events.

The module does no I/O and reads no clock.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from dynamo_trtllm.cluster.discovery.discovery_interface import (
    Added,
    CardChosen,
    Event,
    RejectionChanged,
    Removed,
    SharesChanged,
)
from dynamo_trtllm.cluster.discovery.model_cards import ChosenCard, ModelCards
from dynamo_trtllm.cluster.discovery.records import (
    BadRecord,
    parse_instance_key,
    read_instance,
    shown_key,
)
from dynamo_trtllm.cluster.discovery.share_records import (
    is_planner_key,
    is_share_key,
    read_share_table,
)
from dynamo_trtllm.protocol.messages import Instance

log = logging.getLogger(__name__)

# Most rejected keys that are stored. Any client of etcd can write more of them.
MAX_REJECTED: Final = 10_000


class InstanceCache:
    """A cache of valid and rejected instance records by key. An unchanged record makes no event.

    If a record is missing in a list, its worker may still run: the store may have lost the record,
    and the worker will register again. Therefore an instance is removed only after lists have
    lacked its record for `grace_s` seconds. If a record was deleted, its instance is removed at
    once.

    Records that conflict with others are rejected:

    * A key with the instance id of an earlier key. When the earlier key is removed, a new list is
      needed to check the rejected record again.
    * An instance whose card does not fit the card that most instances of its model have.

    Records are ordered by their last write, also in a list. So if a record is written again, it
    becomes the newest record, even if it is unchanged. A cache that has followed all changes
    chooses the same cards as a cache that has read a list. There is one exception: if two cards
    have equally many instances, a cache keeps the card that it has chosen before.

    The share table is one more record. If a new table is rejected, the last valid table stays. The
    table is removed like an instance. Then workers have the shares with which they registered.
    """

    def __init__(self, *, grace_s: float = 0.0) -> None:
        self._grace_s = grace_s
        # The records of the instances in `_models` and of the share table, by key.
        self._records: dict[str, bytes] = {}
        # The keys of the instances that were reported as added, and the key of the share table.
        self._added: set[str] = set()
        self._key_of_id: dict[int, str] = {}  # the key of each instance in `_models`, by its id
        # The missing records: the time from which a list removes the instance, by key.
        self._missing: dict[str, float] = {}
        self._rejected: dict[str, str] = {}  # the reason of each rejection, by shown key
        self._contested: set[int] = set()  # the ids of instances that a rejected key has, too
        self._models: dict[str, ModelCards] = {}  # the cards and instances, by model
        self._model_of: dict[str, str] = {}  # the model of each instance in `_models`, by key
        self._num_writes = 0  # number of records that were written
        self._needs_list = False  # an instance was removed, and rejected records may be valid now
        self._has_logged_full = False

    @property
    def next_list_s(self) -> float | None:
        """Return the time at which a new list is needed. 0.0: at once. None: it is not needed."""
        if self._needs_list:
            return 0.0
        return min(self._missing.values(), default=None)

    def restart_grace(self) -> None:
        """Give missing instances the whole grace time again.

        This is called after an outage of the store, during which they could not register.
        """
        self._missing.clear()

    def relist(self, listed: Mapping[str, bytes], now_s: float = 0.0) -> list[Event]:
        """Return the events for a new list: first removed instances, then added and changed ones.

        Args:
            listed: all records in the store, by key, in the order in which they were last written.
            now_s: time of the list, of any monotonic clock.
        """
        changes = _Changes()
        if self._rejected:
            listed_shown = {shown_key(key) for key in listed}
            gone = [shown for shown in self._rejected if shown not in listed_shown]
            for shown in gone:
                del self._rejected[shown]
                changes.rejections.append(RejectionChanged(shown, None))
        missing = [key for key in self._records if key not in listed]
        for key in missing:
            removed_at_s = self._missing.setdefault(key, now_s + self._grace_s)
            # An instance that was not reported as added is not in use. So it needs no time to
            # register again.
            if removed_at_s <= now_s or key not in self._added:
                self._forget(key, changes)
        self._needs_list = False
        for key, record in listed.items():
            self._put(key, record, changes)
        return self._events(changes)

    def put(self, key: str, record: bytes) -> list[Event]:
        """Return the events for a record that was written.

        A rejected record is logged once per key.
        """
        changes = _Changes()
        self._put(key, record, changes)
        return self._events(changes)

    def delete(self, key: str) -> list[Event]:
        """Return the events for a key that was deleted."""
        changes = _Changes()
        self._clear_rejected(key, changes)
        self._forget(key, changes)
        return self._events(changes)

    def _put(self, key: str, record: bytes, changes: _Changes) -> None:
        """Check a record, and make its instance the newest one of its model."""
        self._missing.pop(key, None)
        if is_share_key(key):
            self._put_shares(key, record, changes)
            return
        if is_planner_key(key):
            return
        self._num_writes += 1
        if self._records.get(key) == record:
            # The record is unchanged, so only the order of the instances changes.
            model = self._model_of[key]
            cards = self._models[model]
            cards.put(key, cards.instances[key], self._num_writes)
            changes.note(model)
            return
        try:
            instance = read_instance(key, record)
        except BadRecord as exc:
            self._forget(key, changes)
            self._reject(key, str(exc), changes)
            return
        earlier_key = self._key_of_id.get(instance.id, key)
        if earlier_key != key:
            self._contested.add(instance.id)
            reason = (
                f"instance id {instance.id:x} is already registered under the key"
                f" {shown_key(earlier_key)}"
            )
            # A key contains its instance id. So no record of this key was accepted before, and
            # there is nothing to remove.
            self._reject(key, reason, changes)
            return
        self._leave_model(key, changes)
        model = instance.card.name
        self._records[key] = record
        self._key_of_id[instance.id] = key
        self._model_of[key] = model
        self._models.setdefault(model, ModelCards()).put(key, instance, self._num_writes)
        changes.note(model, key)

    def _put_shares(self, key: str, record: bytes, changes: _Changes) -> None:
        """Report a share table if it is valid and new."""
        try:
            table = read_share_table(record)
        except BadRecord as exc:
            self._reject(key, str(exc), changes)
            return
        self._clear_rejected(key, changes)
        if self._records.get(key) != record:
            self._records[key] = record
            self._added.add(key)
            changes.shares = SharesChanged(table)

    def _forget(self, key: str, changes: _Changes) -> None:
        """Remove the record of a key and its instance, if the key has a record."""
        if self._records.pop(key, None) is None:
            return
        self._missing.pop(key, None)
        if is_share_key(key):
            self._added.discard(key)
            changes.shares = SharesChanged(None)
            return
        _, instance_id = parse_instance_key(key)
        del self._key_of_id[instance_id]
        self._leave_model(key, changes)
        if key in self._added:
            self._added.discard(key)
            changes.removed.append(Removed(instance_id))
        if instance_id in self._contested:
            # The rejected key with the same id may be valid now.
            self._needs_list = True
            self._contested.discard(instance_id)

    def _leave_model(self, key: str, changes: _Changes) -> None:
        """Remove the instance of a key from its model, if it is in one."""
        model = self._model_of.pop(key, None)
        if model is None:
            return
        self._models[model].discard(key)
        changes.note(model)

    def _events(self, changes: _Changes) -> list[Event]:
        """Choose the cards of all changed models again, and return the events of the changes."""
        for model, keys in changes.keys_of.items():
            cards = self._models[model]
            if not cards.instances:
                del self._models[model]
                continue
            before = cards.chosen
            chosen = cards.choose()
            if before is None or before.card != chosen.card:
                changes.chosen.append(CardChosen(chosen.card))
            # Unchanged instances are checked again only if the chosen card now has other
            # requirements for them.
            requires_same = before is not None and before.requires_same(chosen)
            checked_keys = keys if requires_same else cards.instances
            for key in checked_keys:
                self._check_fit(key, cards.instances[key], chosen, changes, is_new=key in keys)
        return changes.events()

    def _check_fit(
        self,
        key: str,
        instance: Instance,
        chosen: ChosenCard,
        changes: _Changes,
        *,
        is_new: bool,
    ) -> None:
        """Report whether an instance fits the chosen card, if this is new or has changed."""
        mismatch = chosen.mismatch(instance)
        if mismatch:
            if key in self._added:
                self._added.discard(key)
                changes.removed.append(Removed(instance.id))
            self._reject(key, mismatch, changes)
        elif is_new or key not in self._added:
            self._clear_rejected(key, changes)
            self._added.add(key)
            changes.added.append(Added(instance))

    def _reject(self, key: str, reason: str, changes: _Changes) -> None:
        """Report that a record is rejected, unless this was reported or too many are rejected."""
        shown = shown_key(key)
        known = self._rejected.get(shown)
        if known == reason:
            return
        if known is None:
            if len(self._rejected) >= MAX_REJECTED:
                if not self._has_logged_full:
                    text = (
                        "%d etcd records rejected, not logging further ones; check which client"
                        " writes them"
                    )
                    log.warning(text, MAX_REJECTED)
                self._has_logged_full = True
                return
            log.warning("etcd record rejected: %s (key %s)", reason, shown)
        self._rejected[shown] = reason
        changes.rejections.append(RejectionChanged(shown, reason))

    def _clear_rejected(self, key: str, changes: _Changes) -> None:
        """Report that a key is no longer rejected, if it was."""
        if not self._rejected:
            return
        shown = shown_key(key)
        if self._rejected.pop(shown, None) is not None:
            changes.rejections.append(RejectionChanged(shown, None))


class _Changes:
    """The events so far, and the models whose cards must be chosen again."""

    def __init__(self) -> None:
        self.removed: list[Removed] = []
        self.chosen: list[CardChosen] = []
        self.rejections: list[RejectionChanged] = []
        self.added: list[Added] = []
        self.shares: SharesChanged | None = None
        # The keys of the new and changed instances of each changed model.
        self.keys_of: dict[str, dict[str, None]] = {}

    def note(self, model: str, key: str | None = None) -> None:
        """Note that the instances of a model have changed.

        `key` is the key of an instance that is new or changed, if there is one.
        """
        keys = self.keys_of.setdefault(model, {})
        if key is not None:
            keys[key] = None

    def events(self) -> list[Event]:
        shares = [] if self.shares is None else [self.shares]
        return [*self.removed, *self.chosen, *self.rejections, *self.added, *shares]
