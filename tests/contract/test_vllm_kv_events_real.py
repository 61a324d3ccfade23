"""KV events from vLLM's own publisher over ZeroMQ, without an engine. Run with `pytest -m vllm`."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from dynamo_trtllm.engines.vllm.kv_events import KvEventSubscriber
from dynamo_trtllm.protocol.kv_events import BlocksCleared, BlocksStored, KvEvent
from tests.kit.waiting import SOON_S

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BLOCK = 4


class Ranks:
    """The publishers of two data-parallel ranks, and a subscriber with the events that it passed
    on.
    """

    def __init__(self) -> None:
        self.vllm: Any = importlib.import_module("vllm.distributed.kv_events")
        self.subscriber = KvEventSubscriber(2, importlib.import_module("zmq"))
        self.publishers = [
            self.vllm.ZmqEventPublisher(rank, **self.subscriber.config) for rank in range(2)
        ]
        self.received: asyncio.Queue[KvEvent] = asyncio.Queue()

    def publish(self, rank: int, *numbers: int) -> None:
        """Publish one batch for each block of this number."""
        for number in numbers:
            event = self.vllm.BlockStored(
                block_hashes=[number],
                parent_block_hash=None,
                token_ids=[number] * BLOCK,
                block_size=BLOCK,
                lora_id=None,
                medium="GPU",
                lora_name=None,
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            )
            self.publishers[rank].publish(self.vllm.KVEventBatch(ts=1.0 + number, events=[event]))

    def subscribe(self) -> None:
        def on_events(events: Sequence[KvEvent]) -> None:
            for event in events:
                self.received.put_nowait(event)

        self.subscriber.start(BLOCK, on_events)

    async def next(self, count: int) -> list[KvEvent]:
        """Return so many further events."""
        async with asyncio.timeout(SOON_S):
            return [await self.received.get() for _ in range(count)]


def stored(events: Sequence[KvEvent], rank: int) -> list[int]:
    """Return the blocks that a rank stored."""
    return [
        event.blocks[0].hash
        for event in events
        if isinstance(event, BlocksStored) and event.dp_rank == rank
    ]


@pytest_asyncio.fixture
async def ranks() -> AsyncIterator[Ranks]:
    made = Ranks()
    yield made
    for publisher in made.publishers:
        publisher.shutdown()
    await asyncio.to_thread(made.subscriber.close)


async def test_events_before_subscription_are_received_once(ranks: Ranks) -> None:
    ranks.publish(0, 1, 2)
    ranks.publish(1, 7)
    ranks.subscribe()
    early = await ranks.next(3)
    assert (stored(early, 0), stored(early, 1)) == ([1, 2], [7])
    ranks.publish(0, *range(3, 50))
    ranks.publish(1, 8)
    later = await ranks.next(48)
    assert (stored(later, 0), stored(later, 1)) == ([*range(3, 50)], [8])


async def test_events_lost_beyond_the_buffer_reset_readers(ranks: Ranks) -> None:
    steps = ranks.subscriber.config["buffer_steps"]
    ranks.publish(0, *range(steps + 5))
    await asyncio.to_thread(ranks.publishers[0]._event_queue.join)
    ranks.subscribe()
    first, *others = await ranks.next(steps + 1)
    assert first == BlocksCleared(dp_rank=0)
    assert stored(others, 0) == [*range(5, steps + 5)]


async def test_close_while_reading_ends_thread_and_removes_folder(ranks: Ranks) -> None:
    folder = ranks.subscriber._folder
    assert folder.stat().st_mode & 0o777 == 0o700
    ranks.subscribe()
    ranks.publish(0, 1)
    await ranks.next(1)
    for _ in range(2):
        await asyncio.to_thread(ranks.subscriber.close)
    assert not folder.exists()
