"""Where tickets are written, held and redeemed: the torch engine's side of a hand-off, on the event loop.

Each ticket has one staging tensor, which lives until it was fetched, refused or has expired.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from torch import Tensor

from dynamo_trtllm import codec
from dynamo_trtllm.engine.torch.batcher import Gathered, Job
from dynamo_trtllm.errors import BadFrame, DynamoError, EngineRefused, TicketMismatch
from dynamo_trtllm.handoff import tickets
from dynamo_trtllm.handoff.base import Carrier, Piece
from dynamo_trtllm.handoff.fetching import Within, fetch
from dynamo_trtllm.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    HandoffTicket,
    KvLayout,
    token_ids,
)

_log = logging.getLogger(__name__)


class _Opaque(msgspec.Struct, frozen=True):
    offer: bytes
    seed: int  # of the request's randomness, unsigned 64 bits


class _Held(NamedTuple):
    job: Job
    staging: Tensor
    expiry: asyncio.TimerHandle


class Desk:
    """`retire` is called for each ticket's job once its memory is no longer offered."""

    def __init__(
        self, carrier: Carrier, *, holder: int, model: str, ttl_s: float, retire: Callable[[Job], None]
    ) -> None:
        self._carrier = carrier
        self._holder = holder
        self._model = model
        self._ttl_s = ttl_s
        self._retire = retire
        self._held: dict[str, _Held] = {}
        self._withdrawals: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)

    async def start(self) -> None:
        await self._carrier.start(self.let_go)

    async def hand_out(self, job: Job, gathered: Gathered, layout: KvLayout) -> Chunk:
        """The terminal chunk with the ticket. Whatever happens from the call on, the job is retired in the end."""
        ticket_id = f"{self._holder:x}-{next(self._numbers)}"
        expires_at = time.time() + self._ttl_s
        expiry = asyncio.get_running_loop().call_later(self._ttl_s, self._expire, ticket_id)
        self._held[ticket_id] = _Held(job, gathered.staging, expiry)
        try:
            offer = await self._carrier.offer(ticket_id, [_piece(gathered.staging)])
        except BaseException:
            self.let_go(ticket_id)
            raise
        ticket = HandoffTicket(
            version=tickets.TICKET_VERSION,
            ticket_id=ticket_id,
            engine="torch",
            model=self._model,
            layout=layout,
            holder=self._holder,
            expires_at=expires_at,
            prompt_tokens=job.prompt_tokens,
            first_token_ids=token_ids(gathered.first.token_ids),
            first_logprobs=gathered.first.logprobs,
            transport=self._carrier.name,
            kv_bytes=gathered.staging.nbytes,
            opaque=codec.encode(_Opaque(offer, job.seed)),
        )
        stats = gathered.first.stats
        if stats is not None:
            stats = msgspec.structs.replace(stats, kv_bytes=ticket.kv_bytes, transport=ticket.transport)
        return Chunk(finish_reason=FinishReason.HANDOFF, ticket=ticket, stats=stats)

    def redeem(self, request: GenerateRequest, layout: KvLayout, *, kv_bytes: int) -> int:
        """The seed of a ticket that fits. Raises TicketMismatch, TicketExpired or EngineRefused."""
        ticket = _ticket(request)
        tickets.check(ticket, engine="torch", model=self._model, layout=layout, now=time.time())
        here = {"prompt_tokens": len(request.token_ids), "kv_bytes": kv_bytes}
        for name, ours in here.items():
            if getattr(ticket, name) != ours:
                theirs = getattr(ticket, name)
                raise TicketMismatch(
                    f"ticket {ticket.ticket_id}: {name} is {theirs} at prefill and {ours} at decode", field=name
                )
        if not ticket.first_token_ids:
            raise TicketMismatch(f"ticket {ticket.ticket_id} has no first token", field="first_token_ids")
        return _opaque(ticket).seed

    async def fetch(self, request: GenerateRequest, staging: Tensor, timeout_s: float) -> None:
        """Reads the ticket's KV into `staging`. Raises a HandoffError or DeadlineExceeded."""
        ticket = _ticket(request)
        within = Within(request.deadline, timeout_s)
        await fetch(self._carrier, ticket, _opaque(ticket).offer, [_piece(staging)], within)

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
        _log.warning("ticket %s expired after %.0f s: nobody fetched its KV, which is freed", ticket_id, self._ttl_s)
        self.let_go(ticket_id)

    async def _withdraw(self, ticket_id: str, held: _Held) -> None:
        try:
            await self._carrier.withdraw(ticket_id)
        except DynamoError as exc:
            _log.warning("withdrawing ticket %s: %s", ticket_id, exc)
        finally:
            self._retire(held.job)

    async def aclose(self) -> None:
        """Ends all tickets, then the carrier."""
        for ticket_id in list(self._held):
            self.let_go(ticket_id)
        await asyncio.gather(*self._withdrawals)
        await self._carrier.aclose()


def _ticket(request: GenerateRequest) -> HandoffTicket:
    if request.ticket is None:
        raise EngineRefused("a decode leg needs a ticket", field="ticket")
    return request.ticket


def _opaque(ticket: HandoffTicket) -> _Opaque:
    try:
        return codec.decode(ticket.opaque, _Opaque)
    except BadFrame as exc:
        raise TicketMismatch(f"ticket {ticket.ticket_id} is not one of this engine's", field="opaque") from exc


def _piece(staging: Tensor) -> Piece:
    return Piece(staging.data_ptr(), staging.nbytes, str(staging.device))
