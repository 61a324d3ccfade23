"""Follow in discovery to which addresses of prefill workers a decode worker may connect."""

from __future__ import annotations

from contextlib import aclosing

from dynamo_trtllm.cluster.discovery.discovery_interface import Added, Discovery, Removed
from dynamo_trtllm.kv_transfer.prefill_addresses import PrefillAddresses


async def follow_prefill_workers(
    discovery: Discovery, namespace: str, addresses: PrefillAddresses
) -> None:
    """Pass each registered or removed instance to `addresses`, until cancelled."""
    async with aclosing(discovery.watch(namespace)) as events:
        async for event in events:
            if isinstance(event, Added):
                addresses.add(event.instance)
            elif isinstance(event, Removed):
                addresses.remove(event.instance_id)
