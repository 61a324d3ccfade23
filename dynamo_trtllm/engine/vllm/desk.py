"""Where tickets are written, counted and redeemed, on the event loop."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dynamo_trtllm.engine.held import HeldTickets, kv_blocks, kv_bytes, ticket_of
from dynamo_trtllm.engine.vllm import ticket as wire
from dynamo_trtllm.engine.vllm.outputs import Step
from dynamo_trtllm.engine.vllm.requests import Redeemed
from dynamo_trtllm.errors import TicketMismatch
from dynamo_trtllm.handoff import tickets
from dynamo_trtllm.messages import GenerateRequest, HandoffTicket, KvLayout, token_ids

TRANSPORT = "vllm/nixl"


class Terms(NamedTuple):
    """What a ticket of this worker says of it, and a ticket for it must say."""

    holder: int
    model: str
    layout: KvLayout
    pairing: Mapping[str, str]
    release: str


class Desk(HeldTickets):
    """`on_change` is called whenever the number of tickets held has changed."""

    def __init__(self, terms: Terms, *, ttl_s: float, on_change: Callable[[], None]) -> None:
        super().__init__(ttl_s=ttl_s, on_change=on_change)
        self._terms = terms
        self._numbers = itertools.count(1)

    def hand_out(
        self,
        request: GenerateRequest,
        params: Mapping[str, Any] | None,
        step: Step,
        *,
        seed: int | None,
        give_up: Callable[[], None],
    ) -> HandoffTicket:
        """A ticket over what a prefill call left. `give_up`: asks the engine to drop it, when nobody came."""
        terms, prompt_tokens = self._terms, len(request.token_ids)
        opaque = wire.pack(params, release=terms.release, seed=seed if request.sampling.seed is None else None)
        ticket_id = f"{terms.holder:x}-{next(self._numbers)}"
        self.hold(ticket_id, kv_blocks(terms.layout, prompt_tokens), give_up)
        return HandoffTicket(
            version=tickets.TICKET_VERSION,
            ticket_id=ticket_id,
            engine="vllm",
            model=terms.model,
            layout=terms.layout,
            pairing=terms.pairing,
            holder=terms.holder,
            expires_at=time.time() + self.ttl_s,
            prompt_tokens=prompt_tokens,
            first_token_ids=token_ids(step.token_ids[:1]),
            first_logprobs=step.logprobs[:1],
            transport=TRANSPORT,
            kv_bytes=kv_bytes(terms.layout, prompt_tokens),
            opaque=opaque,
        )

    def redeem(self, request: GenerateRequest) -> Redeemed:
        """Raises TicketMismatch or TicketExpired."""
        ticket, terms = ticket_of(request), self._terms
        tickets.check(
            ticket, engine="vllm", model=terms.model, layout=terms.layout, now=time.time(), pairing=terms.pairing
        )
        if ticket.prompt_tokens != len(request.token_ids):
            raise TicketMismatch(
                f"ticket {ticket.ticket_id}: prompt_tokens is {ticket.prompt_tokens} at prefill and "
                f"{len(request.token_ids)} at decode",
                field="prompt_tokens",
            )
        if not ticket.first_token_ids:
            raise TicketMismatch(f"ticket {ticket.ticket_id} has no first token", field="first_token_ids")
        found = wire.unpack(ticket)
        return Redeemed(first_token=ticket.first_token_ids[0], seed=found.seed, kv_transfer_params=found.params)
