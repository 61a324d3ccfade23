"""The publisher of KV events: numbers, batches, and what happens when messages can't be sent."""

from __future__ import annotations

import asyncio
import logging

import pytest

from dynamo_trtllm import kv_events
from dynamo_trtllm.kv_events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvBlock,
    KvEvent,
    KvEventPublisher,
    KvEvents,
)
from dynamo_trtllm.messages import decode, token_ids
from tests.waiting import SOON_S

REMOVED = BlocksRemoved(hashes=(1, (1 << 64) - 1), cache_group=128, dp_rank=1)


def stored(tokens: int) -> BlocksStored:
    return BlocksStored(blocks=(KvBlock(7, token_ids(range(tokens))),), parent=3, cache_salt="s")


class Reader:
    """Accepts messages while `is_open`, and is set to the events that it got."""

    def __init__(self) -> None:
        self.messages: list[KvEvents] = []
        self.is_open = True
        self.refused = 0
        self.changed = asyncio.Event()
        self.publisher = KvEventPublisher(5, self.take)

    def take(self, data: bytes) -> bool:
        self.changed.set()
        if self.is_open:
            self.messages.append(decode(data, KvEvents))
        else:
            self.refused += 1
        return self.is_open

    async def until(self, count: int) -> list[KvEvent]:
        async with asyncio.timeout(SOON_S):
            while sum(len(each.events) for each in self.messages) < count:
                self.changed.clear()
                await self.changed.wait()
        return [event for each in self.messages for event in each.events]


async def test_events_when_published_then_decoded_equal_and_numbered_without_gaps() -> None:
    reader = Reader()
    reader.publisher.on_events([stored(32), REMOVED])
    reader.publisher.on_events([BlocksCleared()])
    assert await reader.until(3) == [stored(32), REMOVED, BlocksCleared()]
    assert len(reader.messages) == 1
    reader.publisher.on_events([REMOVED])
    await reader.until(4)
    assert [(each.instance_id, each.first) for each in reader.messages] == [(5, 0), (5, 3)]


async def test_events_when_large_then_in_several_messages() -> None:
    reader = Reader()
    reader.publisher.on_events([stored(30_000)] * 9)
    assert await reader.until(9) == [stored(30_000)] * 9
    assert [(each.first, len(each.events)) for each in reader.messages] == [(0, 3), (3, 3), (6, 3)]


async def test_events_when_not_accepted_then_sent_later_in_order() -> None:
    reader = Reader()
    reader.is_open = False
    reader.publisher.on_events([REMOVED])
    async with asyncio.timeout(SOON_S):
        await reader.changed.wait()
    reader.publisher.on_events([stored(1)])
    reader.is_open = True
    assert await reader.until(2) == [REMOVED, stored(1)]
    assert reader.refused >= 1


async def test_events_when_too_many_wait_then_readers_forget_this_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_events, "_MAX_PENDING_BYTES", 1000)
    reader = Reader()
    reader.is_open = False
    with caplog.at_level(logging.WARNING):
        reader.publisher.on_events([stored(200), stored(200)])
    assert "KV events dropped" in caplog.text
    reader.publisher.on_events([REMOVED])
    reader.is_open = True
    assert await reader.until(2) == [BlocksCleared(), REMOVED]
    assert [each.first for each in reader.messages] == [0]


async def test_events_when_closed_then_nothing_is_sent() -> None:
    reader = Reader()
    reader.publisher.on_events([REMOVED])
    reader.publisher.close()
    reader.publisher.close()
    await asyncio.sleep(0.05)
    assert reader.messages == []
