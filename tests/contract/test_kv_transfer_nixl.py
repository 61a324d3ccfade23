"""Faults that only the NIXL backend can have: in its table of peers, its guards, its threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from dynamo_trtllm.kv_transfer.nixl import NixlBackend, fetch, poller
from dynamo_trtllm.kv_transfer.transfer_backend import Destination
from dynamo_trtllm.protocol.errors import TransferFailed, TransferTimeout
from tests.contract.kv_transfer_source import content, split
from tests.kit.waiting import SOON_S

SIZE = 100_001


@pytest.fixture
async def fetched() -> list[str]:
    return []


@pytest.fixture
async def pair(fetched: list[str]) -> AsyncIterator[tuple[NixlBackend, NixlBackend]]:
    holder = NixlBackend()
    reader = NixlBackend()
    await holder.start(fetched.append)
    await reader.start(fetched.append)
    yield holder, reader
    await reader.aclose()
    await holder.aclose()


async def test_fetch_reconnects_to_a_peer_that_was_read_often(
    pair: tuple[NixlBackend, NixlBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "MAX_KNOWN_MEMORIES", 3)
    holder, reader = pair
    known = []
    kept = []
    for i in range(7):
        source = content(f"t{i}", SIZE)
        target = bytearray(SIZE)
        offer = await holder.publish(f"t{i}", split(source, [SIZE]))
        await reader.read(f"t{i}", offer, Destination(split(target, [SIZE])), timeout_s=5)
        await holder.unpublish(f"t{i}")
        assert target == source
        kept.append(source)  # or the next lies at the same address and is known already
        known.append(len(reader._peers._connected))
    assert known == [1, 1, 0, 1, 1, 0, 1]


async def test_overlapping_fetches_do_not_collect_memories_for_ever(
    pair: tuple[NixlBackend, NixlBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "MAX_KNOWN_MEMORIES", 1)
    holder, reader = pair
    source = content("t", 8 * SIZE)
    parts = split(source, [SIZE] * 8)  # each transfer has memory of its own
    target = bytearray(8 * SIZE)
    targets = split(target, [SIZE] * 8)

    async def begin(number: int, *, ready: int) -> asyncio.Task[None]:
        offer = await holder.publish(f"t{number}", [parts[number]], ready=ready)
        to = Destination([targets[number]])
        return asyncio.create_task(reader.read(f"t{number}", offer, to, timeout_s=SOON_S))

    first = await begin(0, ready=0)  # it stays in progress
    await (await begin(1, ready=1))
    waiting = await begin(2, ready=1)
    await asyncio.sleep(0.1)
    assert not waiting.done()
    (peer,) = reader._peers._connected.values()
    assert len(peer.known_memories) == 2
    holder.mark_ready("t0", 1)
    await first
    await waiting
    assert not reader._peers._connected  # it is full with one memory, and idle
    assert target[: 3 * SIZE] == source[: 3 * SIZE]


async def test_offer_when_guards_run_out_then_fails_until_withdrawal(
    pair: tuple[NixlBackend, NixlBackend],
) -> None:
    holder, _ = pair
    del holder._validity_slots.free_slots[1:]
    source = content("a", 10)
    await holder.publish("t", split(source, [10]))
    with pytest.raises(TransferFailed, match="transfers open"):
        await holder.publish("u", split(source, [10]))
    await holder.unpublish("t")
    await holder.publish("u", split(source, [10]))


async def test_offer_cancelled_during_registration_leaves_nothing(
    pair: tuple[NixlBackend, NixlBackend],
) -> None:
    holder, _ = pair
    slots = len(holder._validity_slots.free_slots)
    gate = threading.Event()
    holder._registering.submit(gate.wait, 10)
    source = content("a", SIZE)
    offering = asyncio.create_task(holder.publish("t", split(source, [SIZE])))
    await asyncio.sleep(0.05)
    offering.cancel()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await offering
    await holder.unpublish("t")
    await holder.publish("u", split(source, [SIZE]))
    assert set(holder._published) == {"u"}
    assert len(holder._validity_slots.free_slots) == slots - 1


@pytest.mark.parametrize("in_region", [True, False])
async def test_withdraw_during_close_returns_once_memory_is_free(in_region: bool) -> None:
    holder = NixlBackend()
    await holder.start(lambda transfer_id: None)
    source = content("a", SIZE)
    (region,) = split(source, [SIZE])
    if in_region:
        await holder.register(region)
    for transfer_id in ("t", "u"):
        await holder.publish(transfer_id, [region])
    holder._registering.submit(time.sleep, 0.1)
    closing = asyncio.create_task(holder.aclose())
    await asyncio.sleep(0)
    await holder.unpublish("t")
    assert not holder._published
    assert not holder._bindings.registered
    await closing
    await holder.unpublish("u")


async def test_fetch_over_limit_times_out_or_is_cancelled_unread(
    pair: tuple[NixlBackend, NixlBackend],
) -> None:
    holder, reader = pair
    source = content("a", SIZE)
    target = bytearray(SIZE)
    offer = await holder.publish("t", split(source, [SIZE]))
    slots = len(reader._validity_slots.free_slots)
    freed = threading.Event()

    def slow() -> Iterator[float]:
        while not freed.is_set():
            yield 0.01

    others = [reader._fetching.submit(slow()) for _ in range(poller.MAX_CONCURRENT_FETCHES)]
    late = asyncio.create_task(
        reader.read("t", offer, Destination(split(target, [SIZE])), timeout_s=0.1)
    )
    gone = asyncio.create_task(
        reader.read("t", offer, Destination(split(target, [SIZE])), timeout_s=30)
    )
    await asyncio.sleep(0.05)
    gone.cancel()
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert time.monotonic() - began < SOON_S  # it had nothing to wait for
    await asyncio.sleep(0.1)
    freed.set()
    with pytest.raises(TransferTimeout, match="too many other"):
        await late
    assert target == bytes(SIZE)
    assert len(reader._validity_slots.free_slots) == slots
    assert all(other.result(timeout=SOON_S) is None for other in others)


async def test_listen_without_offers_uses_no_processor_time(
    pair: tuple[NixlBackend, NixlBackend],
) -> None:
    holder, _ = pair
    source = content("a", 10)
    await holder.publish("t", split(source, [10]))
    await holder.unpublish("t")
    await asyncio.sleep(0.1)
    before = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - before < 0.25  # NIXL's own progress threads would use 1.0 here
