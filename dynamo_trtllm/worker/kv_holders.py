"""Follow in discovery to which addresses of prefill workers a decode worker may connect."""

from __future__ import annotations

from contextlib import aclosing

from dynamo_trtllm.cluster.discovery.discovery_interface import Added, Discovery, Removed
from dynamo_trtllm.kv_transfer.holders import HolderAddresses


async def follow_holders(discovery: Discovery, namespace: str, holders: HolderAddresses) -> None:
    """Pass each registered or removed instance to `holders`, until cancelled."""
    async with aclosing(discovery.watch(namespace)) as events:
        async for event in events:
            if isinstance(event, Added):
                holders.add(event.instance)
            elif isinstance(event, Removed):
                holders.remove(event.instance_id)
