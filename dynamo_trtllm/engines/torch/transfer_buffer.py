"""KV on its way: one bounded region per engine, which a backend registers once, and copies between it and the pool.

Why a prompt's KV is copied into it as soon as prefill is done, and not offered where it lies: a scattered block list
is thousands of rows, each of which costs a backend 5 to 7 microseconds; a copy on the GPU runs at terabytes a second.
And not layer by layer during prefill: the copy takes a hundredth of the prefill, and one offer per prompt stays one.

All copies are queued on the device's own stream behind the step that wrote the KV, so the scheduler waits for none of
them; a copy's event says when its piece may be read. Knows no tickets.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from dynamo_trtllm.engines.torch.kv import KvPool, zeros
from dynamo_trtllm.kv_transfer.base import MemoryRegion

_COLUMNS = 8192
_ROWS_AT_ONCE = 512  # 16 MiB: they and their products fit into the cache of a large GPU


def checksum(memory: Tensor) -> int:
    """Return the checksum of contiguous bytes. Waits for the current stream of its device."""
    words = _words(memory)
    while True:
        words = _row_sums(words)
        if len(words) == 1:
            return int(words.item())
        words = words.view(torch.int32)


def _words(memory: Tensor) -> Tensor:
    """Return the memory as 32-bit words, the last one padded with zeros."""
    if lacking := -len(memory) % 4:
        memory = torch.nn.functional.pad(memory, (0, lacking))
    elif memory.data_ptr() % 4:
        memory = memory.clone()
    return memory.view(torch.int32)


def _row_sums(words: Tensor) -> Tensor:
    """Return the weighted sum of each row; the last row may be shorter."""
    factors = _factors(words.device)
    whole = len(words) // _COLUMNS * _COLUMNS
    sums = [(some * factors).sum(1) for some in torch.split(words[:whole].view(-1, _COLUMNS), _ROWS_AT_ONCE)]
    if whole < len(words):
        sums.append((words[whole:] * factors[: len(words) - whole]).sum().view(1))
    return torch.cat(sums)


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Return odd pseudo-random numbers (SplitMix64), the same in every process."""
    mask, state, found = (1 << 64) - 1, 0, []
    for _ in range(_COLUMNS):
        state = (state + 0x9E3779B97F4A7C15) & mask
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
        odd = (mixed ^ (mixed >> 31)) | 1
        found.append(odd - (1 << 64) if odd >> 63 else odd)
    return torch.tensor(found, dtype=torch.int64).to(device)


REGION_BYTES = {"cuda": 128 << 20, "cpu": 4 << 20}  # large beside what a piece costs, small beside a prompt
_ALIGNED_BYTES = 4096


class Allocation(NamedTuple):
    """A prompt's place in the region, cut into pieces of whole rows."""

    begin: int  # bytes from the start of the region
    num_bytes: int
    pieces: tuple[Tensor, ...]  # bytes


class Range(NamedTuple):
    begin: int
    end: int


class TransferBuffer:
    """Taken from and given back on one thread; copies may be queued from any."""

    def __init__(self, pool: KvPool, num_bytes: int) -> None:
        self._pool = pool
        self._free = [Range(0, num_bytes)]  # ordered, never adjacent
        self._leaving: deque[tuple[Range, torch.cuda.Event]] = deque()  # a copy still reads or writes them
        self.num_bytes = num_bytes
        self.region = zeros(num_bytes, pool.device)
        self._bounce: Tensor | None = None  # where a piece in host memory passes through the GPU
        self._checking: torch.cuda.Stream | None = None  # where checksums are computed, beside the scheduler's steps
        self._bouncing = threading.Lock()  # two copies by way of it follow each other, whichever threads queue them

    def move_to_host(self) -> None:
        """Use pinned host memory, for transfer backends that can't read the GPU's. Call it before any `allocate`."""
        self.region = torch.empty(0)  # or both would be there at once
        torch.cuda.empty_cache()
        self.region = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=True)
        self._bounce = torch.empty(
            max(REGION_BYTES["cuda"], self._pool.row_bytes), dtype=torch.uint8, device=self._pool.device
        )

    @property
    def used_bytes(self) -> int:
        """Given back is free once its copies are done, whether or not anything was taken since. Safe from any thread
        while nothing is taken or given back."""
        done = [left for left, event in self._leaving if event.query()]  # type: ignore[no-untyped-call]
        return self.num_bytes - sum(free.end - free.begin for free in [*self._free, *done])

    # --- places ----------------------------------------------------------------------------------------

    def allocate(self, tokens: int, piece_bytes: int) -> Allocation | None:
        """Return space for the KV of that many tokens, or None while there is none."""
        wanted = self._pool.moved_bytes(tokens)
        aligned = -(-wanted // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._reap(wait=False)
        while (begin := self._carve(aligned)) is None:
            if not self._leaving:
                return None
            self._reap(wait=True)
        row = self._pool.row_bytes
        return Allocation(
            begin, aligned, torch.split(self.region[begin : begin + wanted], max(1, piece_bytes // row) * row)
        )

    def free(self, allocation: Allocation) -> None:
        """Free the space. It can be taken again once the copies that were queued so far are done."""
        freed = Range(allocation.begin, allocation.begin + allocation.num_bytes)
        if (event := self.mark()) is None:
            self._merge(freed)
        else:
            self._leaving.append((freed, event))

    def _reap(self, *, wait: bool) -> None:
        while self._leaving and (wait or self._leaving[0][1].query()):  # type: ignore[no-untyped-call]
            freed, event = self._leaving.popleft()
            if wait:
                event.synchronize()
                wait = False
            self._merge(freed)

    def _carve(self, num_bytes: int) -> int | None:
        """First fit, so that memory never touched stays untouched."""
        for at, (begin, end) in enumerate(self._free):
            if end - begin >= num_bytes:
                rest = Range(begin + num_bytes, end)
                self._free[at : at + 1] = [rest] if rest.begin < rest.end else []
                return begin
        return None

    def _merge(self, freed: Range) -> None:
        merged: list[Range] = []
        for free in sorted([*self._free, freed]):
            if free.begin == free.end:
                continue
            if merged and merged[-1].end == free.begin:
                free = Range(merged.pop().begin, free.end)
            merged.append(free)
        self._free = merged

    # --- copies ----------------------------------------------------------------------------------------

    def gather(self, allocation: Allocation, rows: Tensor) -> list[torch.cuda.Event]:
        """Queues copies of these rows of the pool; the events, on a GPU, of the pieces in order."""
        events, begin = [], 0
        for piece in allocation.pieces:
            end = begin + len(piece) // self._pool.row_bytes
            self._gather(piece, rows[begin:end])
            begin = end
            if (event := self.mark()) is not None:
                events.append(event)
        return events

    def _gather(self, piece: Tensor, rows: Tensor) -> None:
        if self._bounce is None:
            torch.index_select(self._pool.all_rows, 0, rows, out=self._as_rows(piece))
            return
        with self._bouncing:
            passing = self._bounce[: len(piece)]
            torch.index_select(self._pool.all_rows, 0, rows, out=self._as_rows(passing))
            piece.copy_(passing, non_blocking=True)

    def scatter(self, allocation: Allocation, rows: Tensor, index: int) -> None:
        """Queues the copy of one piece into its share of these rows of the pool."""
        piece = allocation.pieces[index]
        begin = index * (len(allocation.pieces[0]) // self._pool.row_bytes)  # only the last may be smaller
        some = rows[begin : begin + len(piece) // self._pool.row_bytes]
        if self._bounce is None:
            self._pool.all_rows.index_copy_(0, some, self._as_rows(piece))
            return
        with self._bouncing:
            passing = self._bounce[: len(piece)]
            passing.copy_(piece, non_blocking=True)
            self._pool.all_rows.index_copy_(0, some, self._as_rows(passing))

    def checksum(self, piece: MemoryRegion) -> int:
        """Return the checksum of a piece whose copies are done. Call it on any thread; it blocks."""
        begin = piece.address - self.region.data_ptr()
        memory = self.region[begin : begin + piece.num_bytes]
        if memory.device.type != "cuda":
            return checksum(memory)
        with torch.cuda.device(memory.device):
            self._checking = self._checking or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._checking):
                return checksum(memory)

    def _as_rows(self, piece: Tensor) -> Tensor:
        return piece.view(self._pool.width).view(-1, self._pool.all_rows.shape[1])

    def mark(self) -> torch.cuda.Event | None:
        """On a GPU, what says that all that was queued so far on the device's own stream is done."""
        if self._pool.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.default_stream(self._pool.device))
        return event
