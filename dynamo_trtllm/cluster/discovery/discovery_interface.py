"""Define the discovery interface.

The module `etcd` implements the interface for a cluster, and the module `memory` for one process.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from dynamo_trtllm.protocol.messages import Instance, ModelDeploymentCard
from dynamo_trtllm.protocol.shares import ShareTable


@dataclass(frozen=True, slots=True)
class Added:
    """An instance registered, or its record changed."""

    instance: Instance


@dataclass(frozen=True, slots=True)
class Removed:
    """An instance deregistered, or its lease expired."""

    instance_id: int


@dataclass(frozen=True, slots=True)
class CardChosen:
    """From now on, frontends use this card for the model that it describes.

    The event comes before the first instance of the model. Instances that do not fit the card are
    removed before the event.
    """

    card: ModelDeploymentCard


@dataclass(frozen=True, slots=True)
class Synced:
    """All records that existed at the start of the watch were reported.

    Each watch yields this event once.
    """


@dataclass(frozen=True, slots=True)
class RejectionChanged:
    """With a reason: the record with this key is rejected now. Without: it is no longer rejected.

    The event comes again with each new reason.
    """

    key: str  # escaped and shortened by `records.shown_key`
    reason: str | None  # None: the record was deleted, or has become valid


@dataclass(frozen=True, slots=True)
class SharesChanged:
    """The share table of the namespace was written or deleted."""

    # None: the table was deleted. Each worker has the share again with which it registered.
    table: ShareTable | None


Event = Added | Removed | CardChosen | RejectionChanged | SharesChanged | Synced


@dataclass(frozen=True, slots=True)
class StoredShares:
    """The share table of a namespace as it is stored."""

    table: ShareTable | None  # None: no table is stored, or the stored table is invalid
    # The version of the stored table. Each write changes the version. 0: no table is stored.
    version: int = 0
    problem: str = ""  # why the table is invalid
    # The table is invalid because a process of an incompatible release has written it.
    is_from_incompatible_release: bool = False

    @property
    def remedy(self) -> str:
        """What to do about `problem`."""
        if self.is_from_incompatible_release:
            # This process does not replace the table, because processes of that release use it.
            return "if no process of that version runs any more, delete the record in etcd"
        return "set shares to replace it"


class Registration(Protocol):
    """The registration of one instance.

    A background task renews the lease of the registration. When the store has lost its data, the
    task writes the record again. When another client has deleted or overwritten the record, the
    task writes the record again, too, but this may take the time of a lease.
    """

    async def aclose(self) -> None:
        """Deregister. If the store is unavailable, the lease expires instead. Idempotent."""


class Leadership(Protocol):
    """The right to set the shares of a namespace. At most one planner has the right.

    The leadership ends if it is not renewed in time.
    """

    @property
    def epoch(self) -> int:
        """A number that is higher than that of every leader before this one."""

    async def renew(self) -> bool:
        """Stay the leader. Return False if another process may lead by now.

        Raises:
            Unreachable: the store does not answer.
        """

    async def aclose(self) -> None:
        """Let another process lead. If the store is unavailable, the leadership expires instead.

        Idempotent.
        """


class Discovery(Protocol):
    """A connection to the store of registered instances."""

    @property
    def problem(self) -> str:
        """Why watchers may lack the latest changes, as text, or "" if they have all changes."""

    async def register(self, instance: Instance) -> Registration:
        """Register an instance. Return once the record is visible to watchers.

        Raises:
            ConfigError: watchers would reject the record.
            Unreachable: the store does not answer.
        """

    def watch(self, namespace: str) -> AsyncGenerator[Event, None]:
        """Yield Added or RejectionChanged for each existing record, then Synced, then all changes.

        A CardChosen comes before the first Added of each model.

        While the store is unreachable, the generator yields nothing. Afterwards it yields what has
        changed meanwhile. Missing instances get some time to register again before they count as
        removed. Consume the generator with `aclosing`.
        """

    async def read_shares(self, namespace: str) -> StoredShares:
        """Return the share table of a namespace.

        Raises:
            Unreachable: the store does not answer.
        """

    async def write_shares(self, namespace: str, table: ShareTable, version: int) -> bool:
        """Write the share table of a namespace, unless another client has written one meanwhile.

        Args:
            namespace: the namespace.
            table: the new table.
            version: `StoredShares.version` of the table that is replaced.

        Returns:
            False if the stored table has another version. The caller should read the table again.

        Raises:
            ConfigError: frontends would reject the table.
            Unreachable: the store does not answer. The table may have been written.
        """

    async def try_to_lead(self, namespace: str, name: str) -> Leadership | None:
        """Become the planner that sets the shares of a namespace, unless another planner leads.

        Args:
            namespace: the namespace.
            name: the name of this process, for people who read the record in the store.

        Returns:
            The leadership, or None if another planner leads.

        Raises:
            Unreachable: the store does not answer.
        """

    async def aclose(self) -> None:
        """Deregister all instances, end the watches and close the connection."""
