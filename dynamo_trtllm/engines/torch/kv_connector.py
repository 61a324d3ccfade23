"""Export and import KV between engines: the torch engine's side of a KV transfer.

It runs on the event loop. Each exported prompt occupies space in the transfer buffer until its KV
was fetched or rejected, or has expired.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.torch.sequence import TorchSequence
from dynamo_trtllm.engines.torch.transfer_buffer import REGION_BYTES, Allocation, TransferBuffer
from dynamo_trtllm.kv_transfer.memory import MemoryRegion
from dynamo_trtllm.kv_transfer.pending_transfers import KvTransfers
from dynamo_trtllm.kv_transfer.transfer_backend import Destination, TransferBackend
from dynamo_trtllm.protocol.errors import BadFrame, TransferFailed, TransferMismatch
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    KvLayout,
    decode,
    encode,
)
from dynamo_trtllm.protocol.number_types import Number, UInt64

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class TorchState(msgspec.Struct, frozen=True):
    """The engine's part of the KV transfer parameters."""

    offer: bytes  # the result of `TransferBackend.publish`
    seed: UInt64  # the seed of the random draws of the request
    # Each region has as many whole rows as fit into this number of bytes, but at least one row.
    region_bytes: Number = msgspec.field(name="piece_bytes")


class KvConnector(KvTransfers):
    """The KV transfers of one engine, whose KV goes through the transfer buffer."""

    def __init__(
        self, backend: TransferBackend, config: WorkerConfig, *, instance_id: int, layout: KvLayout
    ) -> None:
        super().__init__(backend, config, engine="torch", instance_id=instance_id, layout=layout)
        self._copy_waiter = ThreadPoolExecutor(1, "torch-copied")  # waits for copies on the GPU

    async def start(self, transfer_buffer: TransferBuffer) -> None:
        """Start the transfer backend and register the transfer buffer with it.

        If the backend can't read GPU memory, the buffer moves to pinned host memory.

        Raises:
            ConfigError: the backend can't start with this configuration.
            TransferFailed: the backend can't transfer KV of this device.
        """
        self.backend.checksums.device_checksum = transfer_buffer.checksum
        self.backend.prepare_thread = transfer_buffer.use_device
        await self.backend.start(self.release)
        try:
            await self.backend.register(_region(transfer_buffer.memory))
        except TransferFailed as exc:
            if transfer_buffer.memory.device.type == "cpu":
                raise
            log.warning("KV transfer uses pinned host memory, which is slower: %s", exc.message)
            await asyncio.to_thread(transfer_buffer.move_to_host)
            await self.backend.register(_region(transfer_buffer.memory))
        log.info(
            "KV transfer over %s: transfer buffer of %d MiB",
            self.backend.name,
            transfer_buffer.num_bytes >> 20,
        )

    async def export_kv(
        self, seq: TorchSequence, allocation: Allocation, copied: Sequence[torch.cuda.Event]
    ) -> Chunk:
        """Publish a prompt's KV and return the terminal chunk with its KV transfer parameters.

        The sequence is retired once its memory is no longer published, also if this method fails.

        Args:
            seq: the sequence of the prompt.
            allocation: the space in the transfer buffer that has the KV.
            copied: on a GPU, an event for each region, which shows that the copy of the region is
                done.
        """
        seq.is_exported = True
        ready: int | None = None
        region_bytes = REGION_BYTES["cpu"]
        # On a GPU, no region is ready before its copy is done.
        if copied:
            ready = 0
            region_bytes = REGION_BYTES["cuda"]
        regions = [_region(region) for region in allocation.regions]
        kv_params = await self.publish(
            seq.request, seq.first_chunk, regions, seq.retire, ready=ready
        )
        if copied:
            self._mark_when_copied(kv_params.transfer_id, copied)
        engine_state = encode(TorchState(kv_params.engine_state, seq.seed, region_bytes))
        kv_params = msgspec.structs.replace(kv_params, engine_state=engine_state)
        seq.phases.end_export(kv_params)
        return Chunk(
            finish_reason=FinishReason.KV_TRANSFER,
            kv_params=kv_params,
            stats=seq.phases.timings(),
        )

    def _mark_when_copied(self, transfer_id: str, copied: Sequence[torch.cuda.Event]) -> None:
        """Mark each region as ready when its copy is done. A thread waits for the copies."""
        loop = asyncio.get_running_loop()

        def wait_and_mark() -> None:
            for num_ready, event in enumerate(copied, start=1):
                event.synchronize()
                loop.call_soon_threadsafe(self.backend.mark_ready, transfer_id, num_ready)

        marking = self._copy_waiter.submit(wait_and_mark)
        marking.add_done_callback(_log_copy_error)

    def engine_state(self, request: GenerateRequest, *, kv_bytes: int) -> TorchState:
        """Check the request's KV transfer parameters, and return the engine's part of them.

        Raises:
            TransferMismatch: the parameters do not fit this engine or the request. The error names
                the field.
            TransferExpired: the transfer has expired.
            RequestRejected: the request has no KV transfer parameters.
        """
        kv_params = self.validate(request, kv_bytes=kv_bytes)
        try:
            engine_state = decode(kv_params.engine_state, TorchState)
        except BadFrame as exc:
            raise TransferMismatch(
                f"KV transfer {kv_params.transfer_id} was not created by a torch engine",
                field="opaque",
            ) from exc
        if not 0 < engine_state.region_bytes <= max(REGION_BYTES.values()):
            raise TransferMismatch(
                f"KV transfer {kv_params.transfer_id} has regions of {engine_state.region_bytes}"
                " bytes",
                field="opaque",
            )
        return engine_state

    async def import_kv(
        self, seq: TorchSequence, allocation: Allocation, on_region: Callable[[int], None]
    ) -> None:
        """Read the KV of a prompt into `allocation`.

        See `fetch` and, for `on_region`, `TransferBackend.read`.
        """
        to = Destination([_region(region) for region in allocation.regions], on_region)
        await self.fetch(seq.request, seq.offer, to)

    async def aclose(self) -> None:
        """End all KV transfers, then close the backend."""
        await super().aclose()
        await asyncio.to_thread(self._copy_waiter.shutdown)


def _log_copy_error(copying: Future[None]) -> None:
    exc = copying.exception()
    if exc is not None:
        log.error("copying KV to the transfer buffer failed on the GPU: %s", exc)


def _region(memory: torch.Tensor) -> MemoryRegion:
    return MemoryRegion(memory.data_ptr(), memory.nbytes, str(memory.device))
