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
    prefill_instance_id: int
    model: str
    layout: KvLayout
    kv_compat: Mapping[str, str]
    transport: str  # for people: a ticket from another one is as good


class PrefillResult(NamedTuple):
    """The result of a prefill call."""

    first_token_ids: Sequence[int]
    first_logprobs: tuple[TokenLogprob, ...]
    engine_state: bytes
    abort: Callable[[], None]  # asks the engine to drop the KV when no decode worker fetched it


class _PendingTransfer(NamedTuple):
    kv_blocks: int
    abort: Callable[[], None]
    expiry: asyncio.TimerHandle


class PendingTransfers:
    """`on_change` is called whenever the number of tickets held has changed."""

    def __init__(self, identity: TransferIdentity, *, ttl_s: float, on_change: Callable[[], None]) -> None:
        self._identity = identity
        self._ttl_s = ttl_s
        self._on_change = on_change
        self._numbers = itertools.count(1)
        self._awaiting_fetch: dict[str, _PendingTransfer] = {}

    def __len__(self) -> int:
        return len(self._awaiting_fetch)

    @property
    def kv_blocks(self) -> int:
        """Of all tickets held, by their prompts: the library does not tell."""
        return sum(pending.kv_blocks for pending in self._awaiting_fetch.values())

    def create(self, request: GenerateRequest, result: PrefillResult) -> KvTransferParams:
        """A ticket, held from now on."""
        identity, prompt_tokens = self._identity, len(request.token_ids)
        ticket_id = f"{identity.prefill_instance_id:x}-{next(self._numbers)}"
        expiry = asyncio.get_running_loop().call_later(self._ttl_s, self._expire, ticket_id)
        self._awaiting_fetch[ticket_id] = _PendingTransfer(
            kv_blocks(identity.layout, prompt_tokens), result.abort, expiry
        )
        self._on_change()
        return KvTransferParams(
            version=params.TICKET_VERSION,
            ticket_id=ticket_id,
            engine=identity.engine,
            model=identity.model,
            layout=identity.layout,
            kv_compat=identity.kv_compat,
            prefill_instance_id=identity.prefill_instance_id,
            expires_at=time.time() + self._ttl_s,
            prompt_tokens=prompt_tokens,
            first_token_ids=token_ids(result.first_token_ids),
            first_logprobs=result.first_logprobs,
            transport=identity.transport,
            kv_bytes=kv_bytes(identity.layout, prompt_tokens),
            engine_state=result.engine_state,
        )

    def validate(self, request: GenerateRequest) -> KvTransferParams:
        """Return a decode call's ticket if it fits the call and this worker. Raises TransferMismatch naming the field,
        TransferExpired, or RequestRejected when the call has no ticket."""
        ticket, identity = ticket_of(request), self._identity
        params.check_params(
            ticket,
            engine=identity.engine,
            model=identity.model,
            layout=identity.layout,
            now=time.time(),
            kv_compat=identity.kv_compat,
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

    def release(self, ticket_id: str, outcome: ReleaseOutcome) -> None:
        """Release a ticket; an unknown one is no error. KV that was not fetched is dropped in the engine, if it can."""
        pending = self._awaiting_fetch.pop(ticket_id, None)
        if pending is None:
            return
        pending.expiry.cancel()
        if outcome is ReleaseOutcome.ABORTED:
            pending.abort()
        self._on_change()

    def _expire(self, ticket_id: str) -> None:
        _log.warning("ticket %s expired after %.0f s: no decode worker reported a fetch", ticket_id, self._ttl_s)
        self.release(ticket_id, ReleaseOutcome.ABORTED)

    def close(self) -> None:
        """Forgets all tickets; the engine, and their KV with it, is about to go."""
        for pending in self._awaiting_fetch.values():
            pending.expiry.cancel()
        self._awaiting_fetch.clear()
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
        engine_state = codec.decode(ticket.engine_state, form)
    except BadFrame as exc:
        raise TransferMismatch(f"ticket {ticket.ticket_id} is not one of this engine's: {exc}", field="opaque") from exc
    if engine_state.version != version:
        raise TransferMismatch(
            f"ticket {ticket.ticket_id}: opaque.version is {engine_state.version} at prefill and {version} at decode; "
            "run one version of dynamo_trtllm",
            field="opaque.version",
        )
    return engine_state


def kv_blocks(layout: KvLayout, tokens: int) -> int:
    return -(-tokens // layout.block_tokens)


def kv_bytes(layout: KvLayout, tokens: int) -> int:
    """Of whole blocks, all ranks together; as the layout says, so sliding windows are not taken off."""
    per_token = 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim * _ITEM_BYTES.get(layout.dtype, 2)
    return kv_blocks(layout, tokens) * layout.block_tokens * per_token
