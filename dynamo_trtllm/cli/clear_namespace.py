"""Show stale records of a deployment in etcd and JetStream, and remove them after confirmation.

A worker that stops removes its record. If a worker is killed, etcd removes its record when the
lease of the record expires. This command removes records that are left nevertheless, and stored
responses. It stops no process.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import aclosing

from dynamo_trtllm.cluster.discovery.etcd_store import EtcdStore
from dynamo_trtllm.cluster.discovery.records import namespace_prefix, shown_key
from dynamo_trtllm.cluster.discovery.share_records import is_planner_key
from dynamo_trtllm.cluster.request_plane.nats_connection import NatsAccess
from dynamo_trtllm.cluster.roles import bucket_of
from dynamo_trtllm.config.commands import ClearNamespaceConfig
from dynamo_trtllm.config.load import command
from dynamo_trtllm.frontend.responses_api.jetstream import (
    bucket_state,
    delete_bucket,
)
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.protocol.errors import ConfigError, Unreachable

_YES = ("y", "yes")


@command(ClearNamespaceConfig, "python -m dynamo_trtllm.clear_namespace", Unreachable)
def main(config: ClearNamespaceConfig) -> int:
    """Run the command.

    Exit with status 0 if the namespace is clear, 1 if records are left or a server is unreachable,
    and 2 for a bad command line.
    """
    observe_logging.setup(config.log_level, "clear", config.log_format)
    return 0 if asyncio.run(clear(config)) else 1


async def clear(config: ClearNamespaceConfig) -> bool:
    """Remove the records of the namespace, after confirmation unless `config.yes` is set.

    Returns:
        True if no record is left.

    Raises:
        Unreachable: etcd or NATS is unreachable.
        ConfigError: confirmation needs a terminal, and stdin is none.
    """
    access = NatsAccess.of(config)
    async with aclosing(EtcdStore(config)) as store:
        # An instance whose record has a lease is live, or died less than one lease time ago.
        leases = await store.leases(namespace_prefix(config.namespace))
        responses = await bucket_state(config.nats_server, config.namespace, access)
        if not leases and responses is None:
            _say(f"namespace {config.namespace} is clear")
            return True
        _say(f"namespace {config.namespace} has")
        for key, lease in sorted(leases.items()):
            state = "no lease" if lease is None else f"live, {lease.ttl_s} s left of its lease"
            _say(f"  etcd       {shown_key(key)} ({state})")
        if responses is not None:
            size = f"{responses.messages} messages, {responses.bytes} bytes of stored responses"
            _say(f"  JetStream  {bucket_of(config.namespace)} ({size})")
        live = [key for key, lease in leases.items() if lease is not None]
        if live and not config.force:
            _say(
                f"Nothing removed: {_subject_and_verb(live)} live, or died less than a lease time"
                " ago. Stop what runs, wait, or pass --force."
            )
            return False
        if not config.yes and not _read_confirmation():
            _say("Nothing removed.")
            return False
        for key, lease in leases.items():
            # Revoking a lease also removes its keys. A live worker then registers again, with a new
            # lease.
            if lease is None:
                await store.delete(key)
            else:
                await store.revoke(lease)
        if responses is not None:
            await delete_bucket(config.nats_server, config.namespace, access)
    _say("Removed.")
    return True


def _subject_and_verb(keys: Sequence[str]) -> str:
    """Return the owners of these keys, with "is" or "are". The planner has a key while it leads."""
    num_instances = sum(not is_planner_key(key) for key in keys)
    parts = []
    if num_instances:
        parts.append("1 instance" if num_instances == 1 else f"{num_instances} instances")
    if num_instances < len(keys):
        parts.append("the planner")
    return f"{' and '.join(parts)} {'is' if len(keys) == 1 else 'are'}"


def _read_confirmation() -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("confirmation needs a terminal, and stdin is none; pass --yes")
    sys.stdout.write("Remove all of it? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in _YES


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
