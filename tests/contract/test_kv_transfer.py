"""The contract of KV transfer backends: loopback, tcp and nixl in one process, tcp and nixl between
two.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.kv_transfer.memory import MemoryRegion
from dynamo_trtllm.kv_transfer.transfer_backend import Destination
from dynamo_trtllm.protocol.errors import KvTransferError, TransferFailed, TransferTimeout
from tests.contract.kv_transfer_source import content, split
from tests.contract.transfer_backends import (
    KINDS,
    Start,
    StartedBackend,
    backend_starter,
    count_registrations,
)
from tests.kit.loopback_backend import named_backend
from tests.kit.waiting import SOON_S

REMOTE = ("tcp", "nixl")
ODD = [1, 4097, 0, 65_537, 3, 1_000_003]


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def sides(kind: str) -> AsyncIterator[Start]:
    """Of the kind that the test is parametrized with."""
    async with backend_starter(kind) as start:
        yield start


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize(
    "sizes", [[1], [4096], [1_000_003], ODD, [777] * 300], ids=["1", "4096", "1e6", "odd", "300"]
)
async def test_fetch_delivers_bytes_and_notifies_prefill_once(
    sides: Start, sizes: list[int]
) -> None:
    holder = await sides()
    reader = await sides()
    source = content("a", sum(sizes))
    target = bytearray(sum(sizes))
    offer = await holder.backend.publish("t", split(source, sizes))
    await reader.backend.read("t", offer, Destination(split(target, sizes)), timeout_s=10)
    assert target == source
    assert await holder.wait_fetched(1) == ["t"]
    await asyncio.sleep(0.05)
    assert holder.fetched == ["t"]
    assert holder.threads == [threading.get_ident()]  # on the loop, whichever thread noticed
    assert reader.fetched == []


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_fetch_of_no_bytes_notifies_prefill(sides: Start) -> None:
    holder = await sides()
    reader = await sides()
    await reader.backend.read(
        "t", await holder.backend.publish("t", []), Destination([]), timeout_s=10
    )
    assert await holder.wait_fetched(1) == ["t"]


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_fetch_when_offer_was_withdrawn_then_transfer_failed(sides: Start) -> None:
    holder = await sides()
    reader = await sides()
    source = content("a", 5000)
    target = bytearray(5000)
    offers = {
        kv_params: await holder.backend.publish(kv_params, split(source, [5000]))
        for kv_params in ("gone", "kept")
    }
    await holder.backend.unpublish("gone")
    with pytest.raises(TransferFailed, match="gone"):
        await reader.backend.read(
            "gone", offers["gone"], Destination(split(target, [5000])), timeout_s=10
        )
    await reader.backend.read(
        "kept", offers["kept"], Destination(split(target, [5000])), timeout_s=10
    )
    assert target == source
    assert await holder.wait_fetched(1) == ["kept"]


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_fetch_of_old_offer_fails_after_a_new_one(sides: Start) -> None:
    holder = await sides()
    reader = await sides()
    source = content("a", 5000)
    target = bytearray(5000)
    old = await holder.backend.publish("t", split(source, [5000]))
    await holder.backend.unpublish("t")
    new = await holder.backend.publish("t", split(source, [5000]))
    await reader.backend.read("t", new, Destination(split(target, [5000])), timeout_s=10)
    assert target == source
    if old != new:  # loopback names only the backend
        with pytest.raises(TransferFailed):
            await reader.backend.read("t", old, Destination(split(target, [5000])), timeout_s=10)


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize("sizes", [[4999], [5001], [2500, 2500]], ids=str)
async def test_fetch_when_sizes_differ_then_writes_nothing(sides: Start, sizes: list[int]) -> None:
    holder = await sides()
    reader = await sides()
    source = content("a", 5000)
    target = bytearray(sum(sizes))
    offer = await holder.backend.publish("t", split(source, [5000]))
    with pytest.raises(TransferFailed, match=r"regions|bytes"):
        await reader.backend.read("t", offer, Destination(split(target, sizes)), timeout_s=10)
    assert target == bytes(sum(sizes))


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize(
    "offer", [b"", b"\x81\xa1a\x01", b"noise"], ids=["empty", "other", "noise"]
)
async def test_fetch_when_offer_is_not_one_then_transfer_failed(sides: Start, offer: bytes) -> None:
    reader = await sides()
    with pytest.raises(TransferFailed, match="not created by transfer backend"):
        await reader.backend.read("t", offer, Destination([]), timeout_s=10)


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_offer_of_an_offered_transfer_fails(sides: Start) -> None:
    holder = await sides()
    source = content("a", 10)
    await holder.backend.publish("t", split(source, [10]))
    with pytest.raises(TransferFailed, match="already"):
        await holder.backend.publish("t", split(source, [10]))
    await holder.backend.unpublish("t")
    await holder.backend.unpublish("t")  # unknown KV transfers are no error
    await holder.backend.publish("t", split(source, [10]))


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_offer_of_immovable_memory_frees_the_transfer(sides: Start) -> None:
    holder = await sides()
    with pytest.raises(TransferFailed, match="tape"):
        await holder.backend.publish("t", [MemoryRegion(4096, 10, "tape:0")])
    source = content("a", 10)
    await holder.backend.publish("t", split(source, [10]))


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_fetch_when_eight_at_once_both_ways_then_all_arrive(sides: Start) -> None:
    one = await sides()
    two = await sides()
    transfers = [(f"t{i}", *((one, two) if i % 2 else (two, one))) for i in range(8)]
    sources = {kv_params: content(kv_params, 300_001) for kv_params, _, _ in transfers}
    targets = {kv_params: bytearray(300_001) for kv_params in sources}

    async def move(kv_params: str, holder: StartedBackend, reader: StartedBackend) -> None:
        offer = await holder.backend.publish(kv_params, split(sources[kv_params], [300_000, 1]))
        await reader.backend.read(
            kv_params, offer, Destination(split(targets[kv_params], [300_000, 1])), timeout_s=10
        )

    async with asyncio.TaskGroup() as group:
        for kv_params in transfers:
            group.create_task(move(*kv_params))
    assert targets == sources
    assert sorted(await one.wait_fetched(4)) == ["t1", "t3", "t5", "t7"]
    assert sorted(await two.wait_fetched(4)) == ["t0", "t2", "t4", "t6"]


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_aclose_twice_with_open_offers_leaves_nothing(kind: str) -> None:
    tasks = len(asyncio.all_tasks())
    threads = own_threads()
    backend = named_backend(kind)
    await backend.start(lambda transfer_id: None)
    source = content("a", 100)
    target = bytearray(100)
    offer = await backend.publish("t", split(source, [100]))
    if kind != "nixl":  # an agent does not read from itself
        await backend.read("t", offer, Destination(split(target, [100])), timeout_s=10)
    await backend.aclose()
    await backend.aclose()
    assert len(asyncio.all_tasks()) == tasks
    assert own_threads() == threads
    with pytest.raises(TransferFailed):
        await backend.publish("u", split(source, [100]))


# --- two processes --------------------------------------------------------------------------------


class Holder:
    """The other process, which offers KV."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(40):  # it imports a lot first, beside other busy processes
            while line := await self._process.stdout.readline():
                if line.startswith(b"@"):
                    return json.loads(line[1:])  # type: ignore[no-any-return]
        raise AssertionError("the holder process ended")

    async def ask(self, *words: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write((" ".join(map(str, words)) + "\n").encode())
        return await self.answer()

    async def publish(self, transfer_id: str, *sizes: int) -> bytes:
        return bytes.fromhex((await self.ask("offer", transfer_id, *sizes))["offer"])

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def freeze(self) -> None:
        """Returns once it stands still: on a busy machine a stop takes a while to reach every
        thread.
        """
        self.signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self._process.pid}/task")
        while any(_state(thread) != "T" for thread in threads.iterdir()):
            time.sleep(0.001)


def _state(thread: Path) -> str:
    return thread.joinpath("stat").read_text().rpartition(")")[2].split()[0]


@asynccontextmanager
async def holder_process(kind: str) -> AsyncIterator[Holder]:
    command = (sys.executable, "-m", "tests.contract.kv_transfer_source", kind)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        holder = Holder(process)
        assert await holder.answer() == {"ready": True}
        yield holder
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def own_threads() -> list[str]:
    return sorted(
        thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio")
    )


def open_sockets() -> int:
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{entry}").startswith("socket:")
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    return count


@pytest.mark.parametrize("kind", REMOTE, indirect=True)
async def test_fetch_from_another_process_notifies_it(kind: str, sides: Start) -> None:
    reader = await sides()
    async with holder_process(kind) as holder:
        for kv_params in ("t0", "t1", "t2"):
            offer = await holder.publish(kv_params, *ODD)
            target = bytearray(sum(ODD))
            await reader.backend.read(
                kv_params, offer, Destination(split(target, ODD)), timeout_s=10
            )
            assert target == content(kv_params, sum(ODD))
            assert await holder.answer() == {"fetched": kv_params}
        await holder.ask("withdraw", "t2")
        with pytest.raises(TransferFailed):
            await reader.backend.read("t2", offer, Destination(split(target, ODD)), timeout_s=10)


@pytest.mark.parametrize("kind", REMOTE, indirect=True)
@pytest.mark.parametrize("cancel", [False, True], ids=["timeout", "cancel"])
async def test_fetch_from_frozen_holder_ends_in_time(
    kind: str, sides: Start, cancel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # over shared memory NIXL reads what a frozen process holds all the same
    monkeypatch.setenv("UCX_TLS", "tcp")
    reader = await sides()
    registered = count_registrations(reader.backend, monkeypatch) if kind == "nixl" else []
    size = 8 << 20
    async with holder_process(kind) as holder:
        target = bytearray(size)
        await reader.backend.read(
            "w", await holder.publish("w", size), Destination(split(target, [size])), timeout_s=10
        )
        assert await holder.answer() == {"fetched": "w"}
        offer = await holder.publish("t", size)
        tasks = len(asyncio.all_tasks())
        threads = own_threads()
        sockets = open_sockets()
        holder.freeze()
        began = time.monotonic()
        fetch = asyncio.create_task(
            reader.backend.read(
                "t", offer, Destination(split(target, [size])), timeout_s=3 if cancel else 1.5
            )
        )
        if cancel:
            await asyncio.sleep(0.3)
            fetch.cancel()
        with pytest.raises(asyncio.CancelledError if cancel else TransferTimeout):
            await fetch
        assert time.monotonic() - began < SOON_S
        target[:] = b"\x55" * size
        holder.signal(signal.SIGCONT)
        await asyncio.sleep(0.5)
        assert target == b"\x55" * size  # the late answer went nowhere
        async with asyncio.timeout(SOON_S):
            while (  # noqa: ASYNC110
                len(asyncio.all_tasks()) != tasks
                or own_threads() != threads
                or open_sockets() > sockets
            ):
                await asyncio.sleep(0.01)
        assert registered == []
        await reader.backend.read(
            "t", offer, Destination(split(target, [size])), timeout_s=10
        )  # and the next fetch works
        assert target == content("t", size)


@pytest.mark.parametrize("kind", REMOTE, indirect=True)
@pytest.mark.parametrize("met", [False, True], ids=["unmet", "met"])
async def test_fetch_when_holder_was_killed_then_fails_in_time(
    kind: str, sides: Start, met: bool
) -> None:
    reader = await sides()
    target = bytearray(5000)
    async with holder_process(kind) as holder:
        offer = await holder.publish("t", 5000)
        if met:
            await reader.backend.read("t", offer, Destination(split(target, [5000])), timeout_s=10)
        holder.signal(signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(KvTransferError) as caught:
        await reader.backend.read("t", offer, Destination(split(target, [5000])), timeout_s=2)
    assert isinstance(caught.value, TransferFailed | TransferTimeout)
    assert time.monotonic() - began < SOON_S
