"""The discovery interface. Implementations: `memory` (in-process) and `etcd`; both pass the same contract tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from dynamo_trtllm.messages import Instance


@dataclass(frozen=True, slots=True)
class Added:
    """An instance is there, or its record changed."""

    instance: Instance


@dataclass(frozen=True, slots=True)
class Removed:
    """An instance left or its lease ran out."""

    instance_id: int


@dataclass(frozen=True, slots=True)
class Synced:
    """All records that existed when the watch began were reported. Comes once, however often the watch re-lists."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A record was rejected. The event comes again when the reason changes, and with reason None when the record is
    gone or valid."""

    key: str  # as `keys.shown_key` gives it: escaped and bounded
    reason: str | None  # None: the record is gone or valid


Event = Added | Removed | Rejected | Synced


class Registration(Protocol):
    """One instance's record on its lease. Kept alive in the background, under the same key whatever happens to etcd."""

    async def aclose(self) -> None:
        """Deregister. Idempotent; does not fail when the store is away (the lease then runs out)."""
        ...


class Discovery(Protocol):
    async def register(self, instance: Instance) -> Registration:
        """Returns once the record is visible. Raises ConfigError for a record that every watcher would reject, and
        Unreachable if the store can't be reached at all at the start."""
        ...

    def watch(self, namespace: str) -> AsyncGenerator[Event, None]:
        """Yield Added or Rejected for each record that is there, then Synced, then every change; never end. While the
        store is unreachable, yield nothing. Afterwards yield the differences; a missing instance has some time to
        register again. Consume with `aclosing`."""
        ...

    async def aclose(self) -> None: ...
