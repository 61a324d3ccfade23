"""Tickets of engines whose library does not tell when a decode engine has fetched the KV: written, held, opened again.

What is held is what the pipeline has not released yet, and what has not expired. On the event loop; frees nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from dynamo_trtllm import codec
from dynamo_trtllm.errors import BadFrame, RequestRejected, TransferMismatch
from dynamo_trtllm.kv_transfer import params
from dynamo_trtllm.messages import GenerateRequest, KvLayout, KvTransferParams, ReleaseOutcome, TokenLogprob, token_ids

_log = logging.getLogger(__name__)
_ITEM_BYTES = {"fp8": 1, "nvfp4": 1, "float32": 4}


class TransferIdentity(NamedTuple):
    """What a ticket of this worker says of it, and a ticket for it must say."""

    engine: str
    holder: int
    model: str
    layout: KvLayout
    pairing: Mapping[str, str]
    transport: str  # for people: a ticket from another one is as good


class PrefillResult(NamedTuple):
    """The result of a prefill call."""

    first_token_ids: Sequence[int]
    first_logprobs: tuple[TokenLogprob, ...]
    opaque: bytes
    give_up: Callable[[], None]  # asks the engine to drop the KV when no decode worker fetched it


class _PendingTransfer(NamedTuple):
    kv_blocks: int
    give_up: Callable[[], None]
    expiry: asyncio.TimerHandle


class PendingTransfers:
    """`on_change` is called whenever the number of tickets held has changed."""

    def __init__(self, terms: TransferIdentity, *, ttl_s: float, on_change: Callable[[], None]) -> None:
        self._terms = terms
        self._ttl_s = ttl_s
        self._on_change = on_change
        self._numbers = itertools.count(1)
        self._held: dict[str, _PendingTransfer] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def kv_blocks(self) -> int:
        """Of all tickets held, by their prompts: the library does not tell."""
        return sum(held.kv_blocks for held in self._held.values())

    def write(self, request: GenerateRequest, left: PrefillResult) -> KvTransferParams:
        """A ticket, held from now on."""
        terms, prompt_tokens = self._terms, len(request.token_ids)
        ticket_id = f"{terms.holder:x}-{next(self._numbers)}"
        expiry = asyncio.get_running_loop().call_later(self._ttl_s, self._expire, ticket_id)
        self._held[ticket_id] = _PendingTransfer(kv_blocks(terms.layout, prompt_tokens), left.give_up, expiry)
        self._on_change()
        return KvTransferParams(
            version=params.TICKET_VERSION,
            ticket_id=ticket_id,
            engine=terms.engine,
            model=terms.model,
            layout=terms.layout,
            pairing=terms.pairing,
            holder=terms.holder,
            expires_at=time.time() + self._ttl_s,
            prompt_tokens=prompt_tokens,
            first_token_ids=token_ids(left.first_token_ids),
            first_logprobs=left.first_logprobs,
            transport=terms.transport,
            kv_bytes=kv_bytes(terms.layout, prompt_tokens),
            opaque=left.opaque,
        )

    def accept(self, request: GenerateRequest) -> KvTransferParams:
        """Return a decode call's ticket if it fits the call and this worker. Raises TransferMismatch naming the field,
        TransferExpired, or RequestRejected when the call has no ticket."""
        ticket, terms = ticket_of(request), self._terms
        params.check_params(
            ticket,
            engine=terms.engine,
            model=terms.model,
            layout=terms.layout,
            now=time.time(),
            pairing=terms.pairing,
        )
        if ticket.prompt_tokens != len(request.token_ids):
            raise TransferMismatch(
                f"ticket {ticket.ticket_id}: prompt_tokens is {ticket.prompt_tokens} at prefill and "
                f"{len(request.token_ids)} at decode",
                field="prompt_tokens",
            )
        if not ticket.first_token_ids:
            raise TransferMismatch(f"ticket {ticket.ticket_id} has no first token", field="first_token_ids")
        return ticket

    def let_go(self, ticket_id: str, outcome: ReleaseOutcome) -> None:
        """Release a ticket; an unknown one is no error. KV that was not fetched is dropped in the engine, if it can."""
        held = self._held.pop(ticket_id, None)
        if held is None:
            return
        held.expiry.cancel()
        if outcome is ReleaseOutcome.REFUSED:
            held.give_up()
        self._on_change()

    def _expire(self, ticket_id: str) -> None:
        _log.warning("ticket %s expired after %.0f s: no decode worker reported a fetch", ticket_id, self._ttl_s)
        self.let_go(ticket_id, ReleaseOutcome.REFUSED)

    def close(self) -> None:
        """Forgets all tickets; the engine, and their KV with it, is about to go."""
        for held in self._held.values():
            held.expiry.cancel()
        self._held.clear()
        self._on_change()


def ticket_of(request: GenerateRequest) -> KvTransferParams:
    if request.ticket is None:
        raise RequestRejected("a decode call needs a ticket", field="ticket")
    return request.ticket


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine tells the decode engines of its own kind: a form of its own adds its fields."""

    version: int  # of the form
    release: str  # of the library, for people: the rule is in the ticket's pairing


F = TypeVar("F", bound=EngineState)


def decode_state(ticket: KvTransferParams, form: type[F], version: int) -> F:
    """Raises TransferMismatch where it is of another form or version."""
    try:
        opaque = codec.decode(ticket.opaque, form)
    except BadFrame as exc:
        raise TransferMismatch(f"ticket {ticket.ticket_id} is not one of this engine's: {exc}", field="opaque") from exc
    if opaque.version != version:
        raise TransferMismatch(
            f"ticket {ticket.ticket_id}: opaque.version is {opaque.version} at prefill and {version} at decode; "
            "run one version of dynamo_trtllm",
            field="opaque.version",
        )
    return opaque


def kv_blocks(layout: KvLayout, tokens: int) -> int:
    return -(-tokens // layout.block_tokens)


def kv_bytes(layout: KvLayout, tokens: int) -> int:
    """Of whole blocks, all ranks together; as the layout says, so sliding windows are not taken off."""
    per_token = 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim * _ITEM_BYTES.get(layout.dtype, 2)
    return kv_blocks(layout, tokens) * layout.block_tokens * per_token
