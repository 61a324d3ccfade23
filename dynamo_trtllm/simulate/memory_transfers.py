"""A KV transfer backend between the engines of one simulation: it copies memory in no time.

How long a transfer takes is simulated by the mock engine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from dynamo_trtllm.kv_transfer.checksums import Checksums
from dynamo_trtllm.kv_transfer.guard import TransferGuard
from dynamo_trtllm.kv_transfer.memory import MemoryRegion, require_sizes
from dynamo_trtllm.kv_transfer.transfer_backend import Destination
from dynamo_trtllm.protocol.errors import TransferFailed


class MemoryBackend:
    """See `TransferBackend`.

    Args:
        published: who has published a transfer, and its regions, by transfer id. All backends of a
            simulation share this dictionary.
    """

    def __init__(self, published: dict[str, tuple[MemoryBackend, Sequence[MemoryRegion]]]) -> None:
        self.name = "memory"
        self.checksums = Checksums("off")
        self.guard = TransferGuard()
        self.prepare_thread: Callable[[], None] = _nothing
        self._published = published
        self._on_fetched: Callable[[str], None] = _ignore

    async def start(self, on_fetched: Callable[[str], None]) -> None:
        self._on_fetched = on_fetched

    @property
    def address(self) -> str:
        return ""

    def address_in(self, offer: bytes, transfer_id: str) -> str:
        return ""

    async def register(self, region: MemoryRegion) -> None: ...

    async def publish(
        self, transfer_id: str, regions: Sequence[MemoryRegion], *, ready: int | None = None
    ) -> bytes:
        self._published[transfer_id] = (self, regions)
        return b""

    def mark_ready(self, transfer_id: str, ready: int) -> None: ...

    async def unpublish(self, transfer_id: str) -> None:
        self._published.pop(transfer_id, None)

    async def read(
        self, transfer_id: str, offer: bytes, to: Destination, *, timeout_s: float
    ) -> None:
        found = self._published.get(transfer_id)
        if found is None:
            raise TransferFailed(
                f"KV transfer {transfer_id} is no longer published by its prefill worker"
            )
        publisher, regions = found
        require_sizes(transfer_id, [region.num_bytes for region in regions], to.regions)
        for source, target in zip(regions, to.regions, strict=True):
            ctypes.memmove(target.address, source.address, source.num_bytes)
        publisher._on_fetched(transfer_id)

    def check(self) -> None: ...

    async def aclose(self) -> None: ...


def _nothing() -> None: ...


def _ignore(_transfer_id: str) -> None: ...
