"""What a watcher knows of the store, and what news a list or an event is to it. Pure: no store, no clock."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from dynamo_trtllm import codec
from dynamo_trtllm.discovery.base import Down, Up
from dynamo_trtllm.discovery.keys import instance_id_of
from dynamo_trtllm.errors import BadFrame
from dynamo_trtllm.messages import Instance

logger = logging.getLogger(__name__)


class Mirror:
    """The records a watcher has told its consumer of, by key. Equal records are told once.

    What a list lacks has left, or the store lost it and its owner will put it again: a list can't tell which. So it is
    down when lists have lacked it for `grace_s`. What is told as deleted is down at once.
    """

    def __init__(self, *, grace_s: float = 0.0) -> None:
        self._grace_s = grace_s
        self._records: dict[str, bytes] = {}
        self._missing: dict[str, float] = {}  # key to the time when a list that lacks it takes it down
        self._unreadable: set[str] = set()

    @property
    def due_s(self) -> float | None:
        """When to list again, to see whether what was missing is there now; None when nothing is."""
        return min(self._missing.values(), default=None)

    def wait_anew(self) -> None:
        """The store was away: who is missing could not come back, and has the whole grace from the next list on."""
        self._missing.clear()

    def relist(self, listed: Mapping[str, bytes], now_s: float = 0.0) -> list[Up | Down]:
        """News when the store holds exactly `listed` at `now_s`, of any clock that only rises: first what has been
        missing for too long, then what is new or changed."""
        news: list[Up | Down] = []
        for key in [key for key in self._records if key not in listed]:
            if self._missing.setdefault(key, now_s + self._grace_s) <= now_s:
                news += self.removed(key)
        for key, record in listed.items():
            news += self.put(key, record)
        return news

    def put(self, key: str, record: bytes) -> list[Up | Down]:
        """News when `key` now holds `record`. One that can't be read counts as absent, with one warning per key."""
        self._missing.pop(key, None)
        if self._records.get(key) == record:
            return []
        try:
            instance_id_of(key)
            instance = codec.decode(record, Instance)
        except (BadFrame, ValueError) as exc:
            if key not in self._unreadable:
                logger.warning("the record at %s is skipped, it was written by another version: %s", key, exc)
            news = self.removed(key)
            self._unreadable.add(key)
            return news
        self._unreadable.discard(key)
        self._records[key] = record
        return [Up(instance)]

    def removed(self, key: str) -> list[Up | Down]:
        """News when `key` is no more."""
        self._missing.pop(key, None)
        self._unreadable.discard(key)
        if self._records.pop(key, None) is None:
            return []
        return [Down(instance_id_of(key))]
