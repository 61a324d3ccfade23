"""What the router knows of prefix caches, compared with a naive model of the engines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping

import msgspec
import pytest

from dynamo_trtllm.frontend.routing import prefix_index
from dynamo_trtllm.frontend.routing.prefix_index import ClusterPrefixes, PromptHashes
from dynamo_trtllm.protocol import kv_events
from dynamo_trtllm.protocol.kv_events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvBlock,
    KvCacheUpdate,
    KvEvent,
    KvEventLimits,
    KvEventPublisher,
    pack_hashes,
)
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    Instance,
    Role,
    Sampling,
    decode,
    token_ids,
)
from tests.kit.instances import make_instance

BLOCK = 4
MODEL = make_instance(1).card.name


def instance(
    instance_id: int, *, has_events: bool = True, block: int = BLOCK, role: Role = Role.DECODE
) -> Instance:
    made = make_instance(instance_id, role=role)
    layout = msgspec.structs.replace(made.layout, block_tokens=block)
    return msgspec.structs.replace(made, layout=layout, publishes_kv_events=has_events)


def prompt(
    blocks: list[int], *, salt: str | None = None, scores: int | None = None
) -> PromptHashes:
    """Return a prompt of blocks of equal tokens, and one more token, which no engine reuses."""
    sampling = Sampling(max_tokens=1, prompt_logprobs=scores)
    ids = token_ids([*(token for token in blocks for _ in range(BLOCK)), 9])
    return PromptHashes(
        GenerateRequest(
            request_id="r",
            model=MODEL,
            token_ids=ids,
            sampling=sampling,
            deadline=0.0,
            cache_salt=salt,
        )
    )


def overlaps_of(
    known: ClusterPrefixes, asked: PromptHashes, role: Role = Role.DECODE, now: float = 0.0
) -> dict[int, int]:
    found = known.overlaps(asked, now)
    return dict(zip(names := found.deepest(role, 100), found.of(names), strict=True))


def overlaps(known: ClusterPrefixes, blocks: list[int], role: Role = Role.DECODE) -> dict[int, int]:
    return overlaps_of(known, prompt(blocks), role)


def snapshot(
    instance_id: int, blocks: list[int], number: int = 0, block: int = BLOCK
) -> KvCacheUpdate:
    stored = pack_hashes(prompt(blocks).of(block))
    return KvCacheUpdate(
        instance_id=instance_id,
        number=number,
        block_tokens=block,
        cleared=True,
        stored=stored,
        snapshot=1,
    )


class NaiveCache:
    """The prefix cache of one engine: a set of prefixes, each a list of blocks.

    It evicts the ends of prefixes.
    """

    def __init__(self, rnd: random.Random) -> None:
        self._rnd = rnd
        self._prefixes: set[tuple[int, ...]] = set()
        self._names: dict[tuple[int, ...], int] = {}

    def _name(self, prefix: tuple[int, ...]) -> int:
        return self._names.setdefault(prefix, len(self._names))

    def change(self) -> KvEvent | None:
        kind = self._rnd.random()
        if kind < 0.02:
            self._prefixes.clear()
            return BlocksCleared()
        ends = [
            prefix
            for prefix in self._prefixes
            if not any(other[:-1] == prefix for other in self._prefixes)
        ]
        if kind < 0.4 and ends:
            end = self._rnd.choice(sorted(ends))
            self._prefixes.discard(end)
            return BlocksRemoved(hashes=(self._name(end),))
        blocks = tuple(random_blocks(self._rnd))
        new = [
            blocks[:end] for end in range(1, len(blocks) + 1) if blocks[:end] not in self._prefixes
        ]
        self._prefixes.update(new)
        if not new:
            return None
        stored = tuple(KvBlock(self._name(block), token_ids([block[-1]] * BLOCK)) for block in new)
        parent = new[0][:-1]
        return BlocksStored(blocks=stored, parent=self._name(parent) if parent else None)

    def overlap(self, blocks: list[int]) -> int:
        return BLOCK * max(
            (end for end in range(len(blocks) + 1) if tuple(blocks[:end]) in self._prefixes),
            default=0,
        )


def common(blocks: list[int], others: list[int]) -> int:
    """Return how many blocks at the start are the same."""
    return next(
        (at for at, pair in enumerate(zip(blocks, others, strict=False)) if pair[0] != pair[1]),
        min(len(blocks), len(others)),
    )


def random_blocks(rnd: random.Random) -> list[int]:
    return [rnd.randrange(2) for _ in range(rnd.randint(1, 8))]


def reader_of(instance_ids: Iterable[int]) -> ClusterPrefixes:
    reader = ClusterPrefixes()
    for instance_id in instance_ids:
        reader.add_instance(instance(instance_id))
    return reader


def check_overlaps(
    reader: ClusterPrefixes, engines: Mapping[int, NaiveCache], rnd: random.Random
) -> None:
    """Check what a reader knows about prompts against the caches of the engines."""
    assert not reader.unsynced
    for _ in range(50):
        blocks = random_blocks(rnd)
        found = {instance_id: engine.overlap(blocks) for instance_id, engine in engines.items()}
        cached = {instance_id: tokens for instance_id, tokens in found.items() if tokens}
        assert overlaps(reader, blocks) == cached


@pytest.mark.parametrize("seed", range(4))
async def test_known_prefixes_after_resync_equal_engine_caches(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MAX_UPDATE_BLOCKS", 3)
    rnd = random.Random(seed)
    engines = {instance_id: NaiveCache(rnd) for instance_id in (1, 2, 3)}
    readers = [reader_of(engines), reader_of(engines)]
    loss = 0.1
    silent = set(engines)  # publishers that have sent nothing since updates stopped to be lost
    delivered = asyncio.Event()

    def deliver(data: bytes) -> bool:
        update = decode(data, KvCacheUpdate)
        silent.discard(update.instance_id)
        for reader in readers:
            if rnd.random() >= loss:
                reader.on_update(update)
        delivered.set()
        return True

    timing = KvEventLimits(interval_s=0, resync_interval_s=0, idle_s=3600)
    publishers = {
        instance_id: KvEventPublisher(instance_id, deliver, timing) for instance_id in engines
    }

    async def change(instance_id: int) -> None:
        if (event := engines[instance_id].change()) is not None:
            publishers[instance_id].on_events([event])
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.0)

    async def resync() -> None:
        for instance_id in {unsynced for reader in readers for unsynced in reader.unsynced}:
            publishers[instance_id].resync()
        for _ in range(3):
            await asyncio.sleep(0.0)

    for _ in range(300):
        await change(rnd.choice([*engines]))
        if rnd.random() < 0.05:
            await resync()
    loss = 0.0
    silent = set(engines)
    for publisher in publishers.values():
        publisher._idle_at = 0.0
        publisher.on_events([])  # an empty update shows a gap, if the last update was lost
    async with asyncio.timeout(30):
        # Publishers send by the clock, a little later than in the next turn of the event loop.
        while silent:
            delivered.clear()
            await delivered.wait()
        while any(reader.unsynced for reader in readers):
            delivered.clear()
            await resync()
            await delivered.wait()
    for reader in readers:
        check_overlaps(reader, engines, rnd)
    for publisher in publishers.values():
        publisher.close()


def test_overlaps_after_partial_snapshot_stay_out_of_sync() -> None:
    known = ClusterPrefixes()
    known.add_instance(instance(1))
    whole = snapshot(1, [1, 2])
    known.on_update(msgspec.structs.replace(whole, cleared=False, number=1))
    assert known.unsynced == {1}
    assert overlaps(known, [1, 2]) == {}
    known.on_update(snapshot(1, [1, 2], number=2))
    assert known.unsynced == set()
    assert overlaps(known, [1, 2]) == {1: 2 * BLOCK}
    known.on_update(snapshot(1, [], number=3))  # for another reader
    assert overlaps(known, [1, 2]) == {1: 2 * BLOCK}


def test_overlaps_malformed_update_shows_as_a_gap() -> None:
    known = ClusterPrefixes()
    known.add_instance(instance(1))
    known.on_update(snapshot(1, [1]))
    with pytest.raises(ValueError, match="bytes length not a multiple"):
        known.on_update(KvCacheUpdate(instance_id=1, number=1, stored=b"123"))
    known.on_update(KvCacheUpdate(instance_id=1, number=2))
    assert known.unsynced == {1}


def test_overlaps_are_absent_for_other_salts_or_scoring() -> None:
    known = ClusterPrefixes()
    known.add_instance(instance(1))
    known.on_update(snapshot(1, [1, 2]))
    assert overlaps(known, [1, 2, 3]) == {1: 2 * BLOCK}
    for asked in (prompt([1, 2], salt="tenant"), prompt([1, 2], scores=0)):
        assert overlaps_of(known, asked) == {}


def test_overlaps_are_in_tokens_for_any_block_size() -> None:
    known = ClusterPrefixes()
    known.add_instance(instance(1))
    known.add_instance(instance(2, block=16))
    known.on_update(snapshot(1, [1, 2, 3]))
    known.on_update(snapshot(2, [1, 2, 3], block=2 * BLOCK))
    assert overlaps(known, [1, 2, 3]) == {1: 3 * BLOCK, 2: 2 * BLOCK}
    assert known.overlaps(prompt([1, 2, 3]), 0.0).of([3]) == [0]


def test_overlaps_count_only_instances_of_the_role() -> None:
    known = ClusterPrefixes()
    for name, role in ((1, Role.PREFILL), (2, Role.DECODE)):
        known.add_instance(instance(name, role=role))
        known.on_update(snapshot(name, [1]))
    assert overlaps(known, [1], Role.PREFILL) == {1: BLOCK}
    assert overlaps(known, [1], Role.DECODE) == {2: BLOCK}


def test_overlaps_reuse_the_place_of_a_gone_instance() -> None:
    known = ClusterPrefixes()
    for name in (1, 2):
        known.add_instance(instance(name))
        known.on_update(snapshot(name, [1]))
    known.remove_instance(1)
    known.remove_instance(1)
    known.add_instance(instance(3))
    known.on_update(snapshot(1, [1]))
    assert overlaps(known, [1]) == {2: BLOCK}


def test_deepest_of_equal_instances_take_turns() -> None:
    known = ClusterPrefixes()
    for name in range(1, 9):
        known.add_instance(instance(name))
        known.on_update(snapshot(name, [1, 2] if name == 5 else [1]))
    found = [known.overlaps(prompt([1, 2, 3]), 0.0).deepest(Role.DECODE, 3) for _ in range(8)]
    assert {match[0] for match in found} == {5}
    assert {name for match in found for name in match[1:]} == {1, 2, 3, 4, 6, 7, 8}
    assert all(len(match) == 3 for match in found)
    assert len(overlaps(known, [1])) == 8


def test_prompts_do_not_count_where_nothing_is_cached() -> None:
    known = ClusterPrefixes()
    made = instance(1, has_events=False)
    known.add_instance(msgspec.structs.replace(made, reuses_prefixes=False))
    sent = known.record_sent(prompt([1, 2, 3]), 1, now=0)
    sent.is_computed = True
    sent.end()
    assert overlaps(known, [1, 2, 3]) == {}


@pytest.mark.parametrize("has_events", [False, True])
def test_overlaps_of_many_depths_are_exact_and_sorted(has_events: bool) -> None:
    rnd = random.Random(1)
    known = ClusterPrefixes()
    asked = [*range(100)]
    depths = dict(enumerate(rnd.choices(range(101), k=150)))
    for name, depth in depths.items():
        known.add_instance(instance(name, has_events=has_events))
        blocks = asked[:depth] + [200] * rnd.randrange(3)
        if has_events:
            known.on_update(snapshot(name, blocks))
        else:
            known.record_sent(prompt(blocks), name, now=0)
    for length in (1, 2, 3, 50, 99, 100):
        found = known.overlaps(prompt(asked[:length]), 0.0)
        exact = {name: min(depth, length) for name, depth in depths.items()}
        assert [tokens // BLOCK for tokens in found.of([*exact])] == [*exact.values()]
        for limit in (1, 2, 4, 16):
            deepest = found.deepest(Role.DECODE, limit)
            assert len(set(deepest)) == len(deepest)
            longest = sorted(filter(None, exact.values()), reverse=True)[:limit]
            assert [exact[name] for name in deepest] == longest


@pytest.mark.parametrize("seed", range(4))
def test_record_sent_counts_until_expiry(seed: int) -> None:
    rnd = random.Random(seed)
    known = ClusterPrefixes(ttl_s=10)
    now = 0
    sent: list[tuple[int, int, list[int]]] = []
    for name in (1, 2, 3):
        known.add_instance(instance(name, has_events=False))
    for _ in range(200):
        now += rnd.choice((0, 0, 1, 1, 2, 15))
        for _ in range(rnd.randrange(3)):
            sent.append((now, rnd.randint(1, 3), random_blocks(rnd) * 3))
            known.record_sent(prompt(sent[-1][2]), sent[-1][1], now)
        asked = rnd.choice(sent)[2] if sent else [1]
        found = known.overlaps(prompt(asked), now)
        for name in (1, 2, 3):
            alive = [blocks for sent_s, to, blocks in sent if to == name and sent_s + 10 > now]
            naive = BLOCK * max((common(blocks, asked) for blocks in alive), default=0)
            assert found.of([name]) == [naive]


def test_overlaps_drop_expired_prompts_without_new_ones() -> None:
    known = ClusterPrefixes(ttl_s=10)
    known.add_instance(instance(1, has_events=False))
    for number in range(200):
        known.record_sent(prompt([number]), 1, now=0)
    assert overlaps_of(known, prompt([199]), now=9) == {1: BLOCK}
    found = known.overlaps(prompt([199]), 10)
    assert (found.deepest(Role.DECODE, 1), found.of([1])) == ([1], [0])
    for _ in range(10):
        known.overlaps(prompt([199]), 10)
    assert known.overlaps(prompt([199]), 10).matches == []


def test_record_sent_to_instance_without_events_expires() -> None:
    known = ClusterPrefixes(ttl_s=10)
    known.add_instance(instance(1, has_events=False))
    known.add_instance(instance(2))
    sent = [known.record_sent(prompt([1, 2, 3]), name, now=0) for name in (1, 2)]
    assert known.unsynced == {2}
    assert overlaps(known, [1, 2, 3]) == {1: 3 * BLOCK}
    for update in sent:
        update.is_computed = True
        update.end()
    known.record_sent(prompt([1, 2]), 1, now=5)
    assert overlaps(known, [1, 2, 3]) == {1: 3 * BLOCK}
    known.record_sent(prompt([8]), 1, now=10)
    assert overlaps(known, [1, 2, 3]) == {1: 2 * BLOCK}
    known.record_sent(prompt([8]), 1, now=30)
    assert overlaps(known, [1, 2, 3]) == {}
    known.remove_instance(1)
    known.record_sent(prompt([8]), 1, now=60)
    assert overlaps(known, [8]) == {}


@pytest.mark.parametrize("has_events", [False, True])
def test_record_sent_of_failed_call_is_undone(has_events: bool) -> None:
    known = ClusterPrefixes()
    known.add_instance(instance(1, has_events=has_events, role=Role.PREFILL))
    if has_events:
        known.on_update(snapshot(1, [1]))
    else:
        known.record_sent(prompt([1]), 1, now=0)
    sent = known.record_sent(prompt([1, 2, 3]), 1, now=1)
    other = known.record_sent(prompt([1, 2, 3, 4]), 1, now=1)
    if has_events:
        known.on_update(
            KvCacheUpdate(instance_id=1, number=1, stored=pack_hashes(prompt([1, 2]).of(BLOCK)))
        )
    assert overlaps_of(known, prompt([1, 2, 3, 4]), Role.PREFILL, 1.0) == {1: 4 * BLOCK}
    sent.end()
    other.end()
    assert overlaps_of(known, prompt([1, 2, 3, 4]), Role.PREFILL, 1.0) == {
        1: BLOCK * (2 if has_events else 1)
    }
    assert known.num_blocks() == {1: 2 if has_events else 1}


@pytest.mark.parametrize(("ttl_s", "limit"), [(3600.0, 200), (1.0, 1 << 20)])
def test_record_sent_bounds_blocks_of_long_prompts(
    ttl_s: float, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_index, "MAX_SENT_BLOCKS", limit)
    known = ClusterPrefixes(ttl_s=ttl_s)
    known.add_instance(instance(1, has_events=False))
    sent = [[number] for number in range(200)] + [[number] * 100 for number in range(200, 220)]
    for number, blocks in enumerate(sent):
        known.record_sent(prompt(blocks), 1, now=0.0 if number < 200 else 1.5 * number)
    found = [overlaps(known, blocks) for blocks in sent]
    assert found[-1] == {1: 100 * BLOCK}
    assert sum(len(blocks) for blocks, match in zip(sent, found, strict=True) if match) <= 200


def test_record_sent_over_limit_drops_oldest_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_SENT_BLOCKS", 4)
    known = ClusterPrefixes(reads_events=False)
    known.add_instance(instance(1))
    for number in range(6):
        known.record_sent(prompt([number, 7]), 1, now=number)
    assert [number for number in range(6) if overlaps(known, [number])] == [4, 5]
    # more than all may have: it stays until the next one
    known.record_sent(prompt([6, 7, 7, 7, 7]), 1, now=6)
    assert [number for number in range(7) if overlaps(known, [number])] == [6]
    known.record_sent(prompt([7]), 1, now=7)
    assert [number for number in range(8) if overlaps(known, [number])] == [7]
    known.on_update(snapshot(1, [0]))
    assert overlaps(known, [0]) == {}
