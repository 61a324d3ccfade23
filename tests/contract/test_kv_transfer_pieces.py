"""The contract of KV transfer backends: regions become ready one by one, and memory is registered
once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dynamo_trtllm.kv_transfer.memory import MemoryRegion
from dynamo_trtllm.kv_transfer.transfer_backend import Destination
from dynamo_trtllm.protocol.errors import TransferFailed, TransferTimeout
from tests.contract.kv_transfer_source import content, split
from tests.contract.transfer_backends import KINDS, Start, backend_starter, count_registrations


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def sides(kind: str) -> AsyncIterator[Start]:
    """Of the kind that the test is parametrized with."""
    async with backend_starter(kind) as start:
        yield start


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize("begin", [0, 2])
async def test_fetch_reports_each_region_once_it_is_ready(sides: Start, begin: int) -> None:
    holder = await sides()
    reader = await sides()
    sizes = [1, 4097, 65_537, 300_003]
    source = content("a", sum(sizes))
    target = bytearray(sum(sizes))
    arrived = asyncio.Queue[int]()
    loop = asyncio.get_running_loop()

    def hear(index: int) -> None:
        loop.call_soon_threadsafe(arrived.put_nowait, index)

    offer = await holder.backend.publish("t", split(source, sizes), ready=begin)
    holder.backend.mark_ready("unknown", 1)
    to = split(target, sizes)
    fetch = asyncio.create_task(
        reader.backend.read("t", offer, Destination(to, hear), timeout_s=10)
    )
    assert [await arrived.get() for _ in range(begin)] == list(range(begin))
    for ready in range(begin, len(sizes)):
        await asyncio.sleep(0.02)
        assert arrived.empty()
        assert not any(target[sum(sizes[:ready]) :])
        holder.backend.mark_ready("t", ready + 1)
        assert await arrived.get() == ready
    await fetch
    assert target == source
    assert arrived.empty()
    assert await holder.wait_fetched(1) == ["t"]


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_fetch_withdrawn_before_all_is_ready_fails(sides: Start) -> None:
    holder = await sides()
    reader = await sides()
    source = content("a", 5000)
    target = bytearray(5000)
    offer = await holder.backend.publish("t", split(source, [2500, 2500]), ready=1)
    fetch = asyncio.create_task(
        reader.backend.read("t", offer, Destination(split(target, [2500, 2500])), timeout_s=10)
    )
    await asyncio.sleep(0.05)
    await holder.backend.unpublish("t")
    with pytest.raises(TransferFailed):
        await fetch
    assert holder.fetched == []


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_fetch_when_rest_is_never_ready_then_transfer_timeout(sides: Start) -> None:
    holder = await sides()
    reader = await sides()
    source = content("a", 5000)
    target = bytearray(5000)
    offer = await holder.backend.publish("t", split(source, [2500, 2500]), ready=1)
    with pytest.raises(TransferTimeout):
        await reader.backend.read(
            "t", offer, Destination(split(target, [2500, 2500])), timeout_s=0.2
        )
    holder.backend.mark_ready("t", 2)
    await reader.backend.read("t", offer, Destination(split(target, [2500, 2500])), timeout_s=10)
    assert target == source


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_registered_memory_moves_without_another_registration(
    kind: str, sides: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = await sides()
    reader = await sides()
    source = content("a", 100_000)
    target = bytearray(100_000)
    for side, memory in ((holder, source), (reader, target)):
        await side.backend.register(split(memory, [len(memory)])[0])
    ends = [side.backend for side in (holder, reader)]
    registered = [count_registrations(end, monkeypatch) for end in ends] if kind == "nixl" else []
    sizes = [1000, 4096, 50_000]
    for number in range(3):
        offer = await holder.backend.publish(f"t{number}", split(source, sizes))
        assert not any(registered)
        target[:] = bytes(len(target))
        await reader.backend.read(
            f"t{number}", offer, Destination(split(target, sizes)), timeout_s=10
        )
        assert target == source[: sum(sizes)] + bytes(100_000 - sum(sizes))
        await holder.backend.unpublish(f"t{number}")
    assert not any(registered)


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_register_of_immovable_memory_fails(sides: Start) -> None:
    """The engine then takes host memory. There is no GPU here: a GPU machine has its own tests."""
    holder = await sides()
    for device in ("tape:0", "cuda:99"):
        with pytest.raises(TransferFailed, match=device.partition(":")[0]):
            await holder.backend.register(MemoryRegion(4096, 10, device))
    source = content("a", 10)
    await holder.backend.publish("t", split(source, [10]))
