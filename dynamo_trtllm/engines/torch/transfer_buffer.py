"""Hold KV that is sent or received in one bounded buffer, copy it from and to the KV pool, and
compute its checksums.

A transfer backend registers the buffer once. Prefilled KV is copied into the buffer, because a
prompt's KV is scattered over thousands of rows in the pool: each row costs a transfer backend 5 to
7 microseconds, while a GPU copies terabytes per second. The copy follows the prefill. A copy per
layer during the prefill would save at most a hundredth of the time of the prefill.

All copies run on the device's default stream after the step that wrote the KV, so the scheduler
does not wait for them. For each region, an event reports when the copy is done.
"""

from __future__ import annotations

import functools
import threading
from bisect import insort
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from dynamo_trtllm.engines.torch.kv import KvPool, zeros
from dynamo_trtllm.engines.torch.random_numbers import split_mix
from dynamo_trtllm.kv_transfer.memory import MemoryRegion
from dynamo_trtllm.protocol.number_types import ceil_div

_COLUMNS = 8192  # words in a row of the checksum
_ROWS_AT_ONCE = 512  # 16 MiB: these rows and their products fit into the L2 cache of a large GPU


def checksum(memory: Tensor) -> int:
    """Return the checksum of `memory`, uint8 [bytes], contiguous.

    Waits for the current stream of its device.
    """
    words = _words(memory)
    while True:
        words = _row_sums(words)
        if len(words) == 1:
            return int(words.item())
        # The sums of the rows are the words of the next round, until only one sum is left.
        words = words.view(torch.int32)


def _words(memory: Tensor) -> Tensor:
    """Return the memory as 32-bit words, int32 [words]. The last word is padded with zeros."""
    lacking = -len(memory) % 4
    if lacking > 0:
        memory = torch.nn.functional.pad(memory, (0, lacking))
    elif memory.data_ptr() % 4 != 0:
        # The clone has an aligned address.
        memory = memory.clone()
    return memory.view(torch.int32)


def _row_sums(words: Tensor) -> Tensor:
    """Return the weighted sum of each row of _COLUMNS words, int64 [rows].

    The last row may be shorter.
    """
    factors = _factors(words.device)
    num_whole = len(words) // _COLUMNS * _COLUMNS  # words in whole rows
    whole_rows = words[:num_whole].view(-1, _COLUMNS)
    sums = [(rows * factors).sum(1) for rows in torch.split(whole_rows, _ROWS_AT_ONCE)]
    if num_whole < len(words):
        rest = words[num_whole:]
        sums.append((rest * factors[: len(rest)]).sum().view(1))
    return torch.cat(sums)


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Return odd pseudo-random numbers (SplitMix64), int64 [_COLUMNS].

    The numbers are the same in every process.
    """
    factors = []
    for number in range(_COLUMNS):
        factor = split_mix(number * 0x9E3779B97F4A7C15) | 1
        # The factor is read as a signed number.
        is_negative = factor >> 63 == 1
        factors.append(factor - (1 << 64) if is_negative else factor)
    return torch.tensor(factors, dtype=torch.int64).to(device)


# The size of a region. It is large enough to amortize the cost per region, and small enough to
# divide a prompt into several regions.
REGION_BYTES = {"cuda": 128 << 20, "cpu": 4 << 20}
_ALIGNED_BYTES = 4096  # allocations begin at multiples of this number


class Allocation(NamedTuple):
    """The space of one prompt in the buffer, divided into regions of whole rows."""

    begin: int  # offset in the buffer, in bytes
    num_bytes: int
    regions: tuple[Tensor, ...]  # the regions, each uint8 [bytes]


class _BufferPart(NamedTuple):
    """A part of the buffer, as offsets in bytes."""

    begin: int
    end: int


def _aligned(num_bytes: int) -> int:
    return ceil_div(num_bytes, _ALIGNED_BYTES) * _ALIGNED_BYTES


class _FreedAllocation(NamedTuple):
    """An allocation that was freed while copies from or to it may still run."""

    allocation: Allocation
    last_copy: torch.cuda.Event


class TransferBuffer:
    """The transfer buffer of one engine.

    Call `allocate` and `free` on one thread. `gather` and `scatter` are thread-safe.

    Args:
        pool: the KV pool.
        num_bytes: the size of the buffer.
        is_divided: one half of the buffer is for KV that other engines fetch, and one half is for
            KV that this engine fetches. Without this division, two elastic engines could wait for
            each other's buffer for ever.
    """

    def __init__(self, pool: KvPool, num_bytes: int, *, is_divided: bool = False) -> None:
        self._pool = pool
        self._is_divided = is_divided
        self._used: list[Allocation] = []  # allocations in the order of the buffer
        # Freed allocations. They stay in `_used` until their last copy is done.
        self._freed: deque[_FreedAllocation] = deque()
        self.num_bytes = num_bytes
        self.memory = zeros(num_bytes, pool.device)  # uint8 [num_bytes]
        # Staging memory on the GPU, if the buffer is in host memory.
        self._bounce: Tensor | None = None
        # On this stream, checksums are computed while steps run on the default stream.
        self._checksum_stream: torch.cuda.Stream | None = None
        # Held while a copy through `_bounce` is queued: one copy at a time uses this memory.
        self._bounce_lock = threading.Lock()

    def move_to_host(self) -> None:
        """Move the buffer to pinned host memory, for transfer backends that can't read GPU memory.

        Call it before the first `allocate`.
        """
        self.memory = torch.empty(0)  # free the old buffer first: both may not fit
        torch.cuda.empty_cache()
        self.memory = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=True)
        self._bounce = torch.empty(
            max(REGION_BYTES["cuda"], self._pool.row_bytes),
            dtype=torch.uint8,
            device=self._pool.device,
        )

    def use_device(self) -> None:
        """Make the GPU of the pool the current one of the calling thread. On CPU there is none."""
        if self._pool.device.type == "cuda":
            torch.cuda.set_device(self._pool.device)
            torch.cuda.synchronize()  # creates the thread's context, which libraries look up

    # --- places -----------------------------------------------------------------------------------

    @property
    def longest_prompt(self) -> int:
        """The most tokens of a prompt whose KV fits, in whole blocks."""
        begin, end = self._part(is_fetched=False)
        blocks = self._pool.num_blocks
        block_tokens = self._pool.block_tokens
        while blocks and _aligned(self._pool.moved_bytes(blocks * block_tokens)) > end - begin:
            blocks -= 1
        return blocks * block_tokens

    def allocate(
        self, tokens: int, region_bytes: int, *, is_fetched: bool = False
    ) -> Allocation | None:
        """Allocate space for the KV of a prompt.

        Args:
            tokens: the length of the prompt.
            region_bytes: the size of a region in bytes. It is rounded down to whole rows, but is at
                least one row.
            is_fetched: this engine fetches the KV.

        Returns:
            The space, or None while too little is free.
        """
        wanted = self._pool.moved_bytes(tokens)
        aligned = _aligned(wanted)
        part = self._part(is_fetched=is_fetched)
        self._reap()
        begin = self._first_gap(aligned, part)
        while begin is None:
            if not self._freed:
                return None
            self._freed[0].last_copy.synchronize()
            self._reap()
            begin = self._first_gap(aligned, part)
        row_bytes = self._pool.row_bytes
        rows_per_region = max(1, region_bytes // row_bytes)
        memory = self.memory[begin : begin + wanted]
        regions = torch.split(memory, rows_per_region * row_bytes)
        allocation = Allocation(begin, aligned, regions)
        insort(self._used, allocation, key=lambda used: used.begin)
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Free the space.

        The space can be allocated again once the copies that are queued so far are done.
        """
        event = self.record_event()
        if event is None:
            self._used.remove(allocation)
        else:
            self._freed.append(_FreedAllocation(allocation, event))

    def _reap(self) -> None:
        """Make the space of freed allocations available if their copies are done."""
        while self._freed and self._freed[0].last_copy.query():  # type: ignore[no-untyped-call]
            freed = self._freed.popleft()
            self._used.remove(freed.allocation)

    def _part(self, *, is_fetched: bool) -> _BufferPart:
        """Return the part of the buffer for KV that this engine fetches, or for KV that other
        engines fetch.
        """
        if not self._is_divided:
            return _BufferPart(0, self.num_bytes)
        middle = self.num_bytes // 2 // _ALIGNED_BYTES * _ALIGNED_BYTES
        return _BufferPart(middle, self.num_bytes) if is_fetched else _BufferPart(0, middle)

    def _first_gap(self, num_bytes: int, part: _BufferPart) -> int | None:
        """Return the offset of the first free range of a part that is large enough.

        The first range is taken to keep allocations together at the start of the part. So the
        memory behind them stays unused, and the system does not map it.
        """
        begin = part.begin
        for used in self._used:
            if not part.begin <= used.begin < part.end:
                continue
            if used.begin - begin >= num_bytes:
                return begin
            begin = used.begin + used.num_bytes
        return begin if part.end - begin >= num_bytes else None

    # --- copies -----------------------------------------------------------------------------------

    def gather(self, allocation: Allocation, rows: Tensor) -> list[torch.cuda.Event]:
        """Queue copies of rows of the pool into the regions of an allocation.

        Args:
            rows: indices into `KvPool.all_rows`, int64 [rows], in the order of the regions.

        Returns:
            On a GPU one event per region, which reports that the copy of the region is done. On CPU
            an empty list, because the copies are done already.
        """
        events = []
        # Only the last region may be smaller than the first one.
        rows_per_region = len(allocation.regions[0]) // self._pool.row_bytes
        rows_by_region = torch.split(rows, rows_per_region)
        for region, region_rows in zip(allocation.regions, rows_by_region, strict=True):
            self._gather(region, region_rows)
            event = self.record_event()
            if event is not None:
                events.append(event)
        return events

    def _gather(self, region: Tensor, rows: Tensor) -> None:
        if self._bounce is None:
            torch.index_select(self._pool.all_rows, 0, rows, out=self._as_rows(region))
            return
        with self._bounce_lock:
            passing = self._bounce[: len(region)]
            torch.index_select(self._pool.all_rows, 0, rows, out=self._as_rows(passing))
            region.copy_(passing, non_blocking=True)

    def scatter(self, allocation: Allocation, rows: Tensor, index: int) -> None:
        """Queue the copy of region `index` of an allocation into the pool.

        Args:
            rows: the rows of the whole allocation: indices into `KvPool.all_rows`, int64 [rows].
        """
        region = allocation.regions[index]
        # Only the last region may be smaller than the first one.
        rows_per_region = len(allocation.regions[0]) // self._pool.row_bytes
        begin = index * rows_per_region
        end = begin + len(region) // self._pool.row_bytes
        region_rows = rows[begin:end]
        if self._bounce is None:
            self._pool.all_rows.index_copy_(0, region_rows, self._as_rows(region))
            return
        with self._bounce_lock:
            passing = self._bounce[: len(region)]
            passing.copy_(region, non_blocking=True)
            self._pool.all_rows.index_copy_(0, region_rows, self._as_rows(passing))

    def checksum(self, region: MemoryRegion) -> int:
        """Return the checksum of a region whose copies are done. Thread-safe; blocks the caller."""
        begin = region.address - self.memory.data_ptr()
        memory = self.memory[begin : begin + region.num_bytes]
        if memory.device.type != "cuda":
            return checksum(memory)
        with torch.cuda.device(memory.device):
            if self._checksum_stream is None:
                self._checksum_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._checksum_stream):
                return checksum(memory)

    def _as_rows(self, region: Tensor) -> Tensor:
        """Return the bytes of a region as rows of the pool, [rows, elements]."""
        return region.view(self._pool.row_dtype).view(-1, self._pool.all_rows.shape[1])

    def record_event(self) -> torch.cuda.Event | None:
        """Record an event after all work queued so far on the device's default stream.

        Returns:
            The event, or None on CPU.
        """
        if self._pool.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.default_stream(self._pool.device))
        return event
