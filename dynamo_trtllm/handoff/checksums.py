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
from dynamo_trtllm.handoff.base import Piece
from dynamo_trtllm.handoff.memory import view

_log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20  # hashed separately: a reader hashes one while the next arrives. Both sides must use this size
PART_BYTES = 4 * BLOCK_BYTES  # of host memory, hashed by one thread; starting a thread takes far less time
_INLINE_BYTES = 64 << 10  # hashed in a few microseconds: starting a thread takes longer
_MOST_THREADS = 8

NOTHING = 1  # the checksum of no pieces; 0 means that a checksum is not known yet
HOST = "xxh3-64/1"  # names of methods in offers
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
        self.device_checksum: Callable[[Piece], int] | None = None
        self.mismatches = 0  # fetches whose checksum was wrong
        threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
        self._pool = ThreadPoolExecutor(threads, "kv-checksum")  # starts them when they are needed

    def method(self, pieces: Sequence[Piece]) -> str:
        """Return the name of the method that checks these pieces, or "" when they are not checked."""
        if self.mode == "off":
            return ""
        if all(piece.device == "cpu" for piece in pieces):
            return HOST
        return DEVICE if self.mode == "on" and self.device_checksum is not None else ""

    def is_checked(self, ticket_id: str, theirs: str, pieces: Sequence[Piece]) -> bool:
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

    def submit(self, piece: Piece, work: Callable[[], list[int]] | None = None) -> Future[list[int]]:
        """Hash a piece on a thread, or at once if it is small. `work` replaces the call of `hash`.

        The memory must stay until the future is done, see `ended`. Raises TransferFailed after `close`.
        """
        work = work or partial(self.hash, piece)
        if piece.device == "cpu" and piece.num_bytes <= _INLINE_BYTES:
            done: Future[list[int]] = Future()
            done.set_result(work())
            return done
        try:
            return self._pool.submit(work)
        except RuntimeError as exc:
            raise TransferFailed("this worker's KV transfer was stopped") from exc

    def hash(self, piece: Piece) -> list[int]:
        """Return the hashes of a piece's blocks; a piece in GPU memory is one block. Blocks the calling thread."""
        if piece.device == "cpu":
            return [xxhash.xxh3_64_intdigest(view(block)) for block in blocks(piece)]
        if not piece.num_bytes:
            return []
        assert self.device_checksum is not None, "method() was asked before"
        return [self.device_checksum(piece) % (1 << 64)]

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


def blocks(piece: Piece, block_bytes: int = BLOCK_BYTES) -> Iterator[Piece]:
    """Cut a piece into blocks of `block_bytes`; the last may be smaller."""
    for begin in range(0, piece.num_bytes, block_bytes):
        yield Piece(piece.address + begin, min(block_bytes, piece.num_bytes - begin), piece.device)


def parts(piece: Piece) -> list[Piece]:
    """Cut a piece into what one thread hashes, in order; a piece in GPU memory is one part."""
    return list(blocks(piece, PART_BYTES)) if piece.device == "cpu" and piece.num_bytes else [piece]


def combined(before: int, hashes: Sequence[int]) -> int:
    """Return the checksum of an offer up to and including a piece, from `before`, that without the piece. Never 0."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{1 + len(hashes)}Q", before, *hashes)) or 1


class OfferChecksum:
    """The checksum of one offer at its holder, computed as its pieces become ready.

    `on_complete` is called with the checksum of all pieces, on any thread, or with None when it can't be computed.
    """

    def __init__(
        self, checksums: Checksums, pieces: Sequence[Piece], on_complete: Callable[[int | None], None] | None = None
    ) -> None:
        self._checksums = checksums
        self._parts = [parts(piece) for piece in pieces]
        self._on_complete = on_complete
        self._lock = threading.Lock()
        self._left = sum(map(len, self._parts))  # number of parts that are not hashed yet
        self._jobs: list[list[Future[list[int]]]] = []  # by piece and part
        self._hashes: list[list[list[int]]] = [[[] for _ in parts] for parts in self._parts]
        self._stopped = False
        if not pieces:
            self._complete()

    def advance(self, ready: int) -> None:
        """Begin to hash the first `ready` pieces, which hold their data. Call it on the loop."""
        if self._stopped:  # the copies of a withdrawn offer may still end
            return
        for index in range(len(self._jobs), min(ready, len(self._parts))):
            jobs = [
                self._checksums.submit(part, partial(self._hash, index, number, part))
                for number, part in enumerate(self._parts[index])
            ]
            self._jobs.append(jobs)

    def _hash(self, index: int, number: int, part: Piece) -> list[int]:
        try:
            found = self._hashes[index][number] = self._checksums.hash(part)
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
            checksum = combined(checksum, list(chain.from_iterable(hashes)))
        self._on_complete(checksum)

    async def hashes(self, index: int) -> list[int]:
        """Return the hashes of a piece that is ready. Raises TransferFailed when the offer ends before."""
        return [number for job in self._jobs[index] for number in await result(job)]

    async def stop(self) -> None:
        """Return when no thread reads the pieces any more."""
        self._stopped = True
        await ended(chain.from_iterable(self._jobs))


async def result(job: Future[list[int]]) -> list[int]:
    """Wait for hashes. Raises TransferFailed when they are not computed; a cancelled caller must await `ended`."""
    if not job.done():
        await asyncio.wait([asyncio.wrap_future(job)])
    if job.cancelled():
        raise TransferFailed("the checksum of KV was not computed: its offer was withdrawn, or its worker is stopping")
    return hashes_of(job)


def hashes_of(job: Future[list[int]]) -> list[int]:
    """Return the hashes of work that is done. Raises TransferFailed when they could not be computed."""
    try:
        return job.result()
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
