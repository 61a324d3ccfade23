"""Where tickets are written, counted and redeemed, on the event loop.

TensorRT-LLM does not tell when a decode engine has fetched a request's KV: what is held here is what the pipeline
has not released yet, and what has not expired.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dynamo_trtllm.engine.held import HeldTickets, kv_blocks, kv_bytes, ticket_of
from dynamo_trtllm.engine.trtllm import ticket as wire
from dynamo_trtllm.engine.trtllm.vendor import Capabilities
from dynamo_trtllm.errors import TicketMismatch
from dynamo_trtllm.handoff import tickets
from dynamo_trtllm.messages import (
    GenerateRequest,
    HandoffTicket,
    KvLayout,
    TokenLogprob,
    token_ids,
)

_COUNTER_BITS = 20
_GLOBAL = 1 << 62  # keeps our ids apart from those that an engine counts itself


class Terms(NamedTuple):
    """What a ticket of this worker says of it, and a ticket for it must say."""

    holder: int
    model: str
    layout: KvLayout
    pairing: Mapping[str, str]
    capabilities: Capabilities


class Desk(HeldTickets):
    """`on_change` is called whenever the number of tickets held has changed."""

    def __init__(self, terms: Terms, *, ttl_s: float, on_change: Callable[[], None]) -> None:
        super().__init__(ttl_s=ttl_s, on_change=on_change)
        self._terms = terms
        self._numbers = itertools.count(1)

    def context_params(self) -> dict[str, Any]:
        """Arguments of the context-only call's DisaggregatedParams."""
        params: dict[str, Any] = {"request_type": "context_only"}
        if "disagg_request_id" in self._terms.capabilities.disagg_fields:
            params["disagg_request_id"] = self._disagg_request_id()
        return params

    def _disagg_request_id(self) -> int:
        """Unique in the cluster: 42 bits of the instance id, which is random, and a counter; never time or pid."""
        count = next(self._numbers) & ((1 << _COUNTER_BITS) - 1)
        return _GLOBAL | (self._terms.holder << _COUNTER_BITS) & (_GLOBAL - 1) | count

    def hand_out(
        self,
        request: GenerateRequest,
        params: Mapping[str, Any],
        logprobs: tuple[TokenLogprob, ...],
        give_up: Callable[[], None],
    ) -> HandoffTicket:
        """A ticket over what a context-only call left. `give_up`: asks the engine to drop it, when nobody came."""
        terms = self._terms
        opaque = wire.pack(params, release=terms.capabilities.release)
        ticket_id = f"{terms.holder:x}-{next(self._numbers)}"
        self.hold(ticket_id, kv_blocks(terms.layout, len(request.token_ids)), give_up)
        return HandoffTicket(
            version=tickets.TICKET_VERSION,
            ticket_id=ticket_id,
            engine="trtllm",
            model=terms.model,
            layout=terms.layout,
            pairing=terms.pairing,
            holder=terms.holder,
            expires_at=time.time() + self.ttl_s,
            prompt_tokens=len(request.token_ids),
            first_token_ids=token_ids(params["first_gen_tokens"][:1]),
            first_logprobs=logprobs,
            transport=f"trtllm/{terms.pairing.get('transceiver', '')}".lower(),
            kv_bytes=kv_bytes(terms.layout, len(request.token_ids)),
            opaque=opaque,
        )

    def redeem(self, request: GenerateRequest, logprob: Callable[..., Any] | None) -> dict[str, Any]:
        """Arguments of the generation-only call's DisaggregatedParams. Raises TicketMismatch or TicketExpired."""
        ticket, terms = ticket_of(request), self._terms
        tickets.check(
            ticket,
            engine="trtllm",
            model=terms.model,
            layout=terms.layout,
            now=time.time(),
            pairing=terms.pairing,
        )
        if ticket.prompt_tokens != len(request.token_ids):
            raise TicketMismatch(
                f"ticket {ticket.ticket_id}: prompt_tokens is {ticket.prompt_tokens} at prefill and "
                f"{len(request.token_ids)} at decode",
                field="prompt_tokens",
            )
        params = wire.unpack(ticket, known=terms.capabilities.disagg_fields, logprob=logprob)
        return params | {"request_type": "generation_only"}
