"""Create, validate and release KV transfer parameters for engines whose library does not report fetched KV.

A transfer is pending until the frontend's pipeline releases it or it expires. If the library then keeps its KV for
longer, the KV counts as held until the library frees it. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from dynamo_trtllm.errors import BadFrame, TransferMismatch
from dynamo_trtllm.kv_transfer import base
from dynamo_trtllm.messages import (
    GenerateRequest,
    KvLayout,
    KvTransferParams,
    ReleaseOutcome,
    TokenLogprob,
    decode,
    token_ids,
)
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent

_log = logging.getLogger(__name__)
# NVFP4 has 4 bits per value and a scale of 8 bits for every 16 values.
KV_ITEM_BYTES = {"fp8": 1.0, "fp8_ds_mla": 1.0, "int8": 1.0, "nvfp4": 0.5625, "float32": 4.0}


class TransferIdentity(NamedTuple):
    """The worker's own fields of KV transfer parameters, which the parameters that it receives must match."""

    engine: str
    prefill_instance_id: int
    model: str
    layout: KvLayout
    kv_compat: Mapping[str, str]
    transport: str  # informational; not compared


class ReleaseLibraryKv(Protocol):
    """`LibraryCall.release_kv` of one call."""

    def __call__(self, *, has_expired: bool) -> float | None: ...


class PrefillResult(NamedTuple):
    """The result of a prefill call."""

    first_token_ids: Sequence[int]
    first_logprobs: tuple[TokenLogprob, ...]
    engine_state: bytes
    release_kv: ReleaseLibraryKv


class _PendingTransfer(NamedTuple):
    request_id: str
    prompt_tokens: int
    release_kv: ReleaseLibraryKv
    expiry: asyncio.TimerHandle


class _RetainedKv(NamedTuple):
    """KV that no decode worker will fetch and that the library still keeps."""

    kv_blocks: int
    end: asyncio.TimerHandle


class PendingTransfers:
    """The KV transfers of a worker that are neither released nor expired, and KV that the library still keeps."""

    def __init__(self, identity: TransferIdentity, *, ttl_s: float, on_change: Callable[[], None]) -> None:
        """Initialize without transfers.

        Args:
            identity: the worker's own fields of the parameters.
            ttl_s: seconds until a transfer expires.
            on_change: called when the number of transfers has changed.
        """
        self._identity = identity
        self._ttl_s = ttl_s
        self._on_change = on_change
        self._numbers = itertools.count(1)
        self._awaiting_fetch: dict[str, _PendingTransfer] = {}
        self._retained: dict[int, _RetainedKv] = {}
        self.kv_blocks = 0  # of these transfers, computed from their prompts: the library does not report them
        self.leaked_kv_blocks = 0  # that the library never frees

    def __len__(self) -> int:
        """Return the number of transfers whose KV is held and will be freed."""
        return len(self._awaiting_fetch) + len(self._retained)

    def _blocks(self, prompt_tokens: int) -> int:
        return kv_blocks(self._identity.layout, prompt_tokens)

    def create(self, request: GenerateRequest, result: PrefillResult) -> KvTransferParams:
        """Return KV transfer parameters for a prefill call and register the transfer as pending."""
        identity, prompt_tokens = self._identity, len(request.token_ids)
        transfer_id = f"{identity.prefill_instance_id:x}-{next(self._numbers)}"
        expiry = asyncio.get_running_loop().call_later(self._ttl_s, self._expire, transfer_id)
        self._awaiting_fetch[transfer_id] = _PendingTransfer(
            request.request_id, prompt_tokens, result.release_kv, expiry
        )
        self.kv_blocks += self._blocks(prompt_tokens)
        num_bytes = kv_bytes(identity.layout, prompt_tokens)
        RECORDER.record(request.request_id, RecordedEvent.KV_PUBLISHED, num_bytes)
        self._on_change()
        return KvTransferParams(
            version=base.TRANSFER_PARAMS_VERSION,
            transfer_id=transfer_id,
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
            kv_bytes=num_bytes,
            engine_state=result.engine_state,
        )

    def validate(self, request: GenerateRequest) -> KvTransferParams:
        """Return the KV transfer parameters of a decode call if they match the call and this worker.

        Raises:
            RequestRejected: the call has no KV transfer parameters.
            TransferExpired: the transfer has expired.
            TransferMismatch: names the field that differs.
        """
        identity = self._identity
        return base.request_params(
            request,
            engine=identity.engine,
            model=identity.model,
            layout=identity.layout,
            kv_compat=identity.kv_compat,
        )

    def release(self, transfer_id: str, outcome: ReleaseOutcome) -> None:
        """Release a transfer; an unknown one is ignored. On ABORTED the engine frees the KV, if it can."""
        self._end(transfer_id, is_fetched=outcome is not ReleaseOutcome.ABORTED, has_expired=False)

    def _end(self, transfer_id: str, *, is_fetched: bool, has_expired: bool) -> None:
        pending = self._awaiting_fetch.pop(transfer_id, None)
        if pending is None:
            return
        event = RecordedEvent.KV_EXPIRED if has_expired else RecordedEvent.KV_RELEASED
        RECORDER.record(pending.request_id, event)
        pending.expiry.cancel()
        self.kv_blocks -= self._blocks(pending.prompt_tokens)
        try:
            if not is_fetched:
                self.release_kv(pending.release_kv, pending.prompt_tokens, has_expired=has_expired)
        finally:
            self._on_change()

    def release_kv(self, release_kv: ReleaseLibraryKv, prompt_tokens: int, *, has_expired: bool = False) -> None:
        """Free KV that no decode worker fetched. KV that the library frees later counts as held until then.

        Args:
            release_kv: of the prefill call.
            prompt_tokens: length of its prompt.
            has_expired: a decode worker whose clock is behind may still read the KV.
        """
        until = release_kv(has_expired=has_expired)
        if until is None:
            return
        if until == math.inf:
            self.leaked_kv_blocks += self._blocks(prompt_tokens)
            return
        number = next(self._numbers)
        end = asyncio.get_running_loop().call_later(max(0.0, until - time.monotonic()), self._forget, number)
        self._retained[number] = _RetainedKv(self._blocks(prompt_tokens), end)
        self.kv_blocks += self._retained[number].kv_blocks
        self._on_change()

    def _forget(self, number: int) -> None:
        self.kv_blocks -= self._retained.pop(number).kv_blocks
        self._on_change()

    def is_pending(self, transfer_id: str) -> bool:
        """Return whether a transfer is neither released nor expired."""
        return transfer_id in self._awaiting_fetch

    def _expire(self, transfer_id: str) -> None:
        _log.warning(
            "KV transfer %s expired after %.0f s without a fetch; check the decode workers", transfer_id, self._ttl_s
        )
        self._end(transfer_id, is_fetched=False, has_expired=True)

    def close(self) -> None:
        """Remove all transfers without releasing their KV: the engine is about to shut down."""
        for pending in self._awaiting_fetch.values():
            pending.expiry.cancel()
        for retained in self._retained.values():
            retained.end.cancel()
        self._awaiting_fetch.clear()
        self._retained.clear()
        self.kv_blocks = 0
        self._on_change()


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """Data from a prefill engine for a decode engine of the same kind. Each engine's subclass adds fields."""

    version: int  # of the subclass's format
    release: str  # of the library; informational, because kv_compat decides whether two workers match


F = TypeVar("F", bound=EngineState)


def decode_state(kv_params: KvTransferParams, form: type[F], version: int) -> F:
    """Decode the engine state of KV transfer parameters.

    Args:
        kv_params: parameters from the prefill worker.
        form: struct type of the engine.
        version: version of that type.

    Raises:
        TransferMismatch: the state has another type or version.
    """
    try:
        engine_state = decode(kv_params.engine_state, form)
    except BadFrame as exc:
        raise TransferMismatch(
            f"KV transfer {kv_params.transfer_id}: its engine state can't be decoded: {exc}", field="opaque"
        ) from exc
    if engine_state.version != version:
        raise TransferMismatch(
            f"KV transfer {kv_params.transfer_id}: opaque.version is {engine_state.version} at prefill and "
            f"{version} at decode; run one version of dynamo_trtllm on both",
            field="opaque.version",
        )
    return engine_state


def kv_blocks(layout: KvLayout, tokens: int) -> int:
    """Return the number of KV blocks of a prompt."""
    return -(-tokens // layout.block_tokens)


def kv_bytes(layout: KvLayout, tokens: int) -> int:
    """Return the KV bytes of a prompt in full blocks, summed over all ranks, without savings of sliding windows."""
    per_token = 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim * KV_ITEM_BYTES.get(layout.dtype, 2.0)
    return round(kv_blocks(layout, tokens) * layout.block_tokens * per_token)
