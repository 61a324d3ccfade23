"""Encode and validate the share table of a namespace, and define its key and the planner's key.

Both keys have the prefix of the instances of the namespace. So one watch reports all of them, and
the same users may read them. Frontends of earlier versions log once that they reject the records of
these two keys.
"""

from __future__ import annotations

from typing import Final

from dynamo_trtllm.cluster.discovery.discovery_interface import StoredShares
from dynamo_trtllm.cluster.discovery.records import (
    MAX_RECORD_BYTES,
    PREFIX,
    BadRecord,
    namespace_prefix,
)
from dynamo_trtllm.protocol.errors import BadFrame, ConfigError
from dynamo_trtllm.protocol.messages import decode, encode, wire_mismatch
from dynamo_trtllm.protocol.shares import (
    MAX_CHANGES,
    MAX_REASON_CHARACTERS,
    MAX_WRITER_CHARACTERS,
    ShareTable,
)


class _OtherVersion(BadRecord):
    """The writer has a wire version that this process does not understand."""


# The last parts of the two keys. These keys have fewer parts than the key of an instance, so they
# are never equal.
_SHARES: Final = "shares"
_PLANNER: Final = "planner"
_PARTS: Final = len(PREFIX.split("/")) + 2


def share_key(namespace: str) -> str:
    """Return the etcd key of the share table of a namespace."""
    return f"{namespace_prefix(namespace)}{_SHARES}"


def is_share_key(key: str) -> bool:
    """Return whether a key under the prefix of a namespace is the key of the share table."""
    return key.endswith(f"/{_SHARES}") and key.count("/") == _PARTS - 1


def planner_key(namespace: str) -> str:
    """Return the etcd key that the planner of a namespace has while it leads."""
    return f"{namespace_prefix(namespace)}{_PLANNER}"


def is_planner_key(key: str) -> bool:
    """Return whether a key under the prefix of a namespace is the key of the planner."""
    return key.endswith(f"/{_PLANNER}") and key.count("/") == _PARTS - 1


def read_share_table(record: bytes) -> ShareTable:
    """Decode and validate a share table.

    Raises:
        BadRecord: the record is invalid. The error names the worker and the field.
    """
    if len(record) > MAX_RECORD_BYTES:
        raise BadRecord(f"the record has {len(record)} bytes; the limit is {MAX_RECORD_BYTES}")
    try:
        table = decode(record, ShareTable)
    except BadFrame as exc:
        raise BadRecord(f"the shares can't be read: {exc.message}") from exc
    mismatch = wire_mismatch(table.wire)
    if mismatch:
        raise _OtherVersion(mismatch)
    _check_texts(table)
    for instance_id, shares in table.workers.items():
        if shares.problem:
            raise BadRecord(f"worker {instance_id:x}: {shares.problem}")
    return table


def _check_texts(table: ShareTable) -> None:
    """Raise BadRecord if the history or a text of the table is too long."""
    reasons = [table.reason, *(change.reason for change in table.history)]
    longest_reason = max(map(len, reasons))
    if longest_reason > MAX_REASON_CHARACTERS:
        raise BadRecord(
            f"reason has {longest_reason} characters; the limit is {MAX_REASON_CHARACTERS}"
        )
    longest_writer = max((len(change.writer) for change in table.history), default=0)
    if longest_writer > MAX_WRITER_CHARACTERS:
        raise BadRecord(
            f"writer has {longest_writer} characters; the limit is {MAX_WRITER_CHARACTERS}"
        )
    if len(table.history) > MAX_CHANGES:
        raise BadRecord(f"history has {len(table.history)} changes; the limit is {MAX_CHANGES}")


def stored_shares(record: bytes | None, version: int) -> StoredShares:
    """Return the share table in a stored record. None: no record is stored."""
    if record is None:
        return StoredShares(table=None)
    try:
        return StoredShares(table=read_share_table(record), version=version)
    except BadRecord as exc:
        return StoredShares(
            table=None,
            version=version,
            problem=str(exc),
            is_from_incompatible_release=isinstance(exc, _OtherVersion),
        )


def written_share_table(table: ShareTable) -> bytes:
    """Return the encoded share table.

    Raises:
        ConfigError: frontends would reject the table.
    """
    record = encode(table)
    try:
        read_share_table(record)
    except BadRecord as exc:
        raise ConfigError(f"frontends would reject these shares: {exc}") from exc
    return record
