"""A KV transfer backend between engines of one process, by memmove. Supports CPU memory only."""

from __future__ import annotations

import asyncio
import ctypes
import uuid
from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec

from dynamo_trtllm.kv_transfer.checksums import (
    NOTHING,
    ChecksumMode,
    Checksums,
    combined,
    end_jobs,
    wait_for_hashes,
)
from dynamo_trtllm.kv_transfer.create import create_backend
from dynamo_trtllm.kv_transfer.memory import MemoryRegion, require_cpu, require_sizes
from dynamo_trtllm.kv_transfer.tcp import PublishedRegions, TcpBackend
from dynamo_trtllm.kv_transfer.transfer_backend import Destination, TransferBackend, decode_offer
from dynamo_trtllm.protocol.errors import TransferFailed, TransferTimeout
from dynamo_trtllm.protocol.messages import encode
from tests.kit.nixl_import import import_nixl


class _LoopbackOffer(msgspec.Struct, frozen=True, kw_only=True):
    backend_id: str
    sizes_bytes: list[int]
    checksum: str = ""  # name of the checksum method, see `Checksums.method`


class LoopbackBackend(TcpBackend):
    """A KV transfer backend within one process. Peers find each other by the id in the offer."""

    name = "loopback"
    _open: ClassVar[dict[str, LoopbackBackend]] = {}

    def __init__(self, checksums: Checksums | None = None) -> None:
        super().__init__(checksums=checksums)
        self._id = uuid.uuid4().hex

    async def start(self, on_fetched: Callable[[str], None]) -> None:
        await super().start(on_fetched)
        self._open[self._id] = self

    async def publish(
        self, transfer_id: str, regions: Sequence[MemoryRegion], *, ready: int | None = None
    ) -> bytes:
        await super().publish(transfer_id, regions, ready=ready)
        sizes_bytes = [region.num_bytes for region in regions]
        method = self.checksums.method(regions)
        return encode(_LoopbackOffer(backend_id=self._id, sizes_bytes=sizes_bytes, checksum=method))

    def address_in(self, offer: bytes, transfer_id: str) -> str:
        return ""  # it connects to nothing

    async def read(
        self, transfer_id: str, offer: bytes, to: Destination, *, timeout_s: float
    ) -> None:
        """Read a transfer, see `TransferBackend.read`.

        `timeout_s` does not include the time of the copies.
        """
        facts = decode_offer(_LoopbackOffer, offer, transfer_id, self.name)
        require_cpu(to.regions, self.name)
        require_sizes(transfer_id, facts.sizes_bytes, to.regions)
        publisher = self._open.get(facts.backend_id)
        if publisher is None:
            raise TransferFailed(
                f"KV transfer {transfer_id}: its prefill engine is not in this process or is closed"
            )
        is_checked = self.checksums.is_checked(transfer_id, facts.checksum, to.regions)
        ours = theirs = NOTHING
        try:
            async with asyncio.timeout(timeout_s):
                for index, target in enumerate(to.regions):
                    entry = await publisher._with_ready(transfer_id, index)
                    source = entry.regions[index]
                    ctypes.memmove(target.address, source.address, source.num_bytes)
                    if is_checked and entry.checksum is not None:
                        ours = combined(ours, await self._hashes(target))
                        theirs = combined(theirs, await entry.checksum.hashes(index))
                        if ours != theirs:
                            raise self.checksums.mismatch(transfer_id)
                    if to.on_region is not None:
                        to.on_region(index)
        except TimeoutError as exc:
            raise TransferTimeout(
                f"KV transfer {transfer_id}: the KV was not ready within {timeout_s:g} s"
            ) from exc
        publisher._entry(transfer_id)
        asyncio.get_running_loop().call_soon(publisher._on_fetched, transfer_id)

    async def _hashes(self, region: MemoryRegion) -> list[int]:
        jobs = self.checksums.submit_all(region)
        try:
            return await wait_for_hashes(jobs)
        finally:
            await end_jobs(jobs)

    async def _with_ready(self, transfer_id: str, index: int) -> PublishedRegions:
        while (entry := self._entry(transfer_id)).ready <= index:
            await entry.changed.wait()
        return entry

    def _entry(self, transfer_id: str) -> PublishedRegions:
        entry = self._published.get(transfer_id)
        if entry is None:
            raise TransferFailed(
                f"KV transfer {transfer_id} is no longer published by its prefill worker"
            )
        return entry

    async def aclose(self) -> None:
        self._open.pop(self._id, None)
        await super().aclose()


def named_backend(name: str, *, kv_checksums: ChecksumMode = "auto") -> TransferBackend:
    """Return a new backend: nixl, tcp or loopback."""
    if name == "loopback":
        return LoopbackBackend(Checksums(kv_checksums))
    if name == "nixl":
        import_nixl()
    return create_backend(name, kv_checksums=kv_checksums)
