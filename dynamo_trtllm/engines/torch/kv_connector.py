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
    job: TorchSequence
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
        holder: int,
        model: str,
        ttl_s: float,
        retire: Callable[[TorchSequence], None],
    ) -> None:
        self._backend = backend
        self._holder = holder
        self._model = model
        self._ttl_s = ttl_s
        self._retire = retire
        self._held: dict[str, _ExportedKv] = {}
        self._withdrawals: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._copying = ThreadPoolExecutor(1, "torch-copied")

    async def start(self, staging: TransferBuffer) -> None:
        """Raises ConfigError or TransferFailed when the backend can't move KV of this device at all."""
        self._backend.checksums.device_checksum = staging.checksum
        await self._backend.start(self.let_go)
        try:
            await self._backend.register(_piece(staging.region))
        except TransferFailed as exc:
            if staging.region.device.type == "cpu":
                raise
            _log.warning("KV moves through pinned host memory: %s", exc.message)
            await asyncio.to_thread(staging.move_to_host)
            await self._backend.register(_piece(staging.region))
        _log.info("KV moves over %s, through %d MiB of staging memory", self._backend.name, staging.num_bytes >> 20)

    async def hand_out(self, job: TorchSequence, gathered: PrefillDone, layout: KvLayout) -> Chunk:
        """The terminal chunk with the ticket. Whatever happens from the call on, the job is retired in the end."""
        ticket_id = f"{self._holder:x}-{next(self._numbers)}"
        expires_at = time.time() + self._ttl_s
        expiry = asyncio.get_running_loop().call_later(self._ttl_s, self._expire, ticket_id)
        self._held[ticket_id] = _ExportedKv(job, expiry)
        pieces = [_piece(piece) for piece in gathered.parcel.pieces]
        kv_bytes = sum(piece.num_bytes for piece in pieces)
        try:
            offer = await self._backend.offer(ticket_id, pieces, ready=0 if gathered.copied else None)
        except BaseException:
            self.let_go(ticket_id)
            raise
        self._follow(ticket_id, gathered.copied)
        device = "cuda" if gathered.copied else "cpu"
        ticket = KvTransferParams(
            version=params.TICKET_VERSION,
            ticket_id=ticket_id,
            engine="torch",
            model=self._model,
            layout=layout,
            holder=self._holder,
            expires_at=expires_at,
            prompt_tokens=job.prompt_tokens,
            first_token_ids=token_ids(gathered.first.token_ids),
            first_logprobs=gathered.first.logprobs,
            transport=self._backend.name,
            kv_bytes=kv_bytes,
            opaque=codec.encode(_TorchState(offer, job.seed, REGION_BYTES[device])),
        )
        stats = gathered.first.stats
        if stats is not None:
            stats = msgspec.structs.replace(stats, kv_bytes=ticket.kv_bytes, transport=ticket.transport)
        return Chunk(finish_reason=FinishReason.HANDOFF, ticket=ticket, stats=stats)

    def _follow(self, ticket_id: str, copied: Sequence[torch.cuda.Event]) -> None:
        """Report each piece to the reader when its copy is done. A thread waits for the copies, not the caller."""
        if copied:
            loop = asyncio.get_running_loop()

            def follow() -> None:
                for ready, event in enumerate(copied, start=1):
                    event.synchronize()
                    loop.call_soon_threadsafe(self._backend.advance, ticket_id, ready)

            self._copying.submit(follow).add_done_callback(_complain)

    def redeem(self, request: GenerateRequest, layout: KvLayout, *, kv_bytes: int) -> TransferTerms:
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
        opaque = _opaque(ticket)
        if not 0 < opaque.piece_bytes <= max(REGION_BYTES.values()):
            raise TransferMismatch(
                f"ticket {ticket.ticket_id} has pieces of {opaque.piece_bytes} bytes", field="opaque"
            )
        return TransferTerms(opaque.seed, opaque.piece_bytes)

    async def fetch(
        self, request: GenerateRequest, parcel: Allocation, timeout_s: float, *, on_piece: Callable[[int], None]
    ) -> None:
        """Read the KV into the allocation, see `TransferBackend.fetch`. Raises KvTransferError or DeadlineExceeded."""
        ticket = _ticket(request)
        to = Destination([_piece(piece) for piece in parcel.pieces], on_piece)
        await fetch(self._backend, ticket, _opaque(ticket).offer, to, FetchLimits(request.deadline, timeout_s))

    def let_go(self, ticket_id: str) -> None:
        """Ends a ticket; unknown ones are no error."""
        held = self._held.pop(ticket_id, None)
        if held is None:
            return
        held.expiry.cancel()
        task = asyncio.get_running_loop().create_task(self._withdraw(ticket_id, held), name=f"withdraw-{ticket_id}")
        self._withdrawals.add(task)
        task.add_done_callback(self._withdrawals.discard)

    def _expire(self, ticket_id: str) -> None:
        _log.warning("ticket %s expired after %.0f s: no worker fetched its KV, freeing it", ticket_id, self._ttl_s)
        self.let_go(ticket_id)

    async def _withdraw(self, ticket_id: str, held: _ExportedKv) -> None:
        try:
            await self._backend.withdraw(ticket_id)
        except DynamoError as exc:
            _log.warning("withdrawing ticket %s: %s", ticket_id, exc)
        finally:
            self._retire(held.job)

    @property
    def checksum_mismatches(self) -> int:
        """Return the number of fetches whose KV differed from what was sent."""
        return self._backend.checksums.mismatches

    def check(self) -> None:
        """Raise EngineFailed when no KV can be transferred any more."""
        self._backend.check()

    async def aclose(self) -> None:
        """Ends all tickets, then the backend."""
        for ticket_id in list(self._held):
            self.let_go(ticket_id)
        await asyncio.gather(*self._withdrawals)
        await self._backend.aclose()
        await asyncio.to_thread(self._copying.shutdown)


def _complain(copying: Future[None]) -> None:
    if (exc := copying.exception()) is not None:
        _log.error("a copy of KV failed on the GPU: %s", exc)


def _ticket(request: GenerateRequest) -> KvTransferParams:
    if request.ticket is None:
        raise RequestRejected("a decode call needs a ticket", field="ticket")
    return request.ticket


def _opaque(ticket: KvTransferParams) -> _TorchState:
    try:
        return codec.decode(ticket.opaque, _TorchState)
    except BadFrame as exc:
        raise TransferMismatch(f"ticket {ticket.ticket_id} is not one of this engine's", field="opaque") from exc


def _piece(memory: torch.Tensor) -> MemoryRegion:
    return MemoryRegion(memory.data_ptr(), memory.nbytes, str(memory.device))
