"""Publish regions of host memory: the common part of the backends that transfer such memory only."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo_trtllm.errors import TransferFailed
from dynamo_trtllm.kv_transfer.base import MemoryRegion, require_cpu
from dynamo_trtllm.kv_transfer.checksums import Checksums, OfferChecksum


@dataclass(slots=True)
class PublishedRegions:
    """A published transfer."""

    regions: tuple[MemoryRegion, ...]
    ready: int  # regions that hold their data
    token: bytes = b""  # which readers over a network have to present
    checksum: OfferChecksum | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # replaced each time
    readers: set[asyncio.Task[None]] = field(default_factory=set)

    def notify_readers(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class HostBackend:
    """The prefill worker's part of a `TransferBackend` for host memory."""

    name: str

    def __init__(self, checksums: Checksums | None) -> None:
        self.checksums = checksums or Checksums()
        self._published: dict[str, PublishedRegions] = {}
        self._is_running = False

    async def register(self, region: MemoryRegion) -> None:
        require_cpu([region], self.name)  # host memory needs no registration

    def _publish(self, transfer_id: str, regions: Sequence[MemoryRegion], ready: int | None) -> PublishedRegions:
        require_cpu(regions, self.name)
        if not self._is_running:
            raise TransferFailed(f"transfer backend {self.name} is not running; start it before publishing KV")
        if transfer_id in self._published:
            raise TransferFailed(f"KV transfer {transfer_id} is already published; unpublish it first")
        entry = PublishedRegions(tuple(regions), len(regions) if ready is None else ready)
        if self.checksums.method(regions):
            entry.checksum = OfferChecksum(self.checksums, entry.regions)
            entry.checksum.mark_ready(entry.ready)
        self._published[transfer_id] = entry
        return entry

    def mark_ready(self, transfer_id: str, ready: int) -> None:
        entry = self._published.get(transfer_id)
        if entry is not None:
            entry.ready = ready
            if entry.checksum is not None:
                entry.checksum.mark_ready(ready)
            entry.notify_readers()

    async def unpublish(self, transfer_id: str) -> None:
        entry = self._published.pop(transfer_id, None)
        if entry is None:
            return
        entry.notify_readers()
        try:
            for reader in entry.readers:
                reader.cancel()
            await asyncio.gather(*entry.readers, return_exceptions=True)
        finally:
            if entry.checksum is not None:
                await entry.checksum.stop()

    async def _close(self) -> None:
        self._is_running = False
        while self._published:
            self._published.popitem()[1].notify_readers()
        await asyncio.to_thread(self.checksums.close)
