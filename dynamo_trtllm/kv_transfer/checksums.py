"""Compute checksums of KV on threads at both workers.

The decode worker compares the checksums before it uses the KV. The checksum of a transfer covers
all regions of the transfer in order. Host memory is hashed with XXH3-64. GPU memory is hashed by a
function of the engine, so this package needs no GPU library. Checksums detect faults. They don't
detect forgery, because they have no key.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeAlias

import xxhash

from dynamo_trtllm.kv_transfer.memory import MemoryRegion, view
from dynamo_trtllm.protocol.errors import TransferFailed

log = logging.getLogger(__name__)

# Host memory is hashed in blocks of this size, on several threads at once. Both workers must use
# the same size. Smaller blocks are slower, because each block wakes a thread, which then waits for
# the GIL.
BLOCK_BYTES = 8 << 20
# Host memory up to this size is hashed on the calling thread. This takes a few microseconds, which
# is less than it takes to wake another thread.
_INLINE_BYTES = 64 << 10
_MAX_THREADS = 8

NOTHING = 1  # the checksum of no regions; 0 means that a checksum is not known yet
# The names of the checksum methods, which are part of the wire format.
HOST = "xxh3-64/2"
DEVICE = "device/1"

ChecksumMode: TypeAlias = Literal["auto", "on", "off"]
KV_CHECKSUMS = (
    "auto: check KV that arrives in host memory, where the sender computes checksums; on: also in"
    " GPU memory, and reject KV without a checksum; off: check nothing"
)


class Checksums:
    """The checksum threads, mode and mismatch counter of one KV transfer backend.

    KV_CHECKSUMS describes the modes. `device_checksum` returns the checksum of a region of GPU
    memory. It may block, and must be thread-safe.
    """

    def __init__(self, mode: ChecksumMode = "auto") -> None:
        self.mode = mode
        self.device_checksum: Callable[[MemoryRegion], int] | None = None
        self.num_mismatches = 0  # number of fetches with a wrong checksum
        num_cpus = os.cpu_count() or 1
        num_threads = max(1, min(_MAX_THREADS, num_cpus // 2))
        self._pool = ThreadPoolExecutor(num_threads, "kv-checksum")  # starts threads on demand

    def method(self, regions: Sequence[MemoryRegion]) -> str:
        """Return the name of the method for these regions, or "" if they get no checksum."""
        if self.mode == "off":
            return ""
        if all(region.device == "cpu" for region in regions):
            return HOST
        if self.mode == "on" and self.device_checksum is not None:
            return DEVICE
        return ""

    def is_checked(self, transfer_id: str, theirs: str, regions: Sequence[MemoryRegion]) -> bool:
        """Return whether a fetch into these regions compares checksums.

        Args:
            theirs: the method of the prefill worker, which the offer names.

        Raises:
            TransferFailed: the mode is "on" and checksums can't be compared.
        """
        if theirs and theirs == self.method(regions):
            return True
        if self.mode == "on":
            raise TransferFailed(
                f"KV transfer {transfer_id}: can't verify the KV, because the prefill worker sends"
                f" checksum {theirs or 'none'!r} and this worker needs {self.method(regions)!r};"
                " run the same version on both workers, or set kv_checksums to auto"
            )
        return False

    def submit(self, block: MemoryRegion) -> Future[int]:
        """Hash a block on a thread, or at once if the block is small.

        The memory must stay allocated until the future is done, see `end_jobs`.

        Raises:
            TransferFailed: `close` was called.
        """
        if block.device == "cpu" and block.num_bytes <= _INLINE_BYTES:
            done: Future[int] = Future()
            done.set_result(self.hash(block))
            return done
        try:
            return self._pool.submit(self.hash, block)
        except RuntimeError as exc:
            raise TransferFailed("KV transfer on this worker has stopped") from exc

    def submit_all(self, region: MemoryRegion) -> list[Future[int]]:
        """Hash all blocks of a region, see `submit`."""
        return [self.submit(block) for block in blocks(region)]

    def hash(self, block: MemoryRegion) -> int:
        """Return the hash of a block, an unsigned number of 64 bits. This blocks the caller."""
        if block.device == "cpu":
            return xxhash.xxh3_64_intdigest(view(block))
        assert self.device_checksum is not None, (
            "method() returns DEVICE only with a device_checksum"
        )
        return self.device_checksum(block) % (1 << 64)

    def mismatch(self, transfer_id: str) -> TransferFailed:
        """Count and log a wrong checksum, and return the error to raise."""
        self.num_mismatches += 1
        error = TransferFailed(
            f"KV transfer {transfer_id}: the checksum of its KV is wrong: the KV was changed in"
            " transit, or in the prefill worker's memory; if this repeats, check memory and"
            " network hardware"
        )
        log.warning("%s", error.message)
        return error

    def close(self) -> None:
        """Stop the threads. When this returns, none of them reads memory any more."""
        self._pool.shutdown(cancel_futures=True)


def blocks(region: MemoryRegion) -> Iterator[MemoryRegion]:
    """Split a region into blocks, in order. The last block may be smaller.

    A region of GPU memory is one block.
    """
    if region.device == "cpu":
        block_bytes = BLOCK_BYTES
    else:
        block_bytes = max(1, region.num_bytes)  # the step of a range can't be 0
    for begin in range(0, region.num_bytes, block_bytes):
        num_bytes = min(block_bytes, region.num_bytes - begin)
        yield MemoryRegion(region.address + begin, num_bytes, region.device)


def combined(before: int, hashes: Sequence[int]) -> int:
    """Return the checksum of a transfer up to and including a region. It is never 0.

    Args:
        before: the checksum of the regions before this region, or NOTHING.
        hashes: the hashes of the region's blocks.
    """
    packed = struct.pack(f"<{1 + len(hashes)}Q", before, *hashes)
    checksum = xxhash.xxh3_64_intdigest(packed)
    # 0 would mean that the checksum is not known yet.
    return 1 if checksum == 0 else checksum


@dataclass(eq=False)
class OfferChecksum:
    """The checksum of one published transfer, computed as its regions become ready.

    `on_complete` is called on any thread, with the checksum of all regions, or with None if the
    checksum can't be computed. The event loop may wait for the callback, so the callback must be
    fast. It must not call this object.
    """

    checksums: Checksums
    regions: Sequence[MemoryRegion]
    on_complete: Callable[[int | None], None] | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: list[list[Future[int]]] = []  # the jobs, by region and block
        self._stopped = False
        self._blocks_left = 0  # number of blocks that are not hashed yet
        for region in self.regions:
            self._blocks_left += len(list(blocks(region)))
        if self._blocks_left == 0:
            self._complete()

    def mark_ready(self, ready: int) -> None:
        """Start to hash those of the first `ready` regions that are new. They hold their data.

        Called on the event loop.
        """
        # A copy into a region may end after the transfer was unpublished.
        if self._stopped:
            return
        num_begun = len(self._jobs)
        for region in self.regions[num_begun:ready]:
            jobs = self.checksums.submit_all(region)
            self._jobs.append(jobs)
            for job in jobs:
                job.add_done_callback(self._hashed)

    def _hashed(self, job: Future[int]) -> None:
        if job.cancelled():
            return
        exc = job.exception()
        if exc is not None:
            log.error("computing the checksum of KV failed; unpublishing the KV", exc_info=exc)
        # `stop` takes the lock, too. It does not wait for jobs that are done, but such a job may
        # still be about to call this method.
        with self._lock:
            if self._stopped:
                return
            if exc is None:
                self._blocks_left -= 1
                if self._blocks_left == 0:
                    self._complete()
            elif self.on_complete is not None:
                self.on_complete(None)

    def _complete(self) -> None:
        if self.on_complete is None:
            return
        checksum = NOTHING
        for jobs in self._jobs:
            checksum = combined(checksum, [job.result() for job in jobs])
        # Regions without bytes at the end may have no jobs, because there is nothing to wait for.
        for _ in self.regions[len(self._jobs) :]:
            checksum = combined(checksum, [])
        self.on_complete(checksum)

    async def hashes(self, index: int) -> list[int]:
        """Return the hashes of the blocks of a ready region.

        Raises:
            TransferFailed: the transfer was unpublished before the hashes were computed.
        """
        return await wait_for_hashes(self._jobs[index])

    async def stop(self) -> None:
        """Cancel the hashing.

        When this returns, no thread reads the regions or calls `on_complete` any more.
        """
        with self._lock:
            self._stopped = True
        await end_jobs(chain.from_iterable(self._jobs))


async def wait_for_hashes(jobs: Sequence[Future[int]]) -> list[int]:
    """Wait for hashes. If the caller is cancelled, it must await `end_jobs`.

    Raises:
        TransferFailed: the hashes can't be computed.
    """
    unfinished = [asyncio.wrap_future(job) for job in jobs if not job.done()]
    # Other callers wait for the same jobs, so a cancel of this call must not cancel them.
    await asyncio.shield(asyncio.gather(*unfinished, return_exceptions=True))
    return hashes_of(jobs)


def hashes_of(jobs: Sequence[Future[int]]) -> list[int]:
    """Return the hashes of jobs that are done.

    Raises:
        TransferFailed: a job failed or was cancelled.
    """
    if any(job.cancelled() for job in jobs):
        raise TransferFailed(
            "the checksum of KV was not computed, because the KV was unpublished or the worker is"
            " stopping"
        )
    try:
        return [job.result() for job in jobs]
    except Exception as exc:
        raise TransferFailed(f"computing the checksum of KV failed: {exc}") from exc


async def end_jobs(jobs: Iterable[Future[Any]]) -> None:
    """Cancel jobs that have not started, and wait for the others, even if this call is cancelled.

    The jobs read the caller's memory, so the caller must wait for them before it frees the memory.
    """
    # Jobs that have started can't be cancelled.
    unfinished = [asyncio.wrap_future(job) for job in jobs if not job.cancel() and not job.done()]
    # Exceptions of the jobs are not raised here, but where the results are awaited.
    waiting = asyncio.gather(*unfinished, return_exceptions=True)
    is_cancelled = False
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError
