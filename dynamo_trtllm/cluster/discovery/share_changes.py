"""Change the shares of elastic workers: read the table, replace some shares, write it once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Final

import msgspec

from dynamo_trtllm.cluster.discovery.discovery_interface import (
    Added,
    Discovery,
    StoredShares,
    Synced,
)
from dynamo_trtllm.cluster.discovery.share_records import share_key
from dynamo_trtllm.protocol.clocks import SYSTEM_CLOCKS
from dynamo_trtllm.protocol.errors import Overloaded, Unreachable, VersionMismatch
from dynamo_trtllm.protocol.messages import WIRE_VERSION, Instance, Role, encode
from dynamo_trtllm.protocol.shares import ALL_WORK, MAX_CHANGES, ShareChange, Shares, ShareTable

# Most attempts of one change. A second attempt is needed only if another client writes at the same
# moment.
_MAX_ATTEMPTS: Final = 5
# Most bytes of the encoded history of a table. Frontends accept a table of four times this size.
_MAX_HISTORY_BYTES: Final = 64 << 10


async def elastic_workers(discovery: Discovery, namespace: str) -> list[Instance]:
    """Return the registered elastic workers of a namespace, sorted by id.

    Raises:
        Unreachable: discovery does not answer.
    """
    workers: dict[int, Instance] = {}
    async with aclosing(discovery.watch(namespace)) as events:
        async for event in events:
            if isinstance(event, Synced):
                break
            if isinstance(event, Added) and event.instance.role is Role.ELASTIC:
                workers[event.instance.id] = event.instance
    return [workers[instance_id] for instance_id in sorted(workers)]


def changed_table(
    stored: StoredShares,
    changes: Mapping[int, Shares],
    *,
    registered: Mapping[int, Shares],
    epoch: int | None = None,
    reason: str = "",
    writer: str = "",
    now: float = 0.0,
) -> ShareTable | None:
    """Return the table that replaces a stored one.

    Args:
        stored: the stored table. If it is invalid, nothing of it is used.
        changes: the shares to set, by instance id.
        registered: the shares with which workers have registered, by instance id. Stored shares of
            other workers are left out.
        epoch: the epoch of the writer. None: the epoch of the stored table.
        reason: why the shares change.
        writer: the process that changes the shares.
        now: Unix time in seconds.

    Returns:
        The table. None: a writer with a higher epoch has written the stored table. That writer has
        replaced this one.
    """
    before = stored.table or ShareTable()
    if epoch is None:
        epoch = before.epoch
    if epoch < before.epoch:
        return None
    workers = {id_: shares for id_, shares in before.workers.items() if id_ in registered}
    former = {id_: workers.get(id_, registered.get(id_, ALL_WORK)) for id_ in changes}
    change = ShareChange(
        epoch=epoch,
        revision=before.revision + 1,
        written_at=now,
        writer=writer,
        reason=reason,
        before=former,
        after=changes,
    )
    since = {id_: at for id_, at in before.since.items() if id_ in registered}
    since |= {id_: now for id_, shares in changes.items() if shares != former[id_]}
    return ShareTable(
        epoch=epoch,
        revision=before.revision + 1,
        workers=workers | dict(changes),
        written_at=now,
        reason=reason,
        since=since,
        history=_latest([*before.history, change]),
        wire=WIRE_VERSION,
    )


def _latest(history: list[ShareChange]) -> tuple[ShareChange, ...]:
    """Return the latest changes of a history, within the limits of a table."""
    latest: list[ShareChange] = []
    num_bytes = 0
    for change in reversed(history[-MAX_CHANGES:]):
        num_bytes += len(encode(change))
        if num_bytes > _MAX_HISTORY_BYTES:
            if not latest:
                # The latest change alone is too large, because it has a thousand workers. Their
                # shares are left out here. The table itself has them.
                latest.append(msgspec.structs.replace(change, before={}, after={}))
            break
        latest.insert(0, change)
    return tuple(latest)


async def change_shares(
    discovery: Discovery,
    namespace: str,
    changes: Mapping[int, Shares],
    *,
    registered: Mapping[int, Shares],
    epoch: int | None = None,
    reason: str = "",
    writer: str = "",
    now: Callable[[], float] = SYSTEM_CLOCKS.epoch,
) -> ShareTable | None:
    """Change the shares of some elastic workers with one write.

    The arguments are those of `changed_table`. Running calls stay where they are.

    Returns:
        The table that was written. None: a writer with a higher epoch has replaced this writer.

    Raises:
        ConfigError: frontends would reject these shares.
        Overloaded: other clients keep writing.
        Unreachable: etcd does not answer. The table may have been written.
        VersionMismatch: a process of another wire version has written the table.
    """
    for _ in range(_MAX_ATTEMPTS):
        stored = await discovery.read_shares(namespace)
        if stored.is_from_incompatible_release:
            # Frontends of that release would reject the table of this process.
            raise VersionMismatch(
                f"the shares of namespace {namespace} (record {share_key(namespace)}) stay:"
                f" {stored.problem}; {stored.remedy}"
            )
        table = changed_table(
            stored,
            changes,
            registered=registered,
            epoch=epoch,
            reason=reason,
            writer=writer,
            now=now(),
        )
        if table is None:
            return None
        try:
            if await discovery.write_shares(namespace, table, stored.version):
                return table
        except Unreachable:
            # The table may have been written before the connection was lost.
            again = await discovery.read_shares(namespace)
            if again.table == table:
                return table
            raise
    raise Overloaded(
        f"other clients changed the shares of namespace {namespace} {_MAX_ATTEMPTS} times in a row;"
        " run one planner, and try again"
    )
