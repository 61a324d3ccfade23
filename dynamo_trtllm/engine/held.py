"""The book of tickets that engines keep whose library does not tell when a decode engine has fetched the KV.

What is held is what the pipeline has not released yet, and what has not expired. On the event loop; frees nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from dynamo_trtllm.errors import EngineRefused
from dynamo_trtllm.messages import GenerateRequest, HandoffTicket, KvLayout, ReleaseOutcome

_log = logging.getLogger(__name__)
_ITEM_BYTES = {"fp8": 1, "nvfp4": 1, "float32": 4}


class _Held(NamedTuple):
    kv_blocks: int
    give_up: Callable[[], None]
    expiry: asyncio.TimerHandle


class HeldTickets:
    """`on_change` is called whenever the number of tickets held has changed."""

    def __init__(self, *, ttl_s: float, on_change: Callable[[], None]) -> None:
        self.ttl_s = ttl_s
        self._on_change = on_change
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def kv_blocks(self) -> int:
        """Of all tickets held, by their prompts: the library does not tell."""
        return sum(held.kv_blocks for held in self._held.values())

    def hold(self, ticket_id: str, kv_blocks: int, give_up: Callable[[], None]) -> None:
        """From now on. `give_up` asks the engine to drop the KV, when nobody came for it."""
        expiry = asyncio.get_running_loop().call_later(self.ttl_s, self._expire, ticket_id)
        self._held[ticket_id] = _Held(kv_blocks, give_up, expiry)
        self._on_change()

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
        _log.warning("ticket %s expired after %.0f s: no decode worker told that it fetched it", ticket_id, self.ttl_s)
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


def kv_blocks(layout: KvLayout, tokens: int) -> int:
    return -(-tokens // layout.block_tokens)


def kv_bytes(layout: KvLayout, tokens: int) -> int:
    """Of whole blocks, all ranks together; as the layout says, so sliding windows are not taken off."""
    per_token = 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim * _ITEM_BYTES.get(layout.dtype, 2)
    return kv_blocks(layout, tokens) * layout.block_tokens * per_token
