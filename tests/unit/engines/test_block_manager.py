"""The KV blocks of the mock and torch engines: which are reserved, reused, evicted and reported."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

from dynamo_trtllm.engines.block_manager import BlockManager, BlockTable
from dynamo_trtllm.protocol.kv_events import BlocksRemoved, BlocksStored, KvEvent
from dynamo_trtllm.protocol.messages import token_ids

SIZE = 4


class Reader:
    """A reader of KV events. It knows the tokens up to the end of each block, with the salt."""

    def __init__(self, manager: BlockManager) -> None:
        self.prefixes: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        manager.on_events = self.read

    def read(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                before = () if event.parent is None else self.prefixes[event.parent][1]
                for block in event.blocks:
                    before += tuple(block.token_ids)
                    assert block.hash not in self.prefixes
                    self.prefixes[block.hash] = (event.cache_salt, before)
            elif isinstance(event, BlocksRemoved):
                for name in event.hashes:
                    del self.prefixes[name]

    def match(self, prompt: Sequence[int], salt: str | None) -> int:
        """Return how many blocks of a prompt the cache has."""
        known = set(self.prefixes.values())
        matched = 0
        while (salt, tuple(prompt[: (matched + 1) * SIZE])) in known and (
            matched + 1
        ) * SIZE <= len(prompt):
            matched += 1
        return matched


class Pool:
    """The blocks of an engine, which uses its manager."""

    def __init__(self, num_blocks: int) -> None:
        self.manager = BlockManager(num_blocks, SIZE, has_prefix_cache=True)
        self.reader = Reader(self.manager)
        self.written: dict[int, tuple[str | None, tuple[int, ...]]] = {}  # content of each block

    def begin(self, prompt: Sequence[int], salt: str | None = None) -> BlockTable | None:
        """Reserve the blocks of a prompt and compute it."""
        table = BlockTable()
        if not self.manager.reserve(table, token_ids(prompt), salt, -(-len(prompt) // SIZE)):
            assert (table.numbers, table.chain) == ([], [])
            return None
        for index, number in enumerate(table.numbers):
            content = (salt, tuple(prompt[: (index + 1) * SIZE]))
            if index < len(table.chain):
                assert self.written[number] == content
            self.written[number] = content
        return table

    def store(self, prompt: Sequence[int], salt: str | None, table: BlockTable) -> None:
        self.manager.store(table, token_ids(prompt), salt)

    def run(self, prompt: Sequence[int], salt: str | None = None) -> int:
        """Run a request alone. Return how many blocks it reused."""
        table = self.begin(prompt, salt)
        assert table is not None
        reused = len(table.chain)
        self.store(prompt, salt, table)
        self.manager.free(table)
        return reused


def test_reserve_repeated_prompt_does_not_reuse_last_token() -> None:
    pool = Pool(10)
    assert [pool.run(range(12)), pool.run(range(12)), pool.run(range(13)), pool.run(range(3))] == [
        0,
        2,
        3,
        0,
    ]
    assert pool.run([*range(8), 99, 99, 99, 99, 99]) == 2


def test_reserve_when_salts_differ_then_nothing_is_reused() -> None:
    pool = Pool(10)
    assert [pool.run(range(9), salt) for salt in ("a", "b", None, "a", "b", None)] == [
        0,
        0,
        0,
        2,
        2,
        2,
    ]
    assert {salt for salt, _ in pool.reader.prefixes.values()} == {"a", "b", None}


def test_reserve_evicts_least_recently_used_from_the_end() -> None:
    pool = Pool(7)
    for start in (100, 200):
        pool.run(range(start, start + 12))
    assert pool.run(range(100, 109)) == 2
    for start in (300, 400):
        pool.run(range(start, start + 8))
    assert [
        pool.reader.match(range(start, start + 12), None) for start in (100, 200, 300, 400)
    ] == [2, 1, 2, 2]


def test_reserve_without_free_blocks_changes_nothing() -> None:
    pool = Pool(4)
    pool.run(range(8))
    first = pool.begin(range(100, 108))
    assert first is not None
    assert pool.begin([*range(8), *range(50, 59)]) is None
    assert pool.manager.num_used == 2
    pool.manager.free(first)
    assert pool.begin([*range(8), *range(50, 58)]) is not None


def test_reserve_takes_freed_blocks_again() -> None:
    manager = BlockManager(20, SIZE, has_prefix_cache=True)
    first = BlockTable()
    second = BlockTable()
    assert manager.reserve(first, None, None, 3)
    numbers = first.numbers
    assert (len(numbers), manager.num_used) == (3, 3)
    manager.free(first)
    manager.free(first)
    assert manager.reserve(second, None, None, 3)
    assert (second.numbers, manager.num_used) == (numbers, 3)


def test_reserve_without_prefix_cache_reuses_nothing() -> None:
    manager = BlockManager(20, SIZE, has_prefix_cache=False)
    for _ in range(2):
        table = BlockTable()
        assert manager.reserve(table, token_ids(range(9)), None, 3)
        manager.store(table, token_ids(range(9)), None)
        assert table.chain == []
        manager.free(table)
    assert manager.num_used == 0


@pytest.mark.parametrize("change", ["store", "free"])
def test_reserve_looks_up_again_only_after_a_change(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[int] = []

    def counted(manager: BlockManager, *args: Any) -> Any:
        looked_up.append(1)
        return match(manager, *args)

    match = BlockManager._match
    monkeypatch.setattr(BlockManager, "_match", counted)
    manager = BlockManager(10, SIZE, has_prefix_cache=True)
    ids = token_ids(range(25))
    other, running, first, second = (BlockTable() for _ in range(4))
    assert manager.reserve(other, ids, None, 1)
    manager.store(other, ids[:4], "another salt")
    assert manager.reserve(running, ids, None, 6)
    assert [manager.reserve(first, ids, None, 7) for _ in range(3)] == [False] * 3
    assert len(looked_up) == 2
    assert not manager.reserve(second, ids, None, 7)  # another one may need fewer blocks
    assert len(looked_up) == 3
    if change == "store":  # it can use blocks that are in use
        manager.store(running, ids[:24], None)
    else:
        manager.free(running)
    assert manager.reserve(first, ids, None, 7)
    assert len(looked_up) == 4


def test_forget_in_use_frees_after_the_last_use() -> None:
    pool = Pool(7)
    pool.run(range(9))
    first = pool.begin(range(9))
    second = pool.begin(range(9))
    assert first is not None
    assert second is not None
    pool.manager.forget(first)
    assert pool.reader.prefixes == {}
    assert pool.run(range(9)) == 0
    assert first.uncached_blocks() == first.numbers[2:]
    pool.manager.free(first)
    assert pool.manager.num_used == 3
    pool.manager.free(second)
    assert pool.manager.num_used == 0


@pytest.mark.parametrize("seed", range(3))
def test_cache_used_at_random_loses_no_block(seed: int) -> None:
    draw = random.Random(seed)
    pool = Pool(24)
    running: dict[int, tuple[list[int], str | None, BlockTable]] = {}
    numbers = count()
    for _ in range(600):
        if running and draw.random() < 0.5:
            prompt, salt, table = running.pop(draw.choice(list(running)))
            if draw.random() < 0.9:
                pool.store(prompt[: draw.randrange(len(prompt) + 1)], salt, table)
                pool.store(prompt, salt, table)
            if draw.random() < 0.05:
                pool.manager.forget(table)
            pool.manager.free(table)
        else:
            prompt = [draw.randrange(2) + index for index in range(draw.randrange(1, 25))]
            salt = draw.choice([None, None, "a"])
            known = pool.reader.match(prompt[:-1], salt)
            begun = pool.begin(prompt, salt)
            if begun is not None:
                assert len(begun.chain) == known
                running[next(numbers)] = (prompt, salt, begun)
        tables = [table for _, _, table in running.values()]
        own = [number for table in tables for number in table.uncached_blocks()]
        cached = {block.number for table in tables for block in table.chain}
        assert len(set(own)) == len(own)
        assert not cached & set(own)
        assert pool.manager.num_used == len(own) + len(cached)
    for *_, table in running.values():
        pool.manager.free(table)
    assert pool.manager.num_used == 0
