"""Count the KV transfers of engines whose library does not report fetched KV.

If a library keeps KV that no decode worker will fetch, the KV counts as held until the library
frees it. All methods run on the event loop.

This module also decodes the engine state in the KV transfer parameters.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from dynamo_trtllm.engines.external.library import LibraryCall
from dynamo_trtllm.kv_transfer.pending_transfers import PendingTransfers
from dynamo_trtllm.kv_transfer.transfer_backend import TransferIdentity
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent
from dynamo_trtllm.protocol.errors import BadFrame, TransferMismatch
from dynamo_trtllm.protocol.messages import (
    Chunk,
    GenerateRequest,
    KvLayout,
    KvTransferParams,
    ReleaseOutcome,
    decode,
)
from dynamo_trtllm.protocol.number_types import Count, ceil_div

# NVFP4 has 4 bits per value and a scale of 8 bits for every 16 values.
KV_ITEM_BYTES = {"fp8": 1.0, "fp8_ds_mla": 1.0, "int8": 1.0, "nvfp4": 0.5625, "float32": 4.0}


class _RetainedKv(NamedTuple):
    num_blocks: int
    expiry: asyncio.TimerHandle


class ExternalTransfers(PendingTransfers):
    """The KV transfers of a worker that are pending, and KV that the library still keeps."""

    def __init__(
        self, identity: TransferIdentity, *, ttl_s: float, on_change: Callable[[], None]
    ) -> None:
        """Initialize without transfers.

        Args:
            identity: the worker's own part of the parameters.
            ttl_s: seconds until a transfer expires.
            on_change: called when the number of transfers has changed.
        """
        super().__init__(identity, ttl_s=ttl_s)
        self._on_change = on_change
        self._numbers = itertools.count(1)
        # KV that no decode worker will fetch, by number.
        self._retained: dict[int, _RetainedKv] = {}
        self.leaked_kv_blocks = 0  # blocks that the library never frees

    def __len__(self) -> int:
        """Return the number of transfers whose KV is held and will be freed."""
        return len(self._pending) + len(self._retained)

    @property
    def kv_blocks(self) -> int:
        """The number of KV blocks of these transfers.

        The number is computed from the lengths of the prompts, because the library does not report
        it.
        """
        pending = sum(kv_blocks(self.identity.layout, tokens) for tokens in self.prompt_tokens)
        retained = sum(kv.num_blocks for kv in self._retained.values())
        return pending + retained

    def create(
        self, request: GenerateRequest, call: LibraryCall, first: Chunk, engine_state: bytes
    ) -> KvTransferParams:
        """Return KV transfer parameters for a prefill call and register the transfer as pending.

        Args:
            request: the request.
            call: its call, which has ended.
            first: the first output token.
            engine_state: the library's part of the parameters.
        """
        prompt_tokens = len(request.token_ids)
        num_bytes = kv_bytes(self.identity.layout, prompt_tokens)
        on_end = partial(self._on_end, call, prompt_tokens)
        kv_params = self.add(request, first, num_bytes, on_end)
        RECORDER.record(request.request_id, RecordedEvent.KV_PUBLISHED, num_bytes)
        self._on_change()
        return msgspec.structs.replace(kv_params, engine_state=engine_state)

    def _on_end(
        self, call: LibraryCall, prompt_tokens: int, outcome: ReleaseOutcome | None
    ) -> None:
        """Free the KV of a transfer that has ended, unless the KV was fetched.

        The outcome is None if the transfer has expired.
        """
        try:
            if outcome is not ReleaseOutcome.FETCHED:
                self.release_kv(call, prompt_tokens, has_expired=outcome is None)
        finally:
            self._on_change()

    def release_kv(
        self, call: LibraryCall, prompt_tokens: int, *, has_expired: bool = False
    ) -> None:
        """Free KV that no decode worker fetched.

        KV that the library frees later counts as held until then.

        Args:
            call: the prefill call.
            prompt_tokens: length of its prompt.
            has_expired: a decode worker whose clock is behind may still read the KV.
        """
        # None: the library does not keep the KV. Infinity: it keeps the KV for ever.
        kept_until_s = call.release_kv(has_expired=has_expired)
        if kept_until_s is None:
            return
        blocks = kv_blocks(self.identity.layout, prompt_tokens)
        if kept_until_s == math.inf:
            self.leaked_kv_blocks += blocks
            return
        number = next(self._numbers)
        left_s = max(0.0, kept_until_s - time.monotonic())
        expiry = asyncio.get_running_loop().call_later(left_s, self._forget, number)
        self._retained[number] = _RetainedKv(blocks, expiry)
        self._on_change()

    def _forget(self, number: int) -> None:
        del self._retained[number]
        self._on_change()

    def close(self) -> None:
        """Remove all transfers without releasing their KV: the engine is about to shut down."""
        for transfer in self._pending.values():
            transfer.expiry.cancel()
        for kv in self._retained.values():
            kv.expiry.cancel()
        self._pending.clear()
        self._retained.clear()
        self._on_change()


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """Data from a prefill engine for a decode engine of the same kind.

    Each engine's subclass adds fields.
    """

    version: Count  # version of the format of the subclass
    # Release of the library, for information: kv_compat decides whether two workers match.
    release: str


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
            f"KV transfer {kv_params.transfer_id}: its engine state can't be decoded: {exc}",
            field="opaque",
        ) from exc
    if engine_state.version != version:
        raise TransferMismatch(
            f"KV transfer {kv_params.transfer_id}: opaque.version is {engine_state.version} at"
            f" prefill and {version} at decode; run one version of dynamo_trtllm on both",
            field="opaque.version",
        )
    return engine_state


def kv_blocks(layout: KvLayout, tokens: int) -> int:
    """Return the number of KV blocks of a prompt."""
    return ceil_div(tokens, layout.block_tokens)


def kv_bytes(layout: KvLayout, tokens: int) -> int:
    """Return the KV bytes of a prompt in full blocks, summed over all ranks.

    Sliding windows, which save KV, are ignored.
    """
    item_bytes = KV_ITEM_BYTES.get(layout.dtype, 2.0)
    # The factor of 2 is for keys and values.
    bytes_per_token = 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim * item_bytes
    return round(kv_blocks(layout, tokens) * layout.block_tokens * bytes_per_token)
