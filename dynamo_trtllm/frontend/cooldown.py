"""Instances that discovery still tells of and that took nothing lately. Pure; owns no clock."""

from __future__ import annotations

import math

ABSENT_S = 5.0


class Cooldown:
    """Placement avoids these instances for a while if there are others; then one request tries them again.

    `ids` is read per request: it returns the same set object until an instance is added or removed.
    """

    def __init__(self) -> None:
        self._until: dict[int, float] = {}
        self._ids: frozenset[int] = frozenset()
        self._next_until = math.inf  # when the next instance is tried again

    def note(self, instance_id: int, now: float) -> None:
        """`now` in seconds of a clock that only rises."""
        self._until[instance_id] = now + ABSENT_S
        self._changed()

    def forget(self, instance_id: int) -> None:
        """It was seen to work."""
        if self._until.pop(instance_id, None) is not None:
            self._changed()

    def ids(self, now: float) -> frozenset[int]:
        if self._next_until <= now:
            self._until = {instance_id: until for instance_id, until in self._until.items() if until > now}
            self._changed()
        return self._ids

    def _changed(self) -> None:
        self._next_until = min(self._until.values(), default=math.inf)
        if self._ids != self._until.keys():
            self._ids = frozenset(self._until)
