"""Follow the registered workers and the table of shares in discovery.

A decode worker needs the addresses of prefill workers, because it may connect to no others. An
elastic worker shows its own shares.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing

from dynamo_trtllm.cluster.discovery.discovery_interface import (
    Added,
    Discovery,
    Removed,
    SharesChanged,
)
from dynamo_trtllm.kv_transfer.prefill_addresses import PrefillAddresses
from dynamo_trtllm.protocol.shares import ShareTable


async def follow_cluster(
    discovery: Discovery,
    namespace: str,
    addresses: PrefillAddresses,
    note_shares: Callable[[ShareTable | None], None],
) -> None:
    """Pass each registered or removed instance to `addresses`, until cancelled.

    `note_shares` is called with each new share table, and with None once the table is removed.
    """
    async with aclosing(discovery.watch(namespace)) as events:
        async for event in events:
            match event:
                case Added(instance):
                    addresses.add(instance)
                case Removed(instance_id):
                    addresses.remove(instance_id)
                case SharesChanged(table):
                    note_shares(table)
