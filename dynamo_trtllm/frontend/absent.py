"""Instances that discovery still tells of and that took nothing lately. Pure; owns no clock."""

from __future__ import annotations

ABSENT_S = 5.0


class Absent:
    """They are passed by for a while, unless there is no other, and then one request tries them again."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}

    def note(self, instance_id: int, now: float) -> None:
        """`now` in seconds of a clock that only rises."""
        self._until[instance_id] = now + ABSENT_S

    def forget(self, instance_id: int) -> None:
        """It was seen to work."""
        if self._until:
            self._until.pop(instance_id, None)

    def ids(self, now: float) -> set[int]:
        if not self._until:
            return set()
        self._until = {instance_id: until for instance_id, until in self._until.items() if until > now}
        return set(self._until)
