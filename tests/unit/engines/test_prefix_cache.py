"""The prefix cache of the mock and torch engines: what it reuses, evicts and reports."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

import pytest

from dynamo_trtllm.engines.prefix_cache import CachedBlock, PrefixCache
from dynamo_trtllm.kv_events import BlocksRemoved, BlocksStored, KvEvent
from dynamo_trtllm.messages import token_ids

SIZE = 4


class Reader:
    """What a router knows of a cache from its events: the tokens up to the end of each block, with the salt."""

    def __init__(self, cache: PrefixCache) -> None:
        self.prefixes: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        cache.on_events = self.read

    def read(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                before = () if event.parent is None else self.prefixes[event.parent][1]
                for block in event.blocks:
                    before += tuple(block.token_ids)
                    assert block.hash not in self.prefixes
                    self.prefixes[block.hash] = (event.cache_salt, before)
            elif isinstance(event, BlocksRemoved):
                for each in event.hashes:
                    del self.prefixes[each]

    def match(self, prompt: Sequence[int], salt: str | None) -> int:
        """Return how many blocks of a prompt the cache has."""
        known = set(self.prefixes.values())
        matched = 0
        while (salt, tuple(prompt[: (matched + 1) * SIZE])) in known and (matched + 1) * SIZE <= len(prompt):
            matched += 1
        return matched


class Pool:
    """Block numbers of an engine, as an engine uses the cache."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = PrefixCache(SIZE)
        self.reader = Reader(self.cache)
        self.free = list(range(num_blocks))
        self.written: dict[int, tuple[str | None, tuple[int, ...]]] = {}  # content of each block

    def begin(self, prompt: Sequence[int], salt: str | None = None) -> tuple[list[CachedBlock], list[int]] | None:
        """Reserve the blocks of a prompt and compute it. Return its cached blocks and the numbers of all."""
        needed = -(-len(prompt) // SIZE)
        reserved = self.cache.reserve(token_ids(prompt), salt, needed, len(self.free))
        if reserved is None:
            return None
        self.free += reserved.evicted
        table = [block.number for block in reserved.reused]
        for index, number in enumerate(table):
            assert self.written[number] == (salt, tuple(prompt[: (index + 1) * SIZE]))
        while len(table) < needed:
            table.append(self.free.pop())
            self.written[table[-1]] = (salt, tuple(prompt[: len(table) * SIZE]))
        return reserved.reused, table

    def store(self, prompt: Sequence[int], salt: str | None, chain: list[CachedBlock], table: list[int]) -> None:
        self.cache.store(token_ids(prompt), salt, chain, table[len(chain) :])

    def end(self, chain: list[CachedBlock], table: list[int]) -> None:
        own = [at for index, at in enumerate(table) if index >= len(chain) or chain[index].number != at]
        self.free += own + self.cache.release(chain)

    def run(self, prompt: Sequence[int], salt: str | None = None) -> int:
        """Run a request alone. Return how many blocks it reused."""
        begun = self.begin(prompt, salt)
        assert begun is not None
        chain, table = begun
        reused = len(chain)
        self.store(prompt, salt, chain, table)
        self.end(chain, table)
        return reused


def test_reserve_when_a_prompt_comes_again_then_its_last_token_is_not_reused() -> None:
    pool = Pool(10)
    assert [pool.run(range(12)), pool.run(range(12)), pool.run(range(13)), pool.run(range(3))] == [0, 2, 3, 0]
    assert pool.run([*range(8), 99, 99, 99, 99, 99]) == 2


def test_reserve_when_salts_differ_then_nothing_is_reused() -> None:
    pool = Pool(10)
    assert [pool.run(range(9), salt) for salt in ("a", "b", None, "a", "b", None)] == [0, 0, 0, 2, 2, 2]
    assert {salt for salt, _ in pool.reader.prefixes.values()} == {"a", "b", None}


def test_reserve_when_blocks_are_short_then_the_least_recently_used_are_evicted_from_their_ends() -> None:
    pool = Pool(7)
    for start in (100, 200):
        pool.run(range(start, start + 12))
    assert pool.run(range(100, 109)) == 2
    for start in (300, 400):
        pool.run(range(start, start + 8))
    assert [pool.reader.match(range(start, start + 12), None) for start in (100, 200, 300, 400)] == [2, 1, 2, 2]


def test_reserve_when_the_others_are_in_use_then_none_and_nothing_changes() -> None:
    pool = Pool(4)
    pool.run(range(8))
    first = pool.begin(range(100, 108))
    assert first is not None
    assert pool.begin([*range(8), *range(50, 59)]) is None
    assert pool.cache.num_unused == 2
    pool.end(*first)
    assert pool.begin([*range(8), *range(50, 58)]) is not None


def test_forget_when_in_use_then_not_reused_and_free_after_the_last_use() -> None:
    pool = Pool(7)
    pool.run(range(9))
    first, second = pool.begin(range(9)), pool.begin(range(9))
    assert first is not None
    assert second is not None
    pool.cache.forget(first[0])
    assert pool.reader.prefixes == {}
    assert pool.run(range(9)) == 0
    pool.end(*first)
    free = len(pool.free)
    pool.end(*second)
    assert len(pool.free) == free + 3


@pytest.mark.parametrize("seed", range(3))
def test_cache_when_used_at_random_then_reuse_is_right_events_agree_and_no_block_is_lost(seed: int) -> None:
    draw = random.Random(seed)
    pool = Pool(24)
    running: dict[int, tuple[list[int], str | None, list[CachedBlock], list[int]]] = {}
    numbers = count()
    for _ in range(600):
        if running and draw.random() < 0.5:
            prompt, salt, chain, table = running.pop(draw.choice(list(running)))
            if draw.random() < 0.9:
                pool.store(prompt[: draw.randrange(len(prompt) + 1)], salt, chain, table)
                pool.store(prompt, salt, chain, table)
            if draw.random() < 0.05:
                pool.cache.forget(chain)
            pool.end(chain, table)
        else:
            prompt = [draw.randrange(2) + index for index in range(draw.randrange(1, 25))]
            salt = draw.choice([None, None, "a"])
            known = pool.reader.match(prompt[:-1], salt)
            begun = pool.begin(prompt, salt)
            if begun is not None:
                assert len(begun[0]) == known
                running[next(numbers)] = (prompt, salt, *begun)
        in_use = {number for _, _, _, table in running.values() for number in table}
        assert not in_use & set(pool.free)
    for *_, chain, table in running.values():
        pool.end(chain, table)
    assert len(pool.free) + pool.cache.num_unused == len(set(pool.written) | set(pool.free)) == 24
