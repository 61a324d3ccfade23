"""Define the discovery interface.

`etcd` implements it, and `memory` within one process.
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
    """Frontends use this card for its model from now on.

    It is reported before the first instance of the model, and after the removal of instances that
    do not fit it.
    """

    card: ModelDeploymentCard


@dataclass(frozen=True, slots=True)
class Synced:
    """All records that existed at the start of the watch were reported. A watch yields it once."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A record was rejected, or the reason changed, or the rejected record is gone or valid."""

    key: str  # escaped and shortened by `records.shown_key`
    reason: str | None  # None: it is gone or valid


@dataclass(frozen=True, slots=True)
class SharesChanged:
    """The share table of the namespace was written, or is gone."""

    table: ShareTable | None  # None: it is gone, and all workers have the shares they registered


Event = Added | Removed | CardChosen | Rejected | SharesChanged | Synced


@dataclass(frozen=True, slots=True)
class StoredShares:
    """The share table of a namespace as it is stored."""

    table: ShareTable | None  # None: there is none, or it is invalid
    version: int = 0  # of the store: another one after each write. 0: there is no table
    problem: str = ""  # why the table is invalid
    is_other_version: bool = False  # it is invalid because its writer has an incompatible version


class Registration(Protocol):
    """The registration of one instance.

    A background task renews its lease. The task writes the record again when the store has lost its
    data, and also, within the time of a lease, when another client has deleted or overwritten the
    record.
    """

    async def aclose(self) -> None:
        """Deregister. If the store is unavailable, the lease expires instead. Idempotent."""


class Leadership(Protocol):
    """The right to act for a namespace. Of all processes of a kind, one has it.

    It ends if it is not renewed in time.
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
        """Why watchers may lack the latest changes, as text; "": they do not."""

    async def register(self, instance: Instance) -> Registration:
        """Register an instance. Return once the record is visible to watchers.

        Raises:
            ConfigError: watchers would reject the record.
            Unreachable: the store does not answer.
        """

    def watch(self, namespace: str) -> AsyncGenerator[Event, None]:
        """Yield Added or Rejected for each existing record, then Synced, then all changes.

        A CardChosen comes before the first Added of each model.

        While the store is unreachable, the generator yields nothing. Afterwards it yields the
        differences, and missing instances get some time to register again. Consume with `aclosing`.
        """

    async def read_shares(self, namespace: str) -> StoredShares:
        """Return the share table of a namespace.

        Raises:
            Unreachable: the store does not answer.
        """

    async def write_shares(self, namespace: str, table: ShareTable, version: int) -> bool:
        """Write the share table of a namespace, if no other client has written it meanwhile.

        Args:
            namespace: the namespace.
            table: the table.
            version: of the stored table that it replaces, see `StoredShares`.

        Returns:
            False if another version is stored: read it again.

        Raises:
            ConfigError: frontends would reject the table.
            Unreachable: the store does not answer. The table may have been written.
        """

    async def lead_planners(self, namespace: str, name: str) -> Leadership | None:
        """Become the planner that sets the shares of a namespace.

        Args:
            namespace: the namespace.
            name: of this process, for people who read the record.

        Returns:
            None: another planner leads.

        Raises:
            Unreachable: the store does not answer.
        """

    async def aclose(self) -> None:
        """Deregister all instances, end the watches and close the connection."""
