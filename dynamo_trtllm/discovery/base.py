"""The discovery seam. `memory` is the in-process twin; `etcd` the real one; one contract suite holds both."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from dynamo_trtllm.messages import Instance


@dataclass(frozen=True, slots=True)
class Up:
    """An instance is there, or its record changed."""

    instance: Instance


@dataclass(frozen=True, slots=True)
class Down:
    """An instance left or its lease ran out."""

    instance_id: int


@dataclass(frozen=True, slots=True)
class Synced:
    """All that was there when the watch began has been told; comes once, however often the watch re-lists."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A record was rejected and stands for no instance; it comes again when the reason changes."""

    key: str  # as `keys.shown_key` gives it: escaped and bounded
    reason: str | None  # None: the key is gone, or its record is good now


Event = Up | Down | Rejected | Synced


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
        """Up or Rejected for what is there, Synced, then every change. Never ends by itself: while the store is away
        nothing is yielded and nothing is taken down; after it is back, differences are, and who is missing has some
        time to register again first. Consume with `aclosing`."""
        ...

    async def aclose(self) -> None: ...
