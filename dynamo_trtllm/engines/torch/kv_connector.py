"""Export and import KV between engines: the torch engine's side of a KV transfer, on the event loop.

Each exported prompt occupies space in the transfer buffer until its KV was fetched or rejected, or has expired.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dynamo_trtllm.engines.torch.sequence import PrefillDone, TorchSequence
from dynamo_trtllm.engines.torch.transfer_buffer import REGION_BYTES, Allocation, TransferBuffer
from dynamo_trtllm.errors import BadFrame, DynamoError, RequestRejected, TransferFailed, TransferMismatch
from dynamo_trtllm.kv_transfer import base
from dynamo_trtllm.kv_transfer.base import Destination, FetchLimits, MemoryRegion, TransferBackend, fetch
from dynamo_trtllm.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    KvLayout,
    KvTransferParams,
    decode,
    encode,
    token_ids,
)

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class TorchState(msgspec.Struct, frozen=True):
    """The engine's part of the KV transfer parameters."""

    offer: bytes  # from `TransferBackend.publish`
    seed: int  # of the request's random draws, unsigned 64 bits
    # each region has as many whole rows as fit into this, but at least one
    region_bytes: int = msgspec.field(name="piece_bytes")


class _ExportedKv(NamedTuple):
    seq: TorchSequence
    expiry: asyncio.TimerHandle


class KvConnector:
    """The KV transfers of one engine.

    `retire` is called with the sequence of each transfer once its memory is no longer published.
    """

    def __init__(
        self,
        backend: TransferBackend,
        *,
        prefill_instance_id: int,
        model: str,
        ttl_s: float,
        retire: Callable[[TorchSequence], None],
    ) -> None:
        self._backend = backend
        self._instance_id = prefill_instance_id
        self._model = model
        self._ttl_s = ttl_s
        self._retire = retire
        self._awaiting_fetch: dict[str, _ExportedKv] = {}
        self._unpublish_tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._copying = ThreadPoolExecutor(1, "torch-copied")

    async def start(self, transfer_buffer: TransferBuffer) -> None:
        """Start the transfer backend and register the transfer buffer with it.

        If the backend can't read GPU memory, the buffer moves to pinned host memory.

        Raises:
            ConfigError: The backend can't start with this configuration.
            TransferFailed: The backend can't transfer KV of this device.
        """
        self._backend.checksums.device_checksum = transfer_buffer.checksum
        await self._backend.start(self.release)
        try:
            await self._backend.register(_region(transfer_buffer.memory))
        except TransferFailed as exc:
            if transfer_buffer.memory.device.type == "cpu":
                raise
            log.warning("KV transfer uses pinned host memory, which is slower: %s", exc.message)
            await asyncio.to_thread(transfer_buffer.move_to_host)
            await self._backend.register(_region(transfer_buffer.memory))
        log.info("KV transfer over %s: transfer buffer of %d MiB", self._backend.name, transfer_buffer.num_bytes >> 20)

    async def export_kv(self, seq: TorchSequence, prefill_done: PrefillDone, layout: KvLayout) -> Chunk:
        """Publish a prompt's KV and return the terminal chunk with its KV transfer parameters.

        From this call on the connector retires the sequence, also if the call fails.
        """
        transfer_id = f"{self._instance_id:x}-{next(self._numbers)}"
        expires_at = time.time() + self._ttl_s
        expiry = asyncio.get_running_loop().call_later(self._ttl_s, self._expire, transfer_id)
        self._awaiting_fetch[transfer_id] = _ExportedKv(seq, expiry)
        regions = [_region(region) for region in prefill_done.allocation.regions]
        try:
            offer = await self._backend.publish(transfer_id, regions, ready=0 if prefill_done.copied else None)
        except BaseException:
            self.release(transfer_id)
            raise
        self._follow(transfer_id, prefill_done.copied)
        device = "cuda" if prefill_done.copied else "cpu"
        kv_params = KvTransferParams(
            version=base.TRANSFER_PARAMS_VERSION,
            transfer_id=transfer_id,
            engine="torch",
            model=self._model,
            layout=layout,
            prefill_instance_id=self._instance_id,
            expires_at=expires_at,
            prompt_tokens=seq.prompt_tokens,
            first_token_ids=token_ids(prefill_done.first.token_ids),
            first_logprobs=prefill_done.first.logprobs,
            transport=self._backend.name,
            kv_bytes=sum(region.num_bytes for region in regions),
            engine_state=encode(TorchState(offer, seq.seed, REGION_BYTES[device])),
        )
        stats = prefill_done.first.stats
        if stats is not None:
            stats = msgspec.structs.replace(stats, kv_bytes=kv_params.kv_bytes, transport=kv_params.transport)
        return Chunk(finish_reason=FinishReason.KV_TRANSFER, kv_params=kv_params, stats=stats)

    def _follow(self, transfer_id: str, copied: Sequence[torch.cuda.Event]) -> None:
        """Mark each region as ready when its copy is done. A thread waits for the copies."""
        if copied:
            loop = asyncio.get_running_loop()

            def follow() -> None:
                for ready, event in enumerate(copied, start=1):
                    event.synchronize()
                    loop.call_soon_threadsafe(self._backend.mark_ready, transfer_id, ready)

            self._copying.submit(follow).add_done_callback(_log_copy_error)

    def validate(self, request: GenerateRequest, layout: KvLayout, *, kv_bytes: int) -> TorchState:
        """Check the request's KV transfer parameters against this engine, and return the engine's part of them.

        Raises:
            TransferMismatch: They do not fit this engine or the request. The error names the field.
            TransferExpired: They have expired.
            RequestRejected: The request has none.
        """
        kv_params = _kv_params(request)
        base.check_params(kv_params, engine="torch", model=self._model, layout=layout, now=time.time())
        for name, ours in (("prompt_tokens", len(request.token_ids)), ("kv_bytes", kv_bytes)):
            if (theirs := getattr(kv_params, name)) != ours:
                raise TransferMismatch(
                    f"KV transfer {kv_params.transfer_id}: {name} is {theirs} at prefill and {ours} at decode",
                    field=name,
                )
        if not kv_params.first_token_ids:
            raise TransferMismatch(f"KV transfer {kv_params.transfer_id} has no first token", field="first_token_ids")
        engine_state = _engine_state(kv_params)
        if not 0 < engine_state.region_bytes <= max(REGION_BYTES.values()):
            raise TransferMismatch(
                f"KV transfer {kv_params.transfer_id} has regions of {engine_state.region_bytes} bytes", field="opaque"
            )
        return engine_state

    async def fetch(
        self, request: GenerateRequest, allocation: Allocation, timeout_s: float, *, on_region: Callable[[int], None]
    ) -> None:
        """Read the request's KV into `allocation`.

        Args:
            timeout_s: The longest time for the read, in seconds. The request's deadline and the expiry may be earlier.
            on_region: See `TransferBackend.read`.

        Raises:
            KvTransferError: The KV can't be read.
            DeadlineExceeded: The request's deadline passed first.
        """
        kv_params = _kv_params(request)
        to = Destination([_region(region) for region in allocation.regions], on_region)
        await fetch(
            self._backend, kv_params, _engine_state(kv_params).offer, to, FetchLimits(request.deadline, timeout_s)
        )

    def release(self, transfer_id: str) -> None:
        """End a KV transfer. Unknown ids are ignored."""
        pending = self._awaiting_fetch.pop(transfer_id, None)
        if pending is None:
            return
        pending.expiry.cancel()
        task = asyncio.get_running_loop().create_task(
            self._unpublish(transfer_id, pending), name=f"withdraw-{transfer_id}"
        )
        self._unpublish_tasks.add(task)
        task.add_done_callback(self._unpublish_tasks.discard)

    def is_pending(self, transfer_id: str) -> bool:
        """Return whether a KV transfer is neither released nor expired."""
        return transfer_id in self._awaiting_fetch

    def _expire(self, transfer_id: str) -> None:
        log.warning("KV transfer %s expired after %.0f s without a fetch; freeing its KV", transfer_id, self._ttl_s)
        self.release(transfer_id)

    async def _unpublish(self, transfer_id: str, pending: _ExportedKv) -> None:
        try:
            await self._backend.unpublish(transfer_id)
        except DynamoError as exc:
            log.warning("KV transfer %s: unpublishing failed: %s", transfer_id, exc)
        finally:
            self._retire(pending.seq)

    @property
    def checksum_mismatches(self) -> int:
        """Return the number of fetches whose KV differed from what was sent."""
        return self._backend.checksums.mismatches

    def check(self) -> None:
        """Raise EngineFailed when no KV can be transferred any more."""
        self._backend.check()

    async def aclose(self) -> None:
        """End all KV transfers, then close the backend."""
        for transfer_id in list(self._awaiting_fetch):
            self.release(transfer_id)
        await asyncio.gather(*self._unpublish_tasks)
        await self._backend.aclose()
        await asyncio.to_thread(self._copying.shutdown)


def _log_copy_error(copying: Future[None]) -> None:
    if (exc := copying.exception()) is not None:
        log.error("copying KV to the transfer buffer failed on the GPU: %s", exc)


def _kv_params(request: GenerateRequest) -> KvTransferParams:
    if request.kv_params is None:
        raise RequestRejected("a decode call needs KV transfer parameters (ticket)", field="ticket")
    return request.kv_params


def _engine_state(kv_params: KvTransferParams) -> TorchState:
    try:
        return decode(kv_params.engine_state, TorchState)
    except BadFrame as exc:
        raise TransferMismatch(
            f"KV transfer {kv_params.transfer_id} was not created by a torch engine", field="opaque"
        ) from exc


def _region(memory: torch.Tensor) -> MemoryRegion:
    return MemoryRegion(memory.data_ptr(), memory.nbytes, str(memory.device))
