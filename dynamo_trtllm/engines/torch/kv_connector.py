"""Where tickets are written, held and redeemed: the torch engine's side of a hand-off, on the event loop.

Each ticket has a parcel of the staging memory, until it was fetched, refused or has expired.
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

from dynamo_trtllm import codec
from dynamo_trtllm.engines.torch.sequence import PrefillDone, TorchSequence
from dynamo_trtllm.engines.torch.transfer_buffer import REGION_BYTES, Allocation, TransferBuffer
from dynamo_trtllm.errors import BadFrame, DynamoError, RequestRejected, TransferFailed, TransferMismatch
from dynamo_trtllm.kv_transfer import params
from dynamo_trtllm.kv_transfer.base import MemoryRegion, TransferBackend
from dynamo_trtllm.kv_transfer.params import Destination, FetchLimits, fetch
from dynamo_trtllm.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    KvLayout,
    KvTransferParams,
    token_ids,
)

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


class _TorchState(msgspec.Struct, frozen=True):
    offer: bytes
    seed: int  # of the request's randomness, unsigned 64 bits
    piece_bytes: int  # pieces have the most whole rows that fit into this, and at least one


class _ExportedKv(NamedTuple):
    seq: TorchSequence
    expiry: asyncio.TimerHandle


class TransferTerms(NamedTuple):
    """Of a ticket."""

    seed: int
    piece_bytes: int


class KvConnector:
    """`retire` is called for each ticket's job once its memory is no longer offered."""

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
        """Raises ConfigError or TransferFailed when the backend can't move KV of this device at all."""
        self._backend.checksums.device_checksum = transfer_buffer.checksum
        await self._backend.start(self.release)
        try:
            await self._backend.register(_piece(transfer_buffer.region))
        except TransferFailed as exc:
            if transfer_buffer.region.device.type == "cpu":
                raise
            _log.warning("KV moves through pinned host memory: %s", exc.message)
            await asyncio.to_thread(transfer_buffer.move_to_host)
            await self._backend.register(_piece(transfer_buffer.region))
        _log.info(
            "KV moves over %s, through %d MiB of staging memory", self._backend.name, transfer_buffer.num_bytes >> 20
        )

    async def export_kv(self, seq: TorchSequence, prefill_done: PrefillDone, layout: KvLayout) -> Chunk:
        """The terminal chunk with the ticket. Whatever happens from the call on, the job is retired in the end."""
        ticket_id = f"{self._instance_id:x}-{next(self._numbers)}"
        expires_at = time.time() + self._ttl_s
        expiry = asyncio.get_running_loop().call_later(self._ttl_s, self._expire, ticket_id)
        self._awaiting_fetch[ticket_id] = _ExportedKv(seq, expiry)
        pieces = [_piece(piece) for piece in prefill_done.allocation.pieces]
        kv_bytes = sum(piece.num_bytes for piece in pieces)
        try:
            offer = await self._backend.publish(ticket_id, pieces, ready=0 if prefill_done.copied else None)
        except BaseException:
            self.release(ticket_id)
            raise
        self._follow(ticket_id, prefill_done.copied)
        device = "cuda" if prefill_done.copied else "cpu"
        ticket = KvTransferParams(
            version=params.TICKET_VERSION,
            ticket_id=ticket_id,
            engine="torch",
            model=self._model,
            layout=layout,
            prefill_instance_id=self._instance_id,
            expires_at=expires_at,
            prompt_tokens=seq.prompt_tokens,
            first_token_ids=token_ids(prefill_done.first.token_ids),
            first_logprobs=prefill_done.first.logprobs,
            transport=self._backend.name,
            kv_bytes=kv_bytes,
            engine_state=codec.encode(_TorchState(offer, seq.seed, REGION_BYTES[device])),
        )
        stats = prefill_done.first.stats
        if stats is not None:
            stats = msgspec.structs.replace(stats, kv_bytes=ticket.kv_bytes, transport=ticket.transport)
        return Chunk(finish_reason=FinishReason.KV_TRANSFER, ticket=ticket, stats=stats)

    def _follow(self, ticket_id: str, copied: Sequence[torch.cuda.Event]) -> None:
        """Report each piece to the reader when its copy is done. A thread waits for the copies, not the caller."""
        if copied:
            loop = asyncio.get_running_loop()

            def follow() -> None:
                for ready, event in enumerate(copied, start=1):
                    event.synchronize()
                    loop.call_soon_threadsafe(self._backend.mark_ready, ticket_id, ready)

            self._copying.submit(follow).add_done_callback(_log_copy_error)

    def validate(self, request: GenerateRequest, layout: KvLayout, *, kv_bytes: int) -> TransferTerms:
        """Return the terms of a ticket that fits. Raises TransferMismatch, TransferExpired or RequestRejected."""
        ticket = _ticket(request)
        params.check_params(ticket, engine="torch", model=self._model, layout=layout, now=time.time())
        here = {"prompt_tokens": len(request.token_ids), "kv_bytes": kv_bytes}
        for name, ours in here.items():
            if getattr(ticket, name) != ours:
                theirs = getattr(ticket, name)
                raise TransferMismatch(
                    f"ticket {ticket.ticket_id}: {name} is {theirs} at prefill and {ours} at decode", field=name
                )
        if not ticket.first_token_ids:
            raise TransferMismatch(f"ticket {ticket.ticket_id} has no first token", field="first_token_ids")
        engine_state = _engine_state(ticket)
        if not 0 < engine_state.piece_bytes <= max(REGION_BYTES.values()):
            raise TransferMismatch(
                f"ticket {ticket.ticket_id} has pieces of {engine_state.piece_bytes} bytes", field="opaque"
            )
        return TransferTerms(engine_state.seed, engine_state.piece_bytes)

    async def fetch(
        self, request: GenerateRequest, allocation: Allocation, timeout_s: float, *, on_piece: Callable[[int], None]
    ) -> None:
        """Read the KV into the allocation, see `TransferBackend.read`. Raises KvTransferError or DeadlineExceeded."""
        ticket = _ticket(request)
        to = Destination([_piece(piece) for piece in allocation.pieces], on_piece)
        await fetch(self._backend, ticket, _engine_state(ticket).offer, to, FetchLimits(request.deadline, timeout_s))

    def release(self, ticket_id: str) -> None:
        """Ends a ticket; unknown ones are no error."""
        pending = self._awaiting_fetch.pop(ticket_id, None)
        if pending is None:
            return
        pending.expiry.cancel()
        task = asyncio.get_running_loop().create_task(self._unpublish(ticket_id, pending), name=f"withdraw-{ticket_id}")
        self._unpublish_tasks.add(task)
        task.add_done_callback(self._unpublish_tasks.discard)

    def _expire(self, ticket_id: str) -> None:
        _log.warning("ticket %s expired after %.0f s: no worker fetched its KV, freeing it", ticket_id, self._ttl_s)
        self.release(ticket_id)

    async def _unpublish(self, ticket_id: str, pending: _ExportedKv) -> None:
        try:
            await self._backend.unpublish(ticket_id)
        except DynamoError as exc:
            _log.warning("withdrawing ticket %s: %s", ticket_id, exc)
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
        """Ends all tickets, then the backend."""
        for ticket_id in list(self._awaiting_fetch):
            self.release(ticket_id)
        await asyncio.gather(*self._unpublish_tasks)
        await self._backend.aclose()
        await asyncio.to_thread(self._copying.shutdown)


def _log_copy_error(copying: Future[None]) -> None:
    if (exc := copying.exception()) is not None:
        _log.error("a copy of KV failed on the GPU: %s", exc)


def _ticket(request: GenerateRequest) -> KvTransferParams:
    if request.ticket is None:
        raise RequestRejected("a decode call needs a ticket", field="ticket")
    return request.ticket


def _engine_state(ticket: KvTransferParams) -> _TorchState:
    try:
        return codec.decode(ticket.engine_state, _TorchState)
    except BadFrame as exc:
        raise TransferMismatch(f"ticket {ticket.ticket_id} is not one of this engine's", field="opaque") from exc


def _piece(memory: torch.Tensor) -> MemoryRegion:
    return MemoryRegion(memory.data_ptr(), memory.nbytes, str(memory.device))
