"""Where tickets are written, counted and redeemed, on the event loop.

TensorRT-LLM does not tell when a decode engine has fetched a request's KV: what is held here is what the pipeline
has not released yet, and what has not expired.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dynamo_trtllm.engine.trtllm import ticket as wire
from dynamo_trtllm.engine.trtllm.vendor import Capabilities
from dynamo_trtllm.errors import EngineRefused, TicketMismatch
from dynamo_trtllm.handoff import tickets
from dynamo_trtllm.messages import (
    GenerateRequest,
    HandoffTicket,
    KvLayout,
    ReleaseOutcome,
    TokenLogprob,
    token_ids,
)

_log = logging.getLogger(__name__)
_COUNTER_BITS = 20
_GLOBAL = 1 << 62  # keeps our ids apart from those that an engine counts itself


class _Held(NamedTuple):
    kv_blocks: int
    give_up: Callable[[], None]
    expiry: asyncio.TimerHandle


class Terms(NamedTuple):
    """What a ticket of this worker says of it, and a ticket for it must say."""

    holder: int
    model: str
    layout: KvLayout
    pairing: Mapping[str, str]
    capabilities: Capabilities


class Desk:
    """`on_change` is called whenever the number of tickets held has changed."""

    def __init__(self, terms: Terms, *, ttl_s: float, on_change: Callable[[], None]) -> None:
        self._terms = terms
        self._ttl_s = ttl_s
        self._on_change = on_change
        self._held: dict[str, _Held] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def kv_blocks(self) -> int:
        """Of all tickets held, by their prompts: the vendor does not tell."""
        return sum(held.kv_blocks for held in self._held.values())

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
        expiry = asyncio.get_running_loop().call_later(self._ttl_s, self._expire, ticket_id)
        blocks = -(-len(request.token_ids) // terms.layout.block_tokens)
        self._held[ticket_id] = _Held(blocks, give_up, expiry)
        self._on_change()
        return HandoffTicket(
            version=tickets.TICKET_VERSION,
            ticket_id=ticket_id,
            engine="trtllm",
            model=terms.model,
            layout=terms.layout,
            pairing=terms.pairing,
            holder=terms.holder,
            expires_at=time.time() + self._ttl_s,
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

    def let_go(self, ticket_id: str, outcome: ReleaseOutcome) -> None:
        """Unknown tickets are no error. One that nobody redeemed is given up in the engine too, as far as it goes."""
        held = self._held.pop(ticket_id, None)
        if held is None:
            return
        held.expiry.cancel()
        if outcome is ReleaseOutcome.REFUSED:
            held.give_up()
        self._on_change()

    def _expire(self, ticket_id: str) -> None:
        _log.warning("ticket %s expired after %.0f s: no decode worker told that it fetched it", ticket_id, self._ttl_s)
        self.let_go(ticket_id, ReleaseOutcome.REFUSED)

    def close(self) -> None:
        """Forgets all tickets; the engine, and their KV with it, is about to go."""
        for held in self._held.values():
            held.expiry.cancel()
        self._held.clear()
        self._on_change()


def ticket_of(request: GenerateRequest) -> HandoffTicket:
    if request.ticket is None:
        raise EngineRefused("a decode leg needs a ticket", field="ticket")
    return request.ticket


_ITEM_BYTES = {"fp8": 1, "nvfp4": 1, "float32": 4}


def kv_bytes(layout: KvLayout, tokens: int) -> int:
    """Of whole blocks, all ranks together; as the layout says, so sliding windows are not taken off."""
    blocks = -(-tokens // layout.block_tokens)
    per_token = 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim * _ITEM_BYTES.get(layout.dtype, 2)
    return blocks * layout.block_tokens * per_token
