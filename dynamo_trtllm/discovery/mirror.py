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
    """The records a watcher has told its consumer of, by key. Equal records are told once."""

    def __init__(self) -> None:
        self._records: dict[str, bytes] = {}
        self._unreadable: set[str] = set()

    def relist(self, listed: Mapping[str, bytes]) -> list[Up | Down]:
        """News when the store holds exactly `listed`: first what vanished, then what is new or changed."""
        news: list[Up | Down] = []
        for key in [key for key in self._records if key not in listed]:
            news += self.removed(key)
        for key, record in listed.items():
            news += self.put(key, record)
        return news

    def put(self, key: str, record: bytes) -> list[Up | Down]:
        """News when `key` now holds `record`. One that can't be read counts as absent, with one warning per key."""
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
        self._unreadable.discard(key)
        if self._records.pop(key, None) is None:
            return []
        return [Down(instance_id_of(key))]
