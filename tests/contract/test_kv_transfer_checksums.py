"""The contract of KV transfer backends: KV that arrives is KV that was sent, or the fetch fails."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Literal, Protocol

import msgspec
import pytest

from benchmarks.chaos.corrupting_worker import flip_bit
from benchmarks.chaos.relay import ChangingRelay
from dynamo_trtllm.kv_transfer.checksums import BLOCK_BYTES, ChecksumMode
from dynamo_trtllm.kv_transfer.memory import MemoryRegion
from dynamo_trtllm.kv_transfer.transfer_backend import Destination, TransferBackend
from dynamo_trtllm.protocol.errors import KvTransferError, TransferFailed
from tests.contract.kv_transfer_source import content, split
from tests.contract.transfer_backends import KINDS
from tests.kit.loopback_backend import named_backend
from tests.kit.waiting import SOON_S

TRANSFERS = 100
LARGE = [BLOCK_BYTES + 70_017, 100_000]  # several blocks, hashed on threads


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Start(Protocol):
    async def __call__(self, mode: ChecksumMode = "auto") -> TransferBackend: ...


@pytest.fixture
async def start(kind: str) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def started(mode: ChecksumMode = "auto") -> TransferBackend:
            backend = named_backend(kind, kv_checksums=mode)
            await backend.start(lambda transfer_id: None)
            stack.push_async_callback(backend.aclose)
            return backend

        yield started


async def test_fetch_finds_every_changed_bit_of_offered_memory(start: Start) -> None:
    holder = await start()
    reader = await start()
    chance = random.Random(7)
    source = content("a", BLOCK_BYTES + 200_000)
    target = bytearray(BLOCK_BYTES + 200_000)
    flips = 0
    for side, memory in ((holder, source), (reader, target)):
        await side.register(split(memory, [len(memory)])[0])
    for number in range(TRANSFERS):
        sizes = [
            chance.choice((0, 1, 9, 4096, chance.randrange(20_000)))
            for _ in range(chance.randrange(1, 5))
        ]
        if number % 50 == 0:
            sizes.append(chance.choice((100_000, BLOCK_BYTES + 9)))
        offer = await holder.publish("t", split(source, sizes))
        target[: sum(sizes)] = bytes(sum(sizes))
        await reader.read("t", offer, Destination(split(target, sizes)), timeout_s=SOON_S)
        assert target[: sum(sizes)] == source[: sum(sizes)]
        if sum(sizes) and chance.random() < 0.5:
            source[chance.randrange(sum(sizes))] ^= 1 << chance.randrange(8)
            flips += 1
            with pytest.raises(TransferFailed, match="checksum of its KV is wrong"):
                await reader.read("t", offer, Destination(split(target, sizes)), timeout_s=SOON_S)
        await holder.unpublish("t")
    assert reader.checksums.num_mismatches == flips > TRANSFERS / 4
    assert holder.checksums.num_mismatches == 0


async def test_fetch_waits_for_late_checksums(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = await start()
    reader = await start()
    begun = threading.Event()
    gate = threading.Event()
    hash_block = holder.checksums.hash

    def late(block: MemoryRegion) -> int:
        begun.set()
        assert gate.wait(SOON_S)
        return hash_block(block)

    monkeypatch.setattr(holder.checksums, "hash", late)
    source = content("a", sum(LARGE))
    target = bytearray(sum(LARGE))
    for ends in ("fetched", "withdrawn"):
        gate.clear()
        begun.clear()
        offer = await holder.publish("t", split(source, LARGE))
        fetch = asyncio.create_task(
            reader.read("t", offer, Destination(split(target, LARGE)), timeout_s=SOON_S)
        )
        assert await asyncio.to_thread(begun.wait, SOON_S)
        ending = asyncio.create_task(holder.unpublish("t")) if ends == "withdrawn" else None
        await asyncio.wait(
            [fetch, *([ending] if ending else [])], timeout=0.1, return_when=asyncio.FIRST_COMPLETED
        )
        assert ending is None or not ending.done()  # a thread still reads the memory
        assert ends == "withdrawn" or not fetch.done()
        gate.set()
        if ending is not None:
            await ending
            with pytest.raises(TransferFailed):
                await fetch
        else:
            await fetch
            assert target == source
            await holder.unpublish("t")


@pytest.mark.parametrize(
    "modes", [("off", "auto"), ("auto", "off"), ("before", "auto")], ids="-".join
)
async def test_fetch_without_checksum_on_one_side_is_unchecked(
    start: Start, modes: tuple[ChecksumMode | Literal["before"], ChecksumMode]
) -> None:
    """A holder of an earlier version says nothing of checksums in its offer."""
    holder = await start("off" if modes[0] == "before" else modes[0])
    reader = await start(modes[1])
    source = content("a", sum(LARGE))
    target = bytearray(sum(LARGE))
    offer = await holder.publish("t", split(source, LARGE))
    if modes[0] == "before":
        facts = msgspec.msgpack.decode(offer)
        del facts["checksum"]
        offer = msgspec.msgpack.encode(facts)
    await reader.read("t", offer, Destination(split(target, LARGE)), timeout_s=SOON_S)
    assert target == source
    await holder.unpublish("t")  # until then a thread may read the memory


async def test_fetch_when_required_checksum_is_missing_then_fails(start: Start) -> None:
    holder = await start("off")
    reader = await start("on")
    source = content("a", 100)
    target = bytearray(100)
    offer = await holder.publish("t", split(source, [100]))
    with pytest.raises(TransferFailed, match="set kv_checksums to auto"):
        await reader.read("t", offer, Destination(split(target, [100])), timeout_s=SOON_S)
    assert target == bytes(100)


@pytest.mark.parametrize("kind", ["tcp"], indirect=True)
async def test_fetch_never_delivers_bits_changed_on_the_wire(start: Start) -> None:
    holder = await start()
    reader = await start()
    chance = random.Random(8)
    relay = await ChangingRelay.start("127.0.0.1:0")
    failed = 0
    for number in range(TRANSFERS):
        sizes = [chance.randrange(200, 9000) for _ in range(chance.randrange(1, 4))]
        source = content(str(number), sum(sizes))
        target = bytearray(sum(sizes))
        facts = msgspec.msgpack.decode(await holder.publish("t", split(source, sizes)))
        relay.point_at(facts["host"], facts["port"])
        relay.change = flip_bit if chance.random() < 0.5 else None
        offer = msgspec.msgpack.encode(facts | {"port": int(relay.address.rpartition(":")[2])})
        try:
            await reader.read("t", offer, Destination(split(target, sizes)), timeout_s=SOON_S)
        except KvTransferError:
            assert relay.change is not None
            failed += 1
        else:
            assert relay.change is None
            assert target == source
        await holder.unpublish("t")
    await relay.cut()
    assert reader.checksums.num_mismatches == failed > TRANSFERS / 4


@pytest.mark.parametrize("kind", ["nixl"], indirect=True)
async def test_fetch_fails_at_once_when_checksum_is_impossible(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = await start()
    reader = await start()

    def broken(block: MemoryRegion) -> int:
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(holder.checksums, "hash", broken)
    source = content("a", sum(LARGE))
    target = bytearray(sum(LARGE))
    offer = await holder.publish("t", split(source, LARGE))
    with pytest.raises(TransferFailed, match="no longer published"):
        await reader.read("t", offer, Destination(split(target, LARGE)), timeout_s=SOON_S)
    await holder.unpublish("t")
