"""The publisher of KV events: prefix hashes, numbers, snapshots, and what happens when messages
can't be sent.
"""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from dynamo_trtllm.protocol import kv_events
from dynamo_trtllm.protocol.kv_events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvBlock,
    KvCacheUpdate,
    KvEventLimits,
    KvEventPublisher,
    pack_hashes,
    prefix_hashes,
    root_hash,
    unpack_hashes,
)
from dynamo_trtllm.protocol.messages import decode, token_ids
from tests.kit.waiting import SOON_S

PROMPT = token_ids(range(12))
A, B, C = prefix_hashes(PROMPT, 4, 0)  # the engine's names of these blocks are 1, 2 and 3


def stored(
    *names: int, parent: int | None = None, salt: str | None = None, window: int = 0
) -> BlocksStored:
    blocks = tuple(KvBlock(name, PROMPT[4 * name - 4 : 4 * name]) for name in names)
    return BlocksStored(blocks=blocks, parent=parent, cache_salt=salt, cache_group=window)


NO_IDLE_UPDATES = KvEventLimits(idle_s=3600)


class Reader:
    """Collects the updates of a publisher, which it accepts while `is_open`."""

    def __init__(self, limits: KvEventLimits = NO_IDLE_UPDATES) -> None:
        self.updates: list[KvCacheUpdate] = []
        self.is_open = True
        self.refused = 0
        self.changed = asyncio.Event()
        self.publisher = KvEventPublisher(5, self.take, limits)

    def take(self, data: bytes) -> bool:
        self.changed.set()
        if self.is_open:
            self.updates.append(decode(data, KvCacheUpdate))
        else:
            self.refused += 1
        return self.is_open

    async def until(self, count: int) -> list[KvCacheUpdate]:
        """Return the updates once there are `count`."""
        async with asyncio.timeout(SOON_S):
            while len(self.updates) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.updates

    async def blocks_after(self, *events: kv_events.KvEvent) -> set[int]:
        """Publish events and return the blocks of the next update."""
        count = len(self.updates)
        self.publisher.on_events(events)
        return set(unpack_hashes((await self.until(count + 1))[-1].stored))


def test_prefix_hashes_of_continued_prompt_equal_the_full_one() -> None:
    assert prefix_hashes(PROMPT[4:], 4, A) == [B, C]
    assert prefix_hashes(PROMPT[:7], 4, 0) == [A]
    assert prefix_hashes(PROMPT[4:8], 4, 0) != [B]


def test_prefix_hashes_when_salts_differ_then_no_block_is_equal() -> None:
    assert root_hash(None) == root_hash("") == 0
    salted = [prefix_hashes(PROMPT, 4, root_hash(salt)) for salt in ("a", "b", None)]
    assert len({block_hash for hashes in salted for block_hash in hashes}) == 9


def test_prefix_hashes_then_do_not_change_between_releases() -> None:
    assert prefix_hashes(token_ids([1, 2, 3, 4]), 2, root_hash("tenant")) == [
        13398016316182119870,
        7537757055044245673,
    ]


async def test_events_have_prefix_hashes_and_consecutive_numbers() -> None:
    reader = Reader()
    assert await reader.blocks_after(stored(1, 2), stored(3, parent=2)) == {A, B, C}
    reader.publisher.on_events([BlocksRemoved(hashes=(3, 99))])
    await reader.until(2)
    assert reader.updates == [
        KvCacheUpdate(instance_id=5, number=0, block_tokens=4, stored=pack_hashes([A, B, C])),
        KvCacheUpdate(instance_id=5, number=1, block_tokens=4, removed=pack_hashes([C])),
    ]


async def test_events_with_salt_have_hashes_of_the_salt() -> None:
    assert await Reader().blocks_after(stored(1, salt="a")) == set(
        prefix_hashes(PROMPT[:4], 4, root_hash("a"))
    )


async def test_events_with_unknown_parent_or_size_are_skipped() -> None:
    reader = Reader()
    odd = BlocksStored(blocks=(KvBlock(8, PROMPT[:3]),))
    assert await reader.blocks_after(stored(1), stored(3, parent=2), odd) == {A}
    assert reader.publisher.num_skipped == 2


async def test_events_of_two_ranks_remove_a_block_after_both() -> None:
    reader = Reader()
    other = BlocksStored(blocks=(KvBlock(7, PROMPT[:4]),), dp_rank=1)
    await reader.blocks_after(stored(1), other)
    assert await reader.blocks_after(
        BlocksRemoved(hashes=(1,)), stored(1, 2), BlocksRemoved(hashes=(1,))
    ) == {B}
    assert await reader.blocks_after(BlocksRemoved(hashes=(7,), dp_rank=1)) == set()
    assert [update.removed for update in reader.updates] == [b"", b"", pack_hashes([A])]


async def test_events_of_windows_publish_the_largest_only() -> None:
    reader = Reader()
    assert await reader.blocks_after(stored(1, 2, window=128)) == {A, B}
    assert await reader.blocks_after(stored(1, window=4096), stored(3, window=128)) == {A}
    assert reader.updates[-1].cleared


async def test_events_cleared_are_reported_before_stored() -> None:
    reader = Reader()
    await reader.blocks_after(stored(1, 2))
    assert await reader.blocks_after(BlocksCleared(), stored(1)) == {A}
    assert reader.updates[-1].cleared


async def test_events_after_clear_publish_ancestors_again() -> None:
    """The engine still has them, and reports nothing about them while it does: such as those of a
    system prompt.
    """
    reader = Reader()
    await reader.blocks_after(stored(1, 2))
    assert await reader.blocks_after(BlocksCleared(), stored(3, parent=2)) == {A, B, C}
    assert reader.updates[-1].cleared
    assert await reader.blocks_after(BlocksCleared(), BlocksCleared(), stored(3, parent=2)) == {
        A,
        B,
        C,
    }
    assert reader.publisher.num_skipped == 0


async def test_events_after_removed_cleared_block_are_skipped() -> None:
    reader = Reader()
    await reader.blocks_after(stored(1, 2))
    removed = BlocksRemoved(hashes=(1,))
    assert await reader.blocks_after(BlocksCleared(), removed, stored(3, parent=2), stored(1)) == {
        A
    }
    assert reader.publisher.num_skipped == 1


async def test_events_replaced_by_larger_window_stay_away() -> None:
    reader = Reader()
    await reader.blocks_after(stored(1, 2, window=128))
    assert await reader.blocks_after(stored(3, parent=2, window=4096), stored(1, window=4096)) == {
        A
    }


async def test_events_of_self_parented_cleared_block_are_skipped() -> None:
    reader = Reader()
    itself = BlocksStored(blocks=(KvBlock(1, PROMPT[4:8]),), parent=1)
    await reader.blocks_after(stored(1), itself)
    assert await reader.blocks_after(BlocksCleared(), stored(2, parent=1), stored(1)) == {A}


async def test_events_of_many_cleared_blocks_drop_the_oldest() -> None:
    reader = Reader(KvEventLimits(idle_s=3600, max_cleared=1))
    await reader.blocks_after(stored(1, 2))
    assert await reader.blocks_after(BlocksCleared(), stored(3, parent=2), stored(1)) == {A}


async def test_clear_of_one_rank_keeps_blocks_of_others() -> None:
    reader = Reader()
    shared = BlocksStored(blocks=(KvBlock(7, PROMPT[:4]),), dp_rank=1)
    await reader.blocks_after(stored(1, 2), shared)
    reader.publisher.on_events([BlocksCleared(dp_rank=0)])
    await reader.until(2)
    reader.publisher.on_events([BlocksCleared(dp_rank=0), BlocksCleared(dp_rank=1)])
    await reader.until(3)
    rows = [(update.cleared, update.removed) for update in reader.updates[1:]]
    assert rows == [(False, pack_hashes([B])), (True, b"")]


async def test_events_not_accepted_are_sent_later() -> None:
    reader = Reader()
    await reader.blocks_after(stored(1, 2, 3))
    reader.is_open = False
    reader.changed.clear()
    reader.publisher.on_events([BlocksRemoved(hashes=(3,))])
    async with asyncio.timeout(SOON_S):
        await reader.changed.wait()
    reader.publisher.on_events([BlocksRemoved(hashes=(1, 2)), stored(1)])
    reader.is_open = True
    _, first, second = await reader.until(3)
    assert reader.refused >= 1
    assert [first.number, second.number] == [1, 2]
    assert [first.removed, second.removed, second.stored] == [
        pack_hashes([C]),
        pack_hashes([B]),
        pack_hashes([A]),
    ]


async def test_events_with_too_many_removals_send_all_blocks() -> None:
    reader = Reader(KvEventLimits(idle_s=3600, max_removals=1))
    assert await reader.blocks_after(stored(1, 2, 3), BlocksRemoved(hashes=(2, 3))) == {A}
    assert reader.updates == [
        KvCacheUpdate(
            instance_id=5, number=0, block_tokens=4, cleared=True, stored=pack_hashes([A])
        )
    ]


async def test_resync_twice_sends_one_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_UPDATE_BLOCKS", 2)
    reader = Reader()
    reader.publisher.on_events([stored(1, 2, 3)])
    reader.publisher.resync()
    reader.publisher.resync()
    await reader.until(4)
    reader.publisher.on_events([BlocksRemoved(hashes=(3,))])
    await reader.until(5)
    rows = [
        (update.number, update.cleared, update.snapshot, unpack_hashes(update.stored))
        for update in reader.updates
    ]
    assert rows == [
        (0, False, 0, [A, B]),
        (1, False, 0, [C]),
        (2, True, 2, [A, B]),
        (3, False, 1, [C]),
        (4, False, 0, []),
    ]


async def test_resync_within_interval_waits() -> None:
    reader = Reader(KvEventLimits(idle_s=3600, resync_interval_s=3600))
    reader.publisher.resync()
    assert (await reader.until(1))[0].snapshot == 1
    reader.publisher.resync()
    assert await reader.blocks_after(stored(1)) == {A}
    assert [update.snapshot for update in reader.updates] == [1, 0]


async def test_events_paused_send_an_empty_update() -> None:
    reader = Reader(KvEventLimits(idle_s=0.01))
    await reader.blocks_after(stored(1))
    assert (await reader.until(2))[1] == KvCacheUpdate(instance_id=5, number=1, block_tokens=4)


def test_events_due_within_a_millisecond_work_with_uvloop() -> None:
    async def pause_and_go_on() -> None:
        reader = Reader(KvEventLimits(idle_s=1e-5, heartbeat_s=3600))
        await reader.blocks_after(stored(1))
        reader.publisher.on_events([stored(2, parent=1)])  # before the empty update
        assert (await reader.until(2))[1].stored == pack_hashes([B])

    uvloop.run(pause_and_go_on())


def test_events_paused_do_not_poll_with_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    num_flushes = 0
    flush = KvEventPublisher._flush

    def counted(publisher: KvEventPublisher) -> None:
        nonlocal num_flushes
        num_flushes += 1
        flush(publisher)

    async def pause() -> None:
        monkeypatch.setattr(KvEventPublisher, "_flush", counted)
        reader = Reader(KvEventLimits(idle_s=0.0054, heartbeat_s=0.0054))
        await reader.blocks_after(stored(1))
        await reader.until(11)
        reader.publisher.close()
        assert num_flushes <= 2 * len(reader.updates)

    uvloop.run(pause())


async def test_events_when_closed_then_nothing_is_sent() -> None:
    reader = Reader()
    reader.publisher.on_events([stored(1)])
    reader.publisher.close()
    reader.publisher.close()
    reader.publisher.on_events([stored(2, parent=1)])
    await asyncio.sleep(0.05)
    assert reader.updates == []
