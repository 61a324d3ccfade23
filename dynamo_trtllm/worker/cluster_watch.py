"""Follow in discovery what a worker needs to know of its cluster.

A decode worker may connect to the addresses of prefill workers only. An elastic worker shows the
shares that it has.
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

    `note_shares` is called with each share table; None: there is none any more.
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
