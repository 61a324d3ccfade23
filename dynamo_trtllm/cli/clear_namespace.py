"""`python -m dynamo_trtllm.clear_namespace`: shows what a deployment left in etcd and JetStream, asks, and removes it.

A worker that stops takes its record with it, and that of one that was killed goes when its lease ends: this is for what
is left in spite of that, and for kept responses. It ends no process.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from dynamo_trtllm.config.commands import ClearNamespaceConfig
from dynamo_trtllm.config.load import exit_with, load
from dynamo_trtllm.discovery.etcd import tls_files
from dynamo_trtllm.discovery.etcd_store import EtcdStore, Lease
from dynamo_trtllm.discovery.keys import namespace_prefix, shown_key
from dynamo_trtllm.errors import ConfigError, Unreachable
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.request_plane.jetstream import BucketInfo, bucket_info, delete_bucket

PROG = "python -m dynamo_trtllm.clear_namespace"
_DESCRIPTION = "Removes what a deployment left in etcd and JetStream: instances without a lease, and stored responses."
_YES = ("y", "yes")

Confirm = Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleRecords:
    """What there is of a namespace. An instance whose lease still runs lives, or died less than a lease ago."""

    instances: Mapping[str, Lease | None]
    responses: BucketInfo | None

    def __bool__(self) -> bool:
        return bool(self.instances) or self.responses is not None

    @property
    def live(self) -> list[str]:
        return [key for key, lease in self.instances.items() if lease is not None]

    def lines(self) -> Iterator[str]:
        for key, lease in sorted(self.instances.items()):
            state = "no live lease" if lease is None else f"live, {lease.ttl_s} s left of its lease"
            yield f"  etcd       {shown_key(key)} ({state})"
        if self.responses is not None:
            kept = self.responses
            yield f"  JetStream  {kept.bucket} ({kept.messages} messages, {kept.size_bytes} bytes of kept responses)"


def main(argv: Sequence[str] | None = None) -> None:
    """Exit status: 0 when the namespace is clear, 1 when something is left or not reached, 2 for a bad command line."""
    try:
        config = load(ClearNamespaceConfig, prog=PROG, description=_DESCRIPTION, argv=argv).config
        observe_logging.setup(config.log_level, "clear", config.log_format)
        is_clear = asyncio.run(clear(config, _read_confirmation))
    except ConfigError as exc:
        exit_with(PROG, exc)
    except Unreachable as exc:
        sys.stderr.write(f"{PROG}: {exc.message}\n")
        raise SystemExit(1) from exc
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(0 if is_clear else 1)


async def clear(config: ClearNamespaceConfig, confirm: Confirm) -> bool:
    """Return whether nothing is left. Raises Unreachable, and ConfigError when there is no terminal to ask on."""
    async with aclosing(EtcdStore(config.etcd_endpoints, tls_files(config))) as store:
        found = StaleRecords(
            instances=await store.leases(namespace_prefix(config.namespace)),
            responses=await bucket_info(config.nats_server, config.namespace),
        )
        if not found:
            _say(f"namespace {config.namespace} is clear")
            return True
        _say(f"namespace {config.namespace} has", *found.lines())
        if found.live and not config.force:
            _say(
                f"nothing is removed: {len(found.live)} of its instances live, or died less than a lease ago; "
                "stop them or wait, or give --force"
            )
            return False
        if not config.yes and not confirm():
            _say("nothing is removed")
            return False
        await _remove(store, config, found)
    _say("removed")
    return True


async def _remove(store: EtcdStore, config: ClearNamespaceConfig, found: StaleRecords) -> None:
    """A lease is revoked, which takes its key: a key alone would not come back while its worker renews the lease."""
    for key, lease in found.instances.items():
        await (store.delete(key) if lease is None else store.revoke(lease))
    if found.responses is not None:
        await delete_bucket(config.nats_server, config.namespace)


def _read_confirmation() -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on; give --yes", field="yes")
    sys.stdout.write("remove all of it? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in _YES


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
