"""The two ends of a measured hand-off, each a process with its own GPU: a holder that offers, a reader that fetches.

They move real bytes through the engine's own pool, staging memory and backend; the reader checks what arrived.
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
from dynamo_trtllm.kv_transfer.base import MemoryRegion
from dynamo_trtllm.kv_transfer.checksums import ChecksumMode, Checksums
from dynamo_trtllm.kv_transfer.nixl import NixlBackend
from dynamo_trtllm.messages import KvLayout
from dynamo_trtllm.worker.worker import SWITCH_S

# gpt-oss-120b: every other layer sees 128 tokens
LAYOUT = KvLayout(dtype="bfloat16", block_tokens=32, num_layers=36, num_kv_heads=8, head_dim=64)
WINDOWS = (128, None) * 18
TIMEOUT_S = 30.0
T = TypeVar("T")


class Plan(NamedTuple):
    """What both ends agree on before they start."""

    device: str  # cpu or cuda
    most_tokens: int
    transfer_buffer_bytes: int
    kv_checksums: ChecksumMode = "auto"
    only_bytes: bool = False  # no prompts


class Prompt(NamedTuple):
    """What is moved, and how: `whole` offers nothing before all of it was gathered."""

    tokens: int
    piece_bytes: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Times:
    """Of one prompt, on the clock that all processes of a host share."""

    began: float  # before the first copy out of the blocks was queued
    offered: float
    arrived: float  # the offer, at the reader
    fetched: float
    ended: float  # after the last copy into the blocks

    @property
    def all_s(self) -> float:
        return self.ended - self.began


class End:
    """Pool, staging memory and backend of one process."""

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

    async def start(self, on_fetched: Any) -> None:
        await self.backend.start(on_fetched)
        await self.backend.register(piece_of(self.transfer_buffer.region))

    def rows(self, tokens: int, number: int | None = None) -> Tensor:
        """Of a prompt in blocks that lie all over the pool; `number`: as the other end has them."""
        chosen = torch.Generator().manual_seed(1000 * tokens + (self.number if number is None else number))
        blocks = torch.randperm(self.pool.num_blocks, generator=chosen)[: self.pool.blocks_for(tokens)]
        return self.pool.rows(blocks.to(self.device), tokens)

    def content(self, rows: Tensor) -> Tensor:
        """What the holder's pool has in these rows: every eight bytes differ."""
        words = self.pool.row_bytes // 8
        return rows[:, None] * words + torch.arange(words, device=self.device)

    async def median_s(self, copy: Callable[[], object]) -> float:
        """How long something takes that is queued on the device."""
        times = []
        for _ in range(5):
            begun = await self.done()
            copy()
            times.append(await self.done() - begun)
        return sorted(times)[2]

    async def kernels(self, tokens: int) -> dict[str, float]:
        """GB/s of the ways to copy rows out of blocks and into them, by the width of the elements."""
        rows = self.rows(tokens)
        num_bytes = self.pool.moved_bytes(tokens)
        found = {}
        for width in (torch.complex128, torch.int64, torch.bfloat16):
            pool = self.pool.all_rows.view(torch.uint8).view(width)
            copy = self.transfer_buffer.region[:num_bytes].view(width).view(len(rows), -1)
            for name, way in {
                "index_select": partial(torch.index_select, pool, 0, rows, out=copy),
                "index_copy": partial(pool.index_copy_, 0, rows, copy),
                "index_put": partial(pool.index_put_, (rows,), copy),
            }.items():
                found[f"{name} {width}"] = num_bytes / await self.median_s(way) / 1e9
        return found

    async def done(self) -> float:
        """When all copies that were queued so far are done."""
        await over(self.transfer_buffer.mark())
        return time.perf_counter()


async def over(event: torch.cuda.Event | None) -> None:
    """What a GPU does can only be asked for."""
    while True:
        if event is None or event.query():  # type: ignore[no-untyped-call]
            return
        await asyncio.sleep(0)


class Holder:
    """Serves the reader's wishes, in the order in which they come."""

    def __init__(self, end: End, wishes: Connection) -> None:
        self._end = end
        self._wishes = wishes
        self._allocations: dict[str, Allocation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._freed = asyncio.Event()
        self._over = asyncio.Event()

    async def serve(self) -> None:
        end, loop = self._end, asyncio.get_running_loop()
        every = torch.arange(len(end.pool.all_rows), device=end.device)
        words = end.pool.all_rows.view(torch.int64)
        for some in torch.split(every, 4096):
            words[some] = end.content(some)
        await end.start(self._forget)
        loop.add_reader(self._wishes.fileno(), self._hear)
        self._wishes.send(("started", None))
        await self._over.wait()
        loop.remove_reader(self._wishes.fileno())
        await end.backend.aclose()

    def _hear(self) -> None:
        try:
            verb, ticket_id, wish = self._wishes.recv()
        except EOFError:  # the reader's process ended
            verb, ticket_id, wish = "stop", "", None
        if verb == "stop":
            self._over.set()
            return
        answers: dict[str, Callable[[str, Any], Coroutine[Any, Any, None]]] = {
            "prompt": self._prompt,
            "bytes": self._bytes,
            "copies": self._copies,
        }
        self._keep(answers[verb](ticket_id, wish))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            traceback.print_exception(exc)
            self._over.set()  # the reader hears that the process ended

    async def _allocation(self, prompt: Prompt) -> Allocation:
        """Waits: that the last prompt was read comes to be known a little later."""
        while (allocation := self._end.transfer_buffer.allocate(prompt.tokens, prompt.piece_bytes)) is None:
            self._freed.clear()
            await self._freed.wait()
        return allocation

    async def _prompt(self, ticket_id: str, prompt: Prompt) -> None:
        end = self._end
        rows = end.rows(prompt.tokens)
        await end.done()
        allocation = await self._allocation(prompt)
        self._allocations[ticket_id] = allocation
        began = time.perf_counter()
        copied = end.transfer_buffer.gather(allocation, rows)
        if prompt.whole:
            await end.done()
            copied = []
        pieces = [piece_of(piece) for piece in allocation.pieces]
        offer = await end.backend.publish(ticket_id, pieces, ready=0 if copied else None)
        self._wishes.send((ticket_id, (offer, began, time.perf_counter())))
        for ready, event in enumerate(copied, start=1):
            await over(event)
            end.backend.mark_ready(ticket_id, ready)

    async def _bytes(self, ticket_id: str, num_bytes: int) -> None:
        """One piece, where it lies."""
        piece = piece_of(self._end.transfer_buffer.region[:num_bytes])
        self._wishes.send((ticket_id, await self._end.backend.publish(ticket_id, [piece])))

    async def _copies(self, ticket_id: str, prompt: Prompt) -> None:
        """Seconds of a gather alone and of a scatter alone."""
        end = self._end
        rows, allocation = end.rows(prompt.tokens), await self._allocation(prompt)
        ways = (
            partial(end.transfer_buffer.gather, allocation, rows),
            partial(_scatter, end.transfer_buffer, allocation, rows),
        )
        taken = [await end.median_s(way) for way in ways]
        end.transfer_buffer.free(allocation)
        self._wishes.send((ticket_id, taken))

    def _forget(self, ticket_id: str) -> None:
        """Withdraw an offer that was read, and free its memory, as the engine does."""
        if (allocation := self._allocations.pop(ticket_id, None)) is not None:
            self._end.transfer_buffer.free(allocation)
            self._freed.set()
        self._keep(self._end.backend.unpublish(ticket_id))


def _scatter(transfer_buffer: TransferBuffer, allocation: Allocation, rows: Tensor) -> None:
    for index in range(len(allocation.pieces)):
        transfer_buffer.scatter(allocation, rows, index)


class Reader:
    """Asks the holder for tickets and redeems them."""

    def __init__(self, end: End, wishes: Connection) -> None:
        self.end = end
        self._wishes = wishes
        self._answers: dict[str, asyncio.Future[Any]] = {}
        self._asked = 0

    async def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._wishes.fileno(), self._hear)
        started = self._answers["started"] = asyncio.get_running_loop().create_future()
        await self.end.start(lambda ticket_id: None)
        await started

    async def stop(self) -> None:
        self._wishes.send(("stop", "", None))
        asyncio.get_running_loop().remove_reader(self._wishes.fileno())
        await self.end.backend.aclose()

    def _hear(self) -> None:
        try:
            ticket_id, answer = self._wishes.recv()
        except EOFError:
            asyncio.get_running_loop().remove_reader(self._wishes.fileno())
            for waiting in self._answers.values():
                waiting.set_exception(RuntimeError("the holder's process ended; its error is above"))
            return
        self._answers.pop(ticket_id).set_result(answer)

    async def ask(self, verb: str, wish: object) -> tuple[str, Any]:
        self._asked += 1
        ticket_id = f"{verb}-{self._asked}"
        answer = self._answers[ticket_id] = asyncio.get_running_loop().create_future()
        self._wishes.send((verb, ticket_id, wish))
        return ticket_id, await answer

    async def prompt(self, prompt: Prompt, rows: Tensor) -> Times:
        """One prompt's KV, from the holder's blocks into these rows."""
        end = self.end
        allocation = end.transfer_buffer.allocate(prompt.tokens, prompt.piece_bytes)
        assert allocation is not None, "no more are asked for at once than fit"
        ticket_id, (offer, began, offered) = await self.ask("prompt", prompt)
        arrived = time.perf_counter()
        pieces = [piece_of(piece) for piece in allocation.pieces]
        scatter = partial(end.transfer_buffer.scatter, allocation, rows)
        await end.backend.read(ticket_id, offer, pieces, timeout_s=TIMEOUT_S, on_piece=scatter)
        fetched = time.perf_counter()
        ended = await end.done()
        end.transfer_buffer.free(allocation)
        return Times(began, offered, arrived, fetched, ended)

    async def offers(self, num_bytes: int, count: int) -> list[tuple[str, bytes]]:
        return [await self.ask("bytes", num_bytes) for _ in range(count)]

    async def bytes(self, tickets: Sequence[tuple[str, bytes]], num_bytes: int) -> float:
        """Seconds to fetch one piece by each of these tickets, all at once."""
        piece = piece_of(self.end.transfer_buffer.region[:num_bytes])
        begun = time.perf_counter()
        fetches = (self.end.backend.read(name, offer, [piece], timeout_s=TIMEOUT_S) for name, offer in tickets)
        await asyncio.gather(*fetches)
        return time.perf_counter() - begun

    async def check(self, prompt: Prompt, rows: Tensor) -> None:
        """Raises AssertionError unless the blocks hold what the holder's hold, byte for byte."""
        words = self.end.pool.all_rows.view(torch.int64)
        words[rows] = -1
        await self.prompt(prompt, rows)
        theirs = self.end.rows(prompt.tokens, number=0)
        for ours, other in zip(torch.split(rows, 4096), torch.split(theirs, 4096), strict=True):
            assert torch.equal(words[ours], self.end.content(other)), f"{prompt}: other bytes arrived"


def device_of(kind: str, number: int) -> torch.device:
    """Of one end; both share a GPU where there is one."""
    return torch.device("cuda", number % torch.cuda.device_count()) if kind == "cuda" else torch.device("cpu")


def piece_of(memory: Tensor) -> MemoryRegion:
    return MemoryRegion(memory.data_ptr(), memory.nbytes, str(memory.device))


def run_as_worker(work: Coroutine[Any, Any, T]) -> T:
    """On the event loop of a worker, which hands Python's lock over as soon."""
    sys.setswitchinterval(SWITCH_S)
    return uvloop.run(work)


def hold(plan: Plan, wishes: Connection) -> None:
    """The holder's process."""
    run_as_worker(Holder(End(plan, 0), wishes).serve())
