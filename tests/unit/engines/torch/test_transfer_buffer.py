"""The transfer buffer is bounded and freed, and KV that is copied through it arrives in its
blocks.
"""

from __future__ import annotations

import random

import pytest
import torch

from dynamo_trtllm.engines.torch.kv import KvPool
from dynamo_trtllm.engines.torch.transfer_buffer import Allocation, TransferBuffer, checksum
from dynamo_trtllm.kv_transfer.memory import MemoryRegion
from dynamo_trtllm.protocol.messages import KvLayout
from tests.kit.cases import each_case

WINDOWS = (8, None)


def make_pool(num_blocks: int = 20) -> KvPool:
    layout = KvLayout(dtype="float32", block_tokens=4, num_layers=2, num_kv_heads=2, head_dim=3)
    return KvPool(layout, num_blocks, windows=WINDOWS, device=torch.device("cpu"))


def taken(transfer_buffer: TransferBuffer, tokens: int, region_bytes: int = 1 << 20) -> Allocation:
    allocation = transfer_buffer.allocate(tokens, region_bytes)
    assert allocation is not None
    return allocation


@each_case("region_bytes", [1, 300, 1 << 20])
@each_case("tokens", [1, 3, 4, 5, 7, 8, 9, 12, 13, 40])
def test_gather_and_scatter_keep_all_visible_kv(tokens: int, region_bytes: int) -> None:
    source = make_pool()
    target = make_pool(31)
    source.keys.copy_(torch.randn_like(source.keys))
    source.values.copy_(torch.randn_like(source.values))
    ours = torch.arange(source.blocks_for(tokens))
    theirs = torch.arange(5, 5 + target.blocks_for(tokens + 6))
    here = TransferBuffer(source, 1 << 16)
    there = TransferBuffer(target, 1 << 16)
    sent = taken(here, tokens, region_bytes)
    received = taken(there, tokens, region_bytes)
    assert here.gather(sent, source.rows(ours, tokens)) == []
    assert [len(region) for region in sent.regions] == [len(region) for region in received.regions]
    assert sum(len(region) for region in sent.regions) == source.moved_bytes(tokens)
    rows = target.rows(theirs, tokens)
    for index, (region, other) in enumerate(zip(received.regions, sent.regions, strict=True)):
        region.copy_(other)
        there.scatter(received, rows, index)
    for layer, window in enumerate(WINDOWS):
        seen = range(0 if window is None else max(0, tokens - window + 1), tokens)
        for mine, other in ((source.keys, target.keys), (source.values, target.values)):
            for at in seen:
                assert torch.equal(
                    mine[layer, ours[at // 4], at % 4], other[layer, theirs[at // 4], at % 4]
                )


class Copying:
    """An event of a GPU."""

    is_done = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


def test_take_after_return_is_free_once_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer_buffer = TransferBuffer(make_pool(), 3 * 4096)
    copying = Copying()
    allocation = taken(transfer_buffer, 4)
    monkeypatch.setattr(transfer_buffer, "record_event", lambda: copying)
    transfer_buffer.free(allocation)
    assert taken(transfer_buffer, 4).begin == 4096
    copying.is_done = True
    assert taken(transfer_buffer, 4).begin == allocation.begin


def test_take_waits_for_the_oldest_copies_only(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer_buffer = TransferBuffer(make_pool(), 3 * 4096)
    marks = [Copying() for _ in range(3)]
    allocations = [taken(transfer_buffer, 4) for _ in range(3)]
    monkeypatch.setattr(transfer_buffer, "record_event", iter(marks).__next__)
    for allocation in allocations:
        transfer_buffer.free(allocation)
    assert taken(transfer_buffer, 4).begin == allocations[0].begin
    assert [mark.is_done for mark in marks] == [True, False, False]


def test_allocate_when_full_then_none_until_memory_is_freed() -> None:
    transfer_buffer = TransferBuffer(make_pool(), 3 * 4096)
    allocations = [taken(transfer_buffer, 4) for _ in range(3)]
    assert transfer_buffer.allocate(4, 4096) is None
    transfer_buffer.free(allocations[1])
    assert taken(transfer_buffer, 4).begin == allocations[1].begin
    assert transfer_buffer.allocate(4, 4096) is None


def test_allocate_after_freeing_all_is_one_region() -> None:
    pool = make_pool(400)
    transfer_buffer = TransferBuffer(pool, 8 * 4096)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 0, 1]):
        allocations = [taken(transfer_buffer, 4) for _ in range(4)]
        for number in order:
            transfer_buffer.free(allocations[number])
        assert pool.moved_bytes(600) > 7 * 4096
        whole = taken(transfer_buffer, 600)
        assert transfer_buffer.allocate(4, 4096) is None
        transfer_buffer.free(whole)


def test_take_reuses_memory_for_following_prompts() -> None:
    transfer_buffer = TransferBuffer(make_pool(), 1 << 20)
    first = taken(transfer_buffer, 40)
    transfer_buffer.free(first)
    assert taken(transfer_buffer, 12).begin == first.begin


@pytest.mark.parametrize("num_bytes", [1, 7, 4096, 32_768 * 3 + 5])
def test_checksum_changes_with_bits_and_not_with_place(num_bytes: int) -> None:
    chance = random.Random(num_bytes)
    memory = torch.frombuffer(bytearray(chance.randbytes(num_bytes + 8)), dtype=torch.uint8)
    part = memory[4 : 4 + num_bytes]
    found = checksum(part)
    assert checksum(torch.cat([memory[:1], part])[1:]) == found
    for _ in range(50):
        changed = part.clone()
        for at in {chance.randrange(num_bytes) for _ in range(chance.randrange(1, 4))}:
            # the highest bit: errors of two of them must not make up for each other
            changed[at] ^= 128
        assert checksum(changed) != found
    assert num_bytes < 8 or checksum(part.roll(4)) != found


def test_checksum_when_computed_by_another_version_then_the_same() -> None:
    words = torch.arange(100_000, dtype=torch.int32) * 40_503
    assert checksum(words.view(torch.uint8)) == -3381459360522869011


def test_checksum_of_region_equals_that_of_its_part() -> None:
    transfer_buffer = TransferBuffer(make_pool(), 3 * 4096)
    transfer_buffer.memory.copy_(torch.arange(3 * 4096) % 251)
    part = transfer_buffer.memory[4096:5096]
    assert transfer_buffer.checksum(MemoryRegion(part.data_ptr(), 1000)) == checksum(part)


def test_divided_buffer_keeps_a_half_for_kv_that_is_fetched() -> None:
    pool = make_pool(num_blocks=80)
    size = 2 * 4096
    transfer_buffer = TransferBuffer(pool, size, is_divided=True)
    longest = transfer_buffer.longest_prompt
    assert pool.moved_bytes(longest) <= 4096 < pool.moved_bytes(longest + 4)
    sent = transfer_buffer.allocate(longest, 1 << 20)
    assert sent is not None
    # As much as the other half could hold.
    assert transfer_buffer.allocate(longest, 1 << 20) is None
    received = transfer_buffer.allocate(longest, 1 << 20, is_fetched=True)
    assert received is not None
    assert transfer_buffer.allocate(1, 1 << 20, is_fetched=True) is None
    assert sent.begin + sent.num_bytes <= received.begin
    transfer_buffer.free(received)
    assert transfer_buffer.allocate(longest, 1 << 20) is None
    transfer_buffer.free(sent)
    assert transfer_buffer.allocate(longest, 1 << 20) is not None
