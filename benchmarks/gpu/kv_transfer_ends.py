"""The two processes of a measured KV transfer: a source that offers KV, and a reader that fetches
it.

Each process has its own GPU. Both use the KV pool and transfer buffer of the torch engine and the
NIXL backend.
"""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

import torch
import uvloop
from torch import Tensor

from dynamo_trtllm.engines.torch.kv import KvPool
from dynamo_trtllm.engines.torch.transfer_buffer import Allocation, TransferBuffer
from dynamo_trtllm.kv_transfer.checksums import ChecksumMode, Checksums
from dynamo_trtllm.kv_transfer.memory import MemoryRegion
from dynamo_trtllm.kv_transfer.nixl import NixlBackend
from dynamo_trtllm.kv_transfer.transfer_backend import Destination
from dynamo_trtllm.protocol.messages import KvLayout
from dynamo_trtllm.worker.worker import SWITCH_S

# gpt-oss-120b: every other layer sees 128 tokens
LAYOUT = KvLayout(dtype="bfloat16", block_tokens=32, num_layers=36, num_kv_heads=8, head_dim=64)
WINDOWS = (128, None) * 18
TIMEOUT_S = 30.0
T = TypeVar("T")


class Plan(NamedTuple):
    """Settings of both processes."""

    device: str  # cpu or cuda
    most_tokens: int
    transfer_buffer_bytes: int
    kv_checksums: ChecksumMode = "auto"
    only_bytes: bool = False  # contiguous memory only, no prompts


class Prompt(NamedTuple):
    """The KV of one prompt. With `whole`, it is offered after all of it was gathered."""

    tokens: int
    region_bytes: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Times:
    """Times of one transfer in seconds, on a clock that all processes of a host share."""

    began: float  # before the first copy out of the blocks was queued
    offered: float
    arrived: float  # when the reader had the offer
    fetched: float
    ended: float  # after the last copy into the blocks

    @property
    def all_s(self) -> float:
        return self.ended - self.began


class TransferEnd:
    """KV pool, transfer buffer and backend of one process."""

    def __init__(self, plan: Plan, number: int) -> None:
        self.device = device_of(plan.device, number)
        self.number = number
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        blocks = -(-plan.most_tokens // LAYOUT.block_tokens)
        self.pool = KvPool(LAYOUT, blocks + blocks // 8, windows=WINDOWS, device=self.device)
        self.transfer_buffer = TransferBuffer(self.pool, plan.transfer_buffer_bytes)
        self.backend = NixlBackend(Checksums(plan.kv_checksums))
        self.backend.checksums.device_checksum = self.transfer_buffer.checksum
        self.backend.prepare_thread = self.transfer_buffer.use_device

    async def start(self, on_fetched: Any) -> None:
        await self.backend.start(on_fetched)
        await self.backend.register(region_of(self.transfer_buffer.memory))

    def rows(self, tokens: int, number: int | None = None) -> Tensor:
        """Return the rows of a prompt in scattered blocks of the pool.

        `number` selects the process, default this.
        """
        chosen = torch.Generator().manual_seed(
            1000 * tokens + (self.number if number is None else number)
        )
        blocks = torch.randperm(self.pool.num_blocks, generator=chosen)[
            : self.pool.blocks_for(tokens)
        ]
        return self.pool.rows(blocks.to(self.device), tokens)

    def content(self, rows: Tensor) -> Tensor:
        """Return the content of these rows in the source's pool. Every eight bytes differ."""
        words = self.pool.row_bytes // 8
        return rows[:, None] * words + torch.arange(words, device=self.device)

    async def median_s(self, copy: Callable[[], object]) -> float:
        """Return the median seconds of an operation on the device."""
        times = []
        for _ in range(5):
            begun = await self.done()
            copy()
            times.append(await self.done() - begun)
        return sorted(times)[2]

    async def kernels(self, tokens: int) -> dict[str, float]:
        """Return the GB/s of kernels that copy rows out of and into blocks, by kernel and element
        type.
        """
        rows = self.rows(tokens)
        num_bytes = self.pool.moved_bytes(tokens)
        found = {}
        for width in (torch.complex128, torch.int64, torch.bfloat16):
            pool = self.pool.all_rows.view(torch.uint8).view(width)
            copy = self.transfer_buffer.memory[:num_bytes].view(width).view(len(rows), -1)
            for name, way in {
                "index_select": partial(torch.index_select, pool, 0, rows, out=copy),
                "index_copy": partial(pool.index_copy_, 0, rows, copy),
                "index_put": partial(pool.index_put_, (rows,), copy),
            }.items():
                found[f"{name} {width}"] = num_bytes / await self.median_s(way) / 1e9
        return found

    async def done(self) -> float:
        """Wait until all queued copies are done. Return the time."""
        await wait_event(self.transfer_buffer.record_event())
        return time.perf_counter()


async def wait_event(event: torch.cuda.Event | None) -> None:
    """Poll until the event has happened."""
    while True:
        if event is None or event.query():  # type: ignore[no-untyped-call]
            return
        await asyncio.sleep(0)


class KvSource:
    """Executes the reader's commands in order."""

    def __init__(self, end: TransferEnd, connection: Connection) -> None:
        self._end = end
        self._connection = connection
        self._allocations: dict[str, Allocation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._freed = asyncio.Event()
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Fill the pool and execute commands until the reader stops."""
        end = self._end
        loop = asyncio.get_running_loop()
        every = torch.arange(len(end.pool.all_rows), device=end.device)
        words = end.pool.all_rows.view(torch.int64)
        for some in torch.split(every, 4096):
            words[some] = end.content(some)
        await end.start(self._release)
        loop.add_reader(self._connection.fileno(), self._on_command)
        self._connection.send(("started", None))
        await self._stopped.wait()
        loop.remove_reader(self._connection.fileno())
        await end.backend.aclose()

    def _on_command(self) -> None:
        try:
            command, transfer_id, argument = self._connection.recv()
        except EOFError:  # the reader's process ended
            command = "stop"
            transfer_id = ""
            argument = None
        if command == "stop":
            self._stopped.set()
            return
        handlers: dict[str, Callable[[str, Any], Coroutine[Any, Any, None]]] = {
            "prompt": self._prompt,
            "bytes": self._bytes,
            "copies": self._copies,
        }
        self._create_task(handlers[command](transfer_id, argument))

    def _create_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            traceback.print_exception(exc)
            self._stopped.set()

    async def _allocation(self, prompt: Prompt) -> Allocation:
        """Allocate transfer buffer memory. Waits until that of earlier prompts is released."""
        while (
            allocation := self._end.transfer_buffer.allocate(prompt.tokens, prompt.region_bytes)
        ) is None:
            self._freed.clear()
            await self._freed.wait()
        return allocation

    async def _prompt(self, transfer_id: str, prompt: Prompt) -> None:
        end = self._end
        rows = end.rows(prompt.tokens)
        await end.done()
        allocation = await self._allocation(prompt)
        self._allocations[transfer_id] = allocation
        began = time.perf_counter()
        copied = end.transfer_buffer.gather(allocation, rows)
        if prompt.whole:
            await end.done()
            copied = []
        regions = [region_of(region) for region in allocation.regions]
        offer = await end.backend.publish(transfer_id, regions, ready=0 if copied else None)
        self._connection.send((transfer_id, (offer, began, time.perf_counter())))
        for ready, event in enumerate(copied, start=1):
            await wait_event(event)
            end.backend.mark_ready(transfer_id, ready)

    async def _bytes(self, transfer_id: str, num_bytes: int) -> None:
        """Offer contiguous memory of the transfer buffer."""
        region = region_of(self._end.transfer_buffer.memory[:num_bytes])
        self._connection.send((transfer_id, await self._end.backend.publish(transfer_id, [region])))

    async def _copies(self, transfer_id: str, prompt: Prompt) -> None:
        """Send the seconds of a gather alone and of a scatter alone."""
        end = self._end
        rows = end.rows(prompt.tokens)
        allocation = await self._allocation(prompt)
        ways = (
            partial(end.transfer_buffer.gather, allocation, rows),
            partial(_scatter, end.transfer_buffer, allocation, rows),
        )
        seconds = [await end.median_s(way) for way in ways]
        end.transfer_buffer.free(allocation)
        self._connection.send((transfer_id, seconds))

    def _release(self, transfer_id: str) -> None:
        """Withdraw an offer that was read, and free its memory."""
        if (allocation := self._allocations.pop(transfer_id, None)) is not None:
            self._end.transfer_buffer.free(allocation)
            self._freed.set()
        self._create_task(self._end.backend.unpublish(transfer_id))


def _scatter(transfer_buffer: TransferBuffer, allocation: Allocation, rows: Tensor) -> None:
    for index in range(len(allocation.regions)):
        transfer_buffer.scatter(allocation, rows, index)


class KvReader:
    """Sends commands to the source and fetches what it offers."""

    def __init__(self, end: TransferEnd, connection: Connection) -> None:
        self.end = end
        self._connection = connection
        self._answers: dict[str, asyncio.Future[Any]] = {}
        self._num_commands = 0

    async def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self._on_answer)
        started = self._answers["started"] = asyncio.get_running_loop().create_future()
        await self.end.start(lambda transfer_id: None)
        await started

    async def stop(self) -> None:
        self._connection.send(("stop", "", None))
        asyncio.get_running_loop().remove_reader(self._connection.fileno())
        await self.end.backend.aclose()

    def _on_answer(self) -> None:
        try:
            transfer_id, answer = self._connection.recv()
        except EOFError:
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            for waiting in self._answers.values():
                waiting.set_exception(RuntimeError("the source process ended; its error is above"))
            return
        self._answers.pop(transfer_id).set_result(answer)

    async def ask(self, command: str, argument: object) -> tuple[str, Any]:
        """Send a command to the source. Return the transfer id and the answer."""
        self._num_commands += 1
        transfer_id = f"{command}-{self._num_commands}"
        answer = self._answers[transfer_id] = asyncio.get_running_loop().create_future()
        self._connection.send((command, transfer_id, argument))
        return transfer_id, await answer

    async def prompt(self, prompt: Prompt, rows: Tensor) -> Times:
        """Transfer the KV of a prompt from the source's blocks into these rows."""
        end = self.end
        allocation = end.transfer_buffer.allocate(prompt.tokens, prompt.region_bytes)
        assert allocation is not None, (
            "the transfer buffer is too small for the transfers in flight"
        )
        transfer_id, (offer, began, offered) = await self.ask("prompt", prompt)
        arrived = time.perf_counter()
        regions = [region_of(region) for region in allocation.regions]
        scatter = partial(end.transfer_buffer.scatter, allocation, rows)
        await end.backend.read(
            transfer_id, offer, Destination(regions, scatter), timeout_s=TIMEOUT_S
        )
        fetched = time.perf_counter()
        ended = await end.done()
        end.transfer_buffer.free(allocation)
        return Times(began, offered, arrived, fetched, ended)

    async def offers(self, num_bytes: int, count: int) -> list[tuple[str, bytes]]:
        """Return the ids and offers of this many transfers of contiguous memory."""
        return [await self.ask("bytes", num_bytes) for _ in range(count)]

    async def bytes(self, offers: Sequence[tuple[str, bytes]], num_bytes: int) -> float:
        """Fetch all offers at once. Return the seconds it took."""
        region = region_of(self.end.transfer_buffer.memory[:num_bytes])
        begun = time.perf_counter()
        fetches = (
            self.end.backend.read(name, offer, Destination([region]), timeout_s=TIMEOUT_S)
            for name, offer in offers
        )
        await asyncio.gather(*fetches)
        return time.perf_counter() - begun

    async def check(self, prompt: Prompt, rows: Tensor) -> None:
        """Transfer a prompt and compare all bytes.

        Raise AssertionError if they differ from the source's.
        """
        words = self.end.pool.all_rows.view(torch.int64)
        words[rows] = -1
        await self.prompt(prompt, rows)
        theirs = self.end.rows(prompt.tokens, number=0)
        for ours, other in zip(torch.split(rows, 4096), torch.split(theirs, 4096), strict=True):
            assert torch.equal(words[ours], self.end.content(other)), (
                f"{prompt}: received bytes differ"
            )


def device_of(kind: str, number: int) -> torch.device:
    """Return the device of a process. Both share a GPU if there is only one."""
    return (
        torch.device("cuda", number % torch.cuda.device_count())
        if kind == "cuda"
        else torch.device("cpu")
    )


def region_of(memory: Tensor) -> MemoryRegion:
    """Return the memory region of a contiguous tensor."""
    return MemoryRegion(memory.data_ptr(), memory.nbytes, str(memory.device))


def run_as_worker(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` with the event loop and thread switch interval of a worker."""
    sys.setswitchinterval(SWITCH_S)
    return uvloop.run(work)


def run_source(plan: Plan, connection: Connection) -> None:
    """Run the source process."""
    run_as_worker(KvSource(TransferEnd(plan, 0), connection).run())
