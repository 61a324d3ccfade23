"""Checksums of KV: holder and reader compute them on threads, and the reader compares them before the KV is used.

The checksum of an offer covers all its pieces in order. Memory of the host is hashed with XXH3-64, memory of a GPU by a
function of the engine, so that nothing here needs a GPU library. It detects faults, but not forgery: it has no key.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeAlias

import xxhash

from dynamo_trtllm.errors import TransferFailed
from dynamo_trtllm.kv_transfer.base import MemoryRegion, view

_log = logging.getLogger(__name__)

# Host memory is hashed in blocks of this size, on several threads at once; both sides must use the same size. A smaller
# one costs more than it gains: each block wakes a thread, which then waits for Python's lock.
BLOCK_BYTES = 8 << 20
_INLINE_BYTES = 64 << 10  # hashed in a few microseconds: starting a thread takes longer
_MOST_THREADS = 8

NOTHING = 1  # the checksum of no pieces; 0 means that a checksum is not known yet
HOST = "xxh3-64/2"  # names of methods in offers
DEVICE = "device/1"

ChecksumMode: TypeAlias = Literal["auto", "on", "off"]
KV_CHECKSUMS = (
    "auto: check KV that arrives in host memory, where the sender computes checksums; on: also in GPU memory, and "
    "reject KV without a checksum; off: check nothing"
)


class Checksums:
    """Threads, setting and counter of one KV transfer backend.

    `mode`: see KV_CHECKSUMS. `device_checksum` returns the checksum of a piece in GPU
    memory as an integer; it may block and is called on several threads.
    """

    def __init__(self, mode: ChecksumMode = "auto") -> None:
        self.mode = mode
        self.device_checksum: Callable[[MemoryRegion], int] | None = None
        self.mismatches = 0  # fetches whose checksum was wrong
        threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
        self._pool = ThreadPoolExecutor(threads, "kv-checksum")  # starts them when they are needed

    def method(self, pieces: Sequence[MemoryRegion]) -> str:
        """Return the name of the method that checks these pieces, or "" when they are not checked."""
        if self.mode == "off":
            return ""
        if all(piece.device == "cpu" for piece in pieces):
            return HOST
        return DEVICE if self.mode == "on" and self.device_checksum is not None else ""

    def is_checked(self, ticket_id: str, theirs: str, pieces: Sequence[MemoryRegion]) -> bool:
        """Return whether a fetch into these pieces can compare checksums. `theirs`: the method that the offer names.

        Raises TransferFailed when it can't and the mode is on.
        """
        if theirs and theirs == self.method(pieces):
            return True
        if self.mode == "on":
            raise TransferFailed(
                f"ticket {ticket_id}: its KV can't be checked: the holder sends checksum {theirs or 'none'!r}, this "
                f"worker compares {self.method(pieces)!r}; upgrade both workers, or set kv_checksums to auto"
            )
        return False

    def submit(self, block: MemoryRegion, work: Callable[[], int] | None = None) -> Future[int]:
        """Hash a block on a thread, or at once if it is small. `work` replaces the call of `hash`.

        The memory must stay until the future is done, see `ended`. Raises TransferFailed after `close`.
        """
        work = work or partial(self.hash, block)
        if block.device == "cpu" and block.num_bytes <= _INLINE_BYTES:
            done: Future[int] = Future()
            done.set_result(work())
            return done
        try:
            return self._pool.submit(work)
        except RuntimeError as exc:
            raise TransferFailed("this worker's KV transfer was stopped") from exc

    def submit_all(self, piece: MemoryRegion) -> list[Future[int]]:
        """Hash all blocks of a piece, see `submit`."""
        return [self.submit(block) for block in blocks(piece)]

    def hash(self, block: MemoryRegion) -> int:
        """Return the hash of a block. Blocks the calling thread."""
        if block.device == "cpu":
            return xxhash.xxh3_64_intdigest(view(block))
        assert self.device_checksum is not None, "method() was asked before"
        return self.device_checksum(block) % (1 << 64)

    def mismatch(self, ticket_id: str) -> TransferFailed:
        """Count a wrong checksum. Returns the error to raise."""
        self.mismatches += 1
        error = TransferFailed(
            f"ticket {ticket_id}: the checksum of its KV is wrong: the KV was changed in transit, or in the memory of "
            "its holder after it was offered; look for failing memory or network hardware if this is seen again"
        )
        _log.warning("%s", error.message)
        return error

    def close(self) -> None:
        """End the threads. Returns when none of them reads memory any more."""
        self._pool.shutdown(cancel_futures=True)


def blocks(piece: MemoryRegion) -> Iterator[MemoryRegion]:
    """Cut a piece into blocks, in order; the last may be smaller. A piece in GPU memory is one block."""
    block_bytes = BLOCK_BYTES if piece.device == "cpu" else max(1, piece.num_bytes)
    for begin in range(0, piece.num_bytes, block_bytes):
        yield MemoryRegion(piece.address + begin, min(block_bytes, piece.num_bytes - begin), piece.device)


def combined(before: int, hashes: Sequence[int]) -> int:
    """Return the checksum of an offer up to and including a piece.

    `before`: the checksum without the piece. `hashes`: of the piece's blocks. Never 0.
    """
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{1 + len(hashes)}Q", before, *hashes)) or 1


class OfferChecksum:
    """The checksum of one offer at its holder, computed as its pieces become ready.

    `on_complete` is called with the checksum of all pieces, on any thread, or with None when it can't be computed.
    """

    def __init__(
        self,
        checksums: Checksums,
        pieces: Sequence[MemoryRegion],
        on_complete: Callable[[int | None], None] | None = None,
    ) -> None:
        self._checksums = checksums
        self._blocks = [list(blocks(piece)) for piece in pieces]
        self._on_complete = on_complete
        self._lock = threading.Lock()
        self._left = sum(map(len, self._blocks))  # number of blocks that are not hashed yet
        self._jobs: list[list[Future[int]]] = []  # by piece and block
        self._hashes = [[0] * len(blocks) for blocks in self._blocks]
        self._stopped = False
        if not self._left:
            self._complete()

    def mark_ready(self, ready: int) -> None:
        """Begin to hash the first `ready` pieces, which hold their data. Call it on the loop."""
        if self._stopped:  # the copies of a withdrawn offer may still end
            return
        for index in range(len(self._jobs), min(ready, len(self._blocks))):
            jobs = [
                self._checksums.submit(block, partial(self._hash, index, number, block))
                for number, block in enumerate(self._blocks[index])
            ]
            self._jobs.append(jobs)

    def _hash(self, index: int, number: int, block: MemoryRegion) -> int:
        try:
            found = self._hashes[index][number] = self._checksums.hash(block)
        except Exception:
            _log.exception("the checksum of KV could not be computed; withdrawing its offer")
            if self._on_complete is not None:
                self._on_complete(None)
            raise
        with self._lock:
            self._left -= 1
            is_complete = not self._left
        if is_complete:
            self._complete()
        return found

    def _complete(self) -> None:
        if self._on_complete is None:
            return
        checksum = NOTHING
        for hashes in self._hashes:
            checksum = combined(checksum, hashes)
        self._on_complete(checksum)

    async def hashes(self, index: int) -> list[int]:
        """Return the hashes of a piece that is ready. Raises TransferFailed when the offer ends before."""
        return await results(self._jobs[index])

    async def stop(self) -> None:
        """Return when no thread reads the pieces any more."""
        self._stopped = True
        await ended(chain.from_iterable(self._jobs))


async def results(jobs: Sequence[Future[int]]) -> list[int]:
    """Wait for hashes. Raises TransferFailed when they are not computed; a cancelled caller must await `ended`."""
    if waiting := [asyncio.wrap_future(job) for job in jobs if not job.done()]:
        done, _ = await asyncio.wait(waiting)
        for each in done:
            if not each.cancelled():
                each.exception()  # mark it as retrieved: `hashes_of` raises it
    return hashes_of(jobs)


def hashes_of(jobs: Sequence[Future[int]]) -> list[int]:
    """Return the hashes of work that is done. Raises TransferFailed when they could not be computed."""
    if any(job.cancelled() for job in jobs):
        raise TransferFailed("the checksum of KV was not computed: its offer was withdrawn, or its worker is stopping")
    try:
        return [job.result() for job in jobs]
    except Exception as exc:
        raise TransferFailed(f"the checksum of KV could not be computed: {exc}") from exc


async def ended(jobs: Iterable[Future[Any]]) -> None:
    """Cancel work that no thread has begun. Wait for the rest, also when cancelled: it uses the caller's memory."""
    waiting = {asyncio.wrap_future(job) for job in jobs if not job.cancel() and not job.done()}
    is_cancelled = False
    while waiting:
        try:
            done, waiting = await asyncio.wait(waiting)
        except asyncio.CancelledError:
            is_cancelled = True
        else:
            for each in done:
                each.exception()  # mark it as retrieved: it is raised where the result is awaited
    if is_cancelled:
        raise asyncio.CancelledError
