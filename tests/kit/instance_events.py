"""Events of discovery about instances, without those about cards."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from dynamo_trtllm.cluster.discovery.discovery_interface import CardChosen, Discovery, Event


async def instance_events(discovery: Discovery, namespace: str) -> AsyncGenerator[Event, None]:
    """Yield the events of a watch, except CardChosen."""
    async with aclosing(discovery.watch(namespace)) as events:
        async for event in events:
            if not isinstance(event, CardChosen):
                yield event
