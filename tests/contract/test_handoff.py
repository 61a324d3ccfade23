"""The contract of carriers: loopback, tcp and nixl in one process, tcp and nixl between two."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.errors import HandoffError, HandoffTimeout, TransferFailed
from dynamo_trtllm.handoff.base import Carrier, Piece
from dynamo_trtllm.handoff.select import select_carrier
from tests.contract.handoff_holder import content, split

KINDS = ("loopback", "tcp", "nixl")
REMOTE = ("tcp", "nixl")
ODD = [1, 4097, 0, 65_537, 3, 1_000_003]


class Side:
    """A started carrier and what it was told."""

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self.fetched: list[str] = []
        self.threads: list[int] = []
        self._heard = asyncio.Event()

    def hear(self, ticket_id: str) -> None:
        self.fetched.append(ticket_id)
        self.threads.append(threading.get_ident())
        self._heard.set()

    async def told(self, count: int) -> list[str]:
        async with asyncio.timeout(5):
            while len(self.fetched) < count:
                self._heard.clear()
                await self._heard.wait()
        return self.fetched


Start = Callable[[], Awaitable[Side]]


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def sides(kind: str) -> AsyncIterator[Start]:
    """Starts carriers of the kind that the test is parametrized with, and closes them."""
    async with AsyncExitStack() as stack:

        async def start() -> Side:
            side = Side(select_carrier(kind))
            await side.carrier.start(side.hear)
            stack.push_async_callback(side.carrier.aclose)
            return side

        yield start


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize("sizes", [[1], [4096], [1_000_003], ODD, [777] * 300], ids=["1", "4096", "1e6", "odd", "300"])
async def test_fetch_when_offered_then_bytes_arrive_and_holder_is_told_once(sides: Start, sizes: list[int]) -> None:
    holder, reader = await sides(), await sides()
    source, target = content("a", sum(sizes)), bytearray(sum(sizes))
    offer = await holder.carrier.offer("t", split(source, sizes))
    await reader.carrier.fetch("t", offer, split(target, sizes), timeout_s=10)
    assert target == source
    assert await holder.told(1) == ["t"]
    await asyncio.sleep(0.05)
    assert holder.fetched == ["t"]
    assert holder.threads == [threading.get_ident()]  # on the loop, whichever thread noticed
    assert reader.fetched == []


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_fetch_when_no_bytes_are_offered_then_holder_is_told(sides: Start) -> None:
    holder, reader = await sides(), await sides()
    await reader.carrier.fetch("t", await holder.carrier.offer("t", []), [], timeout_s=10)
    assert await holder.told(1) == ["t"]


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_fetch_when_offer_was_withdrawn_then_transfer_failed(sides: Start) -> None:
    holder, reader = await sides(), await sides()
    source, target = content("a", 5000), bytearray(5000)
    offers = {ticket: await holder.carrier.offer(ticket, split(source, [5000])) for ticket in ("gone", "kept")}
    await holder.carrier.withdraw("gone")
    with pytest.raises(TransferFailed, match="gone"):
        await reader.carrier.fetch("gone", offers["gone"], split(target, [5000]), timeout_s=10)
    await reader.carrier.fetch("kept", offers["kept"], split(target, [5000]), timeout_s=10)
    assert target == source
    assert await holder.told(1) == ["kept"]


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_fetch_when_ticket_was_offered_anew_then_the_old_offer_fails(sides: Start) -> None:
    holder, reader = await sides(), await sides()
    source, target = content("a", 5000), bytearray(5000)
    old = await holder.carrier.offer("t", split(source, [5000]))
    await holder.carrier.withdraw("t")
    new = await holder.carrier.offer("t", split(source, [5000]))
    await reader.carrier.fetch("t", new, split(target, [5000]), timeout_s=10)
    assert target == source
    if old != new:  # loopback names only the carrier
        with pytest.raises(TransferFailed):
            await reader.carrier.fetch("t", old, split(target, [5000]), timeout_s=10)


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize("sizes", [[4999], [5001], [2500, 2500]], ids=str)
async def test_fetch_when_sizes_differ_then_refused_and_nothing_written(sides: Start, sizes: list[int]) -> None:
    holder, reader = await sides(), await sides()
    source, target = content("a", 5000), bytearray(sum(sizes))
    offer = await holder.carrier.offer("t", split(source, [5000]))
    with pytest.raises(TransferFailed, match=r"pieces|bytes"):
        await reader.carrier.fetch("t", offer, split(target, sizes), timeout_s=10)
    assert target == bytes(sum(sizes))


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize("offer", [b"", b"\x81\xa1a\x01", b"noise"], ids=["empty", "other", "noise"])
async def test_fetch_when_offer_is_not_one_then_transfer_failed(sides: Start, offer: bytes) -> None:
    reader = await sides()
    with pytest.raises(TransferFailed, match="not one of carrier"):
        await reader.carrier.fetch("t", offer, [], timeout_s=10)


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize("begin", [0, 2])
async def test_fetch_when_pieces_become_ready_one_by_one_then_each_is_told_and_none_is_read_early(
    sides: Start, begin: int
) -> None:
    holder, reader = await sides(), await sides()
    sizes = [1, 4097, 65_537, 300_003]
    source, target, arrived = content("a", sum(sizes)), bytearray(sum(sizes)), asyncio.Queue[int]()
    loop = asyncio.get_running_loop()

    def hear(index: int) -> None:
        loop.call_soon_threadsafe(arrived.put_nowait, index)

    offer = await holder.carrier.offer("t", split(source, sizes), ready=begin)
    holder.carrier.advance("unknown", 1)
    to = split(target, sizes)
    fetch = asyncio.create_task(reader.carrier.fetch("t", offer, to, timeout_s=10, on_piece=hear))
    assert [await arrived.get() for _ in range(begin)] == list(range(begin))
    for ready in range(begin, len(sizes)):
        await asyncio.sleep(0.02)
        assert arrived.empty()
        assert not any(target[sum(sizes[:ready]) :])
        holder.carrier.advance("t", ready + 1)
        assert await arrived.get() == ready
    await fetch
    assert target == source
    assert arrived.empty()
    assert await holder.told(1) == ["t"]


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_fetch_when_withdrawn_before_all_is_ready_then_transfer_failed(sides: Start) -> None:
    holder, reader = await sides(), await sides()
    source, target = content("a", 5000), bytearray(5000)
    offer = await holder.carrier.offer("t", split(source, [2500, 2500]), ready=1)
    fetch = asyncio.create_task(reader.carrier.fetch("t", offer, split(target, [2500, 2500]), timeout_s=10))
    await asyncio.sleep(0.05)
    await holder.carrier.withdraw("t")
    with pytest.raises(TransferFailed):
        await fetch
    assert holder.fetched == []


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_fetch_when_the_rest_never_becomes_ready_then_handoff_timeout(sides: Start) -> None:
    holder, reader = await sides(), await sides()
    source, target = content("a", 5000), bytearray(5000)
    offer = await holder.carrier.offer("t", split(source, [2500, 2500]), ready=1)
    with pytest.raises(HandoffTimeout):
        await reader.carrier.fetch("t", offer, split(target, [2500, 2500]), timeout_s=0.2)
    holder.carrier.advance("t", 2)
    await reader.carrier.fetch("t", offer, split(target, [2500, 2500]), timeout_s=10)
    assert target == source


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_register_when_both_sides_did_then_parts_of_it_move_without_another_registration(
    kind: str, sides: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, reader = await sides(), await sides()
    source, target = content("a", 100_000), bytearray(100_000)
    for side, memory in ((holder, source), (reader, target)):
        await side.carrier.register(split(memory, [len(memory)])[0])
    ends = [side.carrier for side in (holder, reader)]
    registered = [count_registrations(end, monkeypatch) for end in ends] if kind == "nixl" else []
    sizes = [1000, 4096, 50_000]
    for number in range(3):
        offer = await holder.carrier.offer(f"t{number}", split(source, sizes))
        assert not any(registered)
        target[:] = bytes(len(target))
        await reader.carrier.fetch(f"t{number}", offer, split(target, sizes), timeout_s=10)
        assert target == source[: sum(sizes)] + bytes(100_000 - sum(sizes))
        await holder.carrier.withdraw(f"t{number}")
    assert not any(registered)


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_register_when_memory_can_not_be_moved_then_transfer_failed(sides: Start) -> None:
    """The engine then takes host memory. There is no GPU here: a GPU machine has its own tests."""
    holder = await sides()
    for device in ("tape:0", "cuda:99"):
        with pytest.raises(TransferFailed, match=device.partition(":")[0]):
            await holder.carrier.register(Piece(4096, 10, device))
    source = content("a", 10)
    await holder.carrier.offer("t", split(source, [10]))


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_offer_when_ticket_is_offered_already_then_transfer_failed(sides: Start) -> None:
    holder = await sides()
    source = content("a", 10)
    await holder.carrier.offer("t", split(source, [10]))
    with pytest.raises(TransferFailed, match="already"):
        await holder.carrier.offer("t", split(source, [10]))
    await holder.carrier.withdraw("t")
    await holder.carrier.withdraw("t")  # unknown tickets are no error
    await holder.carrier.offer("t", split(source, [10]))


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_offer_when_memory_can_not_be_moved_then_transfer_failed_and_ticket_is_free(sides: Start) -> None:
    holder = await sides()
    with pytest.raises(TransferFailed, match="tape"):
        await holder.carrier.offer("t", [Piece(4096, 10, "tape:0")])
    source = content("a", 10)
    await holder.carrier.offer("t", split(source, [10]))


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_fetch_when_eight_at_once_both_ways_then_all_arrive(sides: Start) -> None:
    one, two = await sides(), await sides()
    tickets = [(f"t{i}", *((one, two) if i % 2 else (two, one))) for i in range(8)]
    sources = {ticket: content(ticket, 300_001) for ticket, _, _ in tickets}
    targets = {ticket: bytearray(300_001) for ticket in sources}

    async def move(ticket: str, holder: Side, reader: Side) -> None:
        offer = await holder.carrier.offer(ticket, split(sources[ticket], [300_000, 1]))
        await reader.carrier.fetch(ticket, offer, split(targets[ticket], [300_000, 1]), timeout_s=10)

    async with asyncio.TaskGroup() as group:
        for ticket in tickets:
            group.create_task(move(*ticket))
    assert targets == sources
    assert sorted(await one.told(4)) == ["t1", "t3", "t5", "t7"]
    assert sorted(await two.told(4)) == ["t0", "t2", "t4", "t6"]


@pytest.mark.parametrize("kind", KINDS, indirect=True)
async def test_aclose_when_called_twice_with_offers_out_then_nothing_is_left(kind: str) -> None:
    tasks, threads = len(asyncio.all_tasks()), own_threads()
    carrier = select_carrier(kind)
    await carrier.start(lambda ticket_id: None)
    source, target = content("a", 100), bytearray(100)
    offer = await carrier.offer("t", split(source, [100]))
    if kind != "nixl":  # an agent does not read from itself
        await carrier.fetch("t", offer, split(target, [100]), timeout_s=10)
    await carrier.aclose()
    await carrier.aclose()
    assert len(asyncio.all_tasks()) == tasks
    assert own_threads() == threads
    with pytest.raises(TransferFailed):
        await carrier.offer("u", split(source, [100]))


# --- two processes -----------------------------------------------------------------------------------------


class Holder:
    """The other process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(15):
            while line := await self._process.stdout.readline():
                if line.startswith(b"@"):
                    return json.loads(line[1:])  # type: ignore[no-any-return]
        raise AssertionError("the holder process ended")

    async def ask(self, *words: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write((" ".join(map(str, words)) + "\n").encode())
        return await self.answer()

    async def offer(self, ticket_id: str, *sizes: int) -> bytes:
        return bytes.fromhex((await self.ask("offer", ticket_id, *sizes))["offer"])

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def freeze(self) -> None:
        """Returns once it stands still: on a busy machine a stop takes a while to reach every thread."""
        self.signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self._process.pid}/task")
        while any(_state(thread) != "T" for thread in threads.iterdir()):
            time.sleep(0.001)


def _state(thread: Path) -> str:
    return thread.joinpath("stat").read_text().rpartition(")")[2].split()[0]


@asynccontextmanager
async def holder_process(kind: str) -> AsyncIterator[Holder]:
    command = (sys.executable, "-m", "tests.contract.handoff_holder", kind)
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
    return sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio"))


def open_sockets() -> int:
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{entry}").startswith("socket:")
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    return count


@pytest.mark.parametrize("kind", REMOTE, indirect=True)
async def test_fetch_when_holder_is_another_process_then_bytes_arrive_and_it_is_told(kind: str, sides: Start) -> None:
    reader = await sides()
    async with holder_process(kind) as holder:
        for ticket in ("t0", "t1", "t2"):
            offer = await holder.offer(ticket, *ODD)
            target = bytearray(sum(ODD))
            await reader.carrier.fetch(ticket, offer, split(target, ODD), timeout_s=10)
            assert target == content(ticket, sum(ODD))
            assert await holder.answer() == {"fetched": ticket}
        await holder.ask("withdraw", "t2")
        with pytest.raises(TransferFailed):
            await reader.carrier.fetch("t2", offer, split(target, ODD), timeout_s=10)


def count_registrations(carrier: Any, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the NIXL agent has registered from now on and not deregistered."""
    agent, registered = carrier._vendor.agent, []
    register, deregister = agent.register_memory, agent.deregister_memory

    def counted(*args: Any) -> Any:
        registered.append(register(*args))
        return registered[-1]

    def discounted(which: Any) -> None:
        deregister(which)
        registered.remove(which)

    monkeypatch.setattr(agent, "register_memory", counted)
    monkeypatch.setattr(agent, "deregister_memory", discounted)
    return registered


@pytest.mark.parametrize("kind", REMOTE, indirect=True)
@pytest.mark.parametrize("cancel", [False, True], ids=["timeout", "cancel"])
async def test_fetch_when_holder_is_frozen_then_ends_in_time_and_leaves_nothing(
    kind: str, sides: Start, cancel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = await sides()
    registered = count_registrations(reader.carrier, monkeypatch) if kind == "nixl" else []
    size = 8 << 20
    async with holder_process(kind) as holder:
        target = bytearray(size)
        await reader.carrier.fetch("w", await holder.offer("w", size), split(target, [size]), timeout_s=10)
        assert await holder.answer() == {"fetched": "w"}
        offer = await holder.offer("t", size)
        tasks, threads, sockets = len(asyncio.all_tasks()), own_threads(), open_sockets()
        holder.freeze()
        began = time.monotonic()
        fetch = asyncio.create_task(reader.carrier.fetch("t", offer, split(target, [size]), timeout_s=1.5))
        if cancel:
            await asyncio.sleep(0.3)
            fetch.cancel()
        with pytest.raises(asyncio.CancelledError if cancel else HandoffTimeout):
            await fetch
        assert time.monotonic() - began < 3
        target[:] = b"\x55" * size
        holder.signal(signal.SIGCONT)
        await asyncio.sleep(0.5)
        assert target == b"\x55" * size  # the late answer went nowhere
        assert len(asyncio.all_tasks()) == tasks
        assert own_threads() == threads
        assert open_sockets() <= sockets
        assert registered == []
        await reader.carrier.fetch("t", offer, split(target, [size]), timeout_s=10)  # and the next fetch works
        assert target == content("t", size)


@pytest.mark.parametrize("kind", REMOTE, indirect=True)
@pytest.mark.parametrize("met", [False, True], ids=["unmet", "met"])
async def test_fetch_when_holder_was_killed_then_fails_in_time(kind: str, sides: Start, met: bool) -> None:
    reader = await sides()
    target = bytearray(5000)
    async with holder_process(kind) as holder:
        offer = await holder.offer("t", 5000)
        if met:
            await reader.carrier.fetch("t", offer, split(target, [5000]), timeout_s=10)
        holder.signal(signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(HandoffError) as caught:
        await reader.carrier.fetch("t", offer, split(target, [5000]), timeout_s=2)
    assert isinstance(caught.value, TransferFailed | HandoffTimeout)
    assert time.monotonic() - began < 4
