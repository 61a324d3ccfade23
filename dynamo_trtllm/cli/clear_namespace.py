"""Show stale records of a deployment in etcd and JetStream, and remove them after confirmation.

A worker that stops removes its record, and etcd removes that of a killed worker when its lease expires. This command
removes records that are left nevertheless, and stored responses. It stops no process.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from dynamo_trtllm.config.commands import ClearNamespaceConfig
from dynamo_trtllm.config.load import command_errors, load
from dynamo_trtllm.discovery.etcd_store import EtcdStore, Lease
from dynamo_trtllm.discovery.keys import namespace_prefix, shown_key
from dynamo_trtllm.errors import ConfigError, Unreachable
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.request_plane.jetstream import BucketInfo, bucket_info, delete_bucket

PROG = "python -m dynamo_trtllm.clear_namespace"
_YES = ("y", "yes")

Confirm = Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleRecords:
    """The records of a namespace. An instance with a lease is live, or died less than one lease time ago."""

    instances: Mapping[str, Lease | None]
    responses: BucketInfo | None

    def __bool__(self) -> bool:
        return bool(self.instances) or self.responses is not None

    @property
    def live(self) -> list[str]:
        return [key for key, lease in self.instances.items() if lease is not None]

    def lines(self) -> Iterator[str]:
        for key, lease in sorted(self.instances.items()):
            state = "no lease" if lease is None else f"live, {lease.ttl_s} s left of its lease"
            yield f"  etcd       {shown_key(key)} ({state})"
        if self.responses is not None:
            info = self.responses
            yield f"  JetStream  {info.bucket} ({info.messages} messages, {info.size_bytes} bytes of stored responses)"


@command_errors(PROG, Unreachable)
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Exit with status 0 if the namespace is clear, 1 if records are left or a server is unreachable, and 2 for a bad
    command line.
    """
    config = load(ClearNamespaceConfig, prog=PROG, argv=argv)
    observe_logging.setup(config.log_level, "clear", config.log_format)
    raise SystemExit(0 if asyncio.run(clear(config, _read_confirmation)) else 1)


async def clear(config: ClearNamespaceConfig, confirm: Confirm) -> bool:
    """Remove the records of the namespace.

    Args:
        config: Settings of the command.
        confirm: Asks for confirmation, unless `config.yes` is set.

    Returns:
        True if no record is left.

    Raises:
        Unreachable: etcd or NATS is unreachable.
        ConfigError: Confirmation needs a terminal, and stdin is none.
    """
    async with aclosing(EtcdStore(config)) as store:
        records = StaleRecords(
            instances=await store.leases(namespace_prefix(config.namespace)),
            responses=await bucket_info(config.nats_server, config.namespace),
        )
        if not records:
            _say(f"namespace {config.namespace} is clear")
            return True
        _say(f"namespace {config.namespace} has", *records.lines())
        if records.live and not config.force:
            _say(
                f"Nothing removed: {len(records.live)} instances are live, or died less than a lease time ago. "
                "Stop them, wait, or pass --force."
            )
            return False
        if not config.yes and not confirm():
            _say("Nothing removed.")
            return False
        await _remove(store, config, records)
    _say("Removed.")
    return True


async def _remove(store: EtcdStore, config: ClearNamespaceConfig, records: StaleRecords) -> None:
    """Delete the records. Revoke a lease instead of deleting its key, so that a live worker registers again."""
    for key, lease in records.instances.items():
        await (store.delete(key) if lease is None else store.revoke(lease))
    if records.responses is not None:
        await delete_bucket(config.nats_server, config.namespace)


def _read_confirmation() -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("confirmation needs a terminal, and stdin is none; pass --yes", field="yes")
    sys.stdout.write("Remove all of it? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in _YES


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
