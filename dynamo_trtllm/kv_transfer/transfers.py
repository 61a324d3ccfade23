"""Own the KV transfers of one engine over a backend: what is published, until when, and what its memory is freed by.

A transfer is pending until a decode worker has fetched its KV, until it is released, or until it expires.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.kv_transfer.base import (
    TRANSFER_PARAMS_VERSION,
    Destination,
    FetchLimits,
    MemoryRegion,
    TransferBackend,
    fetch,
    request_params,
)
from dynamo_trtllm.messages import Chunk, FinishReason, GenerateRequest, KvLayout, KvTransferParams, PhaseTimings
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent

log = logging.getLogger(__name__)


class PublishedKv(NamedTuple):
    """The KV of one prompt, as an engine publishes it."""

    regions: Sequence[MemoryRegion]
    layout: KvLayout
    engine_state: Callable[[bytes], bytes]  # returns the engine's part of the parameters from the backend's offer
    on_unpublished: Callable[[], None]  # called once the memory is no longer read, also if `publish` fails
    timings: Callable[[], PhaseTimings]  # returns those of the call; called once it is published
    ready: int | None = None  # see `TransferBackend.publish`


class _PublishedTransfer(NamedTuple):
    request_id: str
    prompt_tokens: int
    expiry: asyncio.TimerHandle
    on_unpublished: Callable[[], None]


class KvTransfers:
    """The KV transfers of one engine. It owns its backend, and is the `KvHolder` of the engine's streams.

    Args:
        backend: moves the KV.
        engine: kind of the engine.
        model: name of its model.
        prefill_instance_id: id of its worker.
        ttl_s: seconds until a transfer expires.
        timeout_s: longest fetch in seconds. The request's deadline and the expiry may be earlier.
    """

    def __init__(
        self,
        backend: TransferBackend,
        *,
        engine: str,
        model: str,
        prefill_instance_id: int,
        ttl_s: float,
        timeout_s: float,
    ) -> None:
        self.backend = backend
        self._engine = engine
        self._model = model
        self._instance_id = prefill_instance_id
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._pending: dict[str, _PublishedTransfer] = {}
        self._unpublishing: set[asyncio.Task[None]] = set()

    @property
    def prompt_tokens(self) -> list[int]:
        """The length of the prompt of each pending transfer."""
        return [each.prompt_tokens for each in self._pending.values()]

    async def publish(self, request: GenerateRequest, first: Chunk, kv: PublishedKv) -> Chunk:
        """Publish the KV of a prompt.

        Args:
            request: the prefill call.
            first: the first output token.
            kv: the KV. From this call on, this object decides when its memory is free, also if the call fails.

        Returns:
            The terminal chunk of the call, with KV transfer parameters.
        """
        transfer_id = f"{self._instance_id:x}-{next(self._numbers)}"
        expires_at = time.time() + self._ttl_s
        expiry = asyncio.get_running_loop().call_later(self._ttl_s, self._expire, transfer_id)
        prompt_tokens = len(request.token_ids)
        self._pending[transfer_id] = _PublishedTransfer(request.request_id, prompt_tokens, expiry, kv.on_unpublished)
        try:
            offer = await self.backend.publish(transfer_id, kv.regions, ready=kv.ready)
        except BaseException:  # also if cancelled: the backend may have published this memory
            self.release(transfer_id)
            raise
        kv_params = KvTransferParams(
            version=TRANSFER_PARAMS_VERSION,
            transfer_id=transfer_id,
            engine=self._engine,
            model=self._model,
            layout=kv.layout,
            prefill_instance_id=self._instance_id,
            expires_at=expires_at,
            prompt_tokens=prompt_tokens,
            first_token_ids=first.token_ids,
            first_logprobs=first.logprobs,
            transport=self.backend.name,
            kv_bytes=sum(region.num_bytes for region in kv.regions),
            engine_state=kv.engine_state(offer),
        )
        RECORDER.record(request.request_id, RecordedEvent.KV_PUBLISHED, kv_params.kv_bytes)
        stats = msgspec.structs.replace(kv.timings(), kv_bytes=kv_params.kv_bytes, transport=kv_params.transport)
        return Chunk(finish_reason=FinishReason.KV_TRANSFER, kv_params=kv_params, stats=stats)

    def validate(self, request: GenerateRequest, layout: KvLayout, *, kv_bytes: int) -> KvTransferParams:
        """Return the KV transfer parameters of a decode call if they match the call and this engine.

        Raises as `base.request_params`.
        """
        return request_params(request, engine=self._engine, model=self._model, layout=layout, kv_bytes=kv_bytes)

    async def fetch(self, request: GenerateRequest, kv_params: KvTransferParams, offer: bytes, to: Destination) -> None:
        """Read the KV of a prompt. Raises as `base.fetch`."""
        name, holder = request.request_id, kv_params.prefill_instance_id
        RECORDER.record(name, RecordedEvent.KV_FETCH_STARTED, holder, kv_params.kv_bytes)
        await fetch(self.backend, kv_params, offer, to, FetchLimits(request.deadline, self._timeout_s))
        RECORDER.record(name, RecordedEvent.KV_FETCHED)

    def release(self, transfer_id: str) -> None:
        """End a transfer. Unknown and ended transfers are ignored."""
        self._end(transfer_id, RecordedEvent.KV_RELEASED)

    def _end(self, transfer_id: str, event: RecordedEvent) -> None:
        ended = self._pending.pop(transfer_id, None)
        if ended is None:
            return
        RECORDER.record(ended.request_id, event)
        ended.expiry.cancel()
        task = asyncio.get_running_loop().create_task(
            self._unpublish(transfer_id, ended), name=f"unpublish-{transfer_id}"
        )
        self._unpublishing.add(task)
        task.add_done_callback(self._unpublishing.discard)

    def is_pending(self, transfer_id: str) -> bool:
        """Return whether a transfer is neither released nor expired."""
        return transfer_id in self._pending

    def _expire(self, transfer_id: str) -> None:
        log.warning("KV transfer %s expired after %.0f s without a fetch; freeing its KV", transfer_id, self._ttl_s)
        self._end(transfer_id, RecordedEvent.KV_EXPIRED)

    async def _unpublish(self, transfer_id: str, ended: _PublishedTransfer) -> None:
        try:
            await self.backend.unpublish(transfer_id)
        except DynamoError as exc:
            log.warning("KV transfer %s: unpublishing failed: %s", transfer_id, exc)
        finally:
            ended.on_unpublished()

    async def aclose(self) -> None:
        """End all transfers, then close the backend."""
        for transfer_id in list(self._pending):
            self.release(transfer_id)
        await asyncio.gather(*self._unpublishing)
        await self.backend.aclose()
