"""Export and import KV between engines: the torch engine's side of a KV transfer, on the event loop.

Each exported prompt occupies space in the transfer buffer until its KV was fetched or rejected, or has expired.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from dynamo_trtllm.engines.torch.sequence import PrefillDone, TorchSequence
from dynamo_trtllm.engines.torch.transfer_buffer import REGION_BYTES, Allocation, TransferBuffer
from dynamo_trtllm.errors import BadFrame, TransferFailed, TransferMismatch
from dynamo_trtllm.kv_transfer.base import Destination, MemoryRegion
from dynamo_trtllm.kv_transfer.transfers import KvTransfers, PublishedKv
from dynamo_trtllm.messages import Chunk, GenerateRequest, KvTransferParams, decode, encode

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class TorchState(msgspec.Struct, frozen=True):
    """The engine's part of the KV transfer parameters."""

    offer: bytes  # from `TransferBackend.publish`
    seed: int  # of the request's random draws, unsigned 64 bits
    # each region has as many whole rows as fit into this, but at least one
    region_bytes: int = msgspec.field(name="piece_bytes")


class KvConnector:
    """The KV transfers of one engine, whose KV goes through the transfer buffer.

    `retire` is called with the sequence of each transfer once its memory is no longer published.
    """

    def __init__(self, transfers: KvTransfers, *, retire: Callable[[TorchSequence], None]) -> None:
        self.transfers = transfers
        self._backend = transfers.backend
        self._retire = retire
        self._copying = ThreadPoolExecutor(1, "torch-copied")

    async def start(self, transfer_buffer: TransferBuffer) -> None:
        """Start the transfer backend and register the transfer buffer with it.

        If the backend can't read GPU memory, the buffer moves to pinned host memory.

        Raises:
            ConfigError: The backend can't start with this configuration.
            TransferFailed: The backend can't transfer KV of this device.
        """
        self._backend.checksums.device_checksum = transfer_buffer.checksum
        await self._backend.start(self.transfers.release)
        try:
            await self._backend.register(_region(transfer_buffer.memory))
        except TransferFailed as exc:
            if transfer_buffer.memory.device.type == "cpu":
                raise
            log.warning("KV transfer uses pinned host memory, which is slower: %s", exc.message)
            await asyncio.to_thread(transfer_buffer.move_to_host)
            await self._backend.register(_region(transfer_buffer.memory))
        log.info("KV transfer over %s: transfer buffer of %d MiB", self._backend.name, transfer_buffer.num_bytes >> 20)

    async def export_kv(self, seq: TorchSequence, prefill_done: PrefillDone) -> Chunk:
        """Publish a prompt's KV and return the terminal chunk with its KV transfer parameters.

        From this call on the connector retires the sequence, also if the call fails.
        """
        copied = prefill_done.copied
        region_bytes = REGION_BYTES["cuda" if copied else "cpu"]
        kv = PublishedKv(
            [_region(region) for region in prefill_done.allocation.regions],
            lambda offer: encode(TorchState(offer, seq.seed, region_bytes)),
            partial(self._retire, seq),
            seq.phases.exported,
            ready=0 if copied else None,
        )
        chunk = await self.transfers.publish(seq.request, prefill_done.first, kv)
        assert chunk.kv_params is not None
        self._follow(chunk.kv_params.transfer_id, copied)
        return chunk

    def _follow(self, transfer_id: str, copied: Sequence[torch.cuda.Event]) -> None:
        """Mark each region as ready when its copy is done. A thread waits for the copies."""
        if copied:
            loop = asyncio.get_running_loop()

            def follow() -> None:
                for ready, event in enumerate(copied, start=1):
                    event.synchronize()
                    loop.call_soon_threadsafe(self._backend.mark_ready, transfer_id, ready)

            self._copying.submit(follow).add_done_callback(_log_copy_error)

    def validate(self, request: GenerateRequest, *, kv_bytes: int) -> TorchState:
        """Check the request's KV transfer parameters against this engine, and return the engine's part of them.

        Raises:
            TransferMismatch: They do not fit this engine or the request. The error names the field.
            TransferExpired: They have expired.
            RequestRejected: The request has none.
        """
        kv_params = self.transfers.validate(request, kv_bytes=kv_bytes)
        engine_state = _engine_state(kv_params)
        if not 0 < engine_state.region_bytes <= max(REGION_BYTES.values()):
            raise TransferMismatch(
                f"KV transfer {kv_params.transfer_id} has regions of {engine_state.region_bytes} bytes", field="opaque"
            )
        return engine_state

    async def fetch(
        self, request: GenerateRequest, allocation: Allocation, *, on_region: Callable[[int], None]
    ) -> None:
        """Read the KV of a validated request into `allocation`. `on_region`: see `TransferBackend.read`.

        Raises:
            KvTransferError: The KV can't be read.
            DeadlineExceeded: The request's deadline passed first.
        """
        kv_params = request.kv_params
        assert kv_params is not None
        to = Destination([_region(region) for region in allocation.regions], on_region)
        await self.transfers.fetch(request, kv_params, _engine_state(kv_params).offer, to)

    async def aclose(self) -> None:
        """End all KV transfers, then close the backend."""
        await self.transfers.aclose()
        await asyncio.to_thread(self._copying.shutdown)


def _log_copy_error(copying: Future[None]) -> None:
    if (exc := copying.exception()) is not None:
        log.error("copying KV to the transfer buffer failed on the GPU: %s", exc)


def _engine_state(kv_params: KvTransferParams) -> TorchState:
    try:
        return decode(kv_params.engine_state, TorchState)
    except BadFrame as exc:
        raise TransferMismatch(
            f"KV transfer {kv_params.transfer_id} was not created by a torch engine", field="opaque"
        ) from exc


def _region(memory: torch.Tensor) -> MemoryRegion:
    return MemoryRegion(memory.data_ptr(), memory.nbytes, str(memory.device))
