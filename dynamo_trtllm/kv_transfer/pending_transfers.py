"""Manage the KV transfers of one engine: begin, publish, fetch, end and expire them.

A transfer is pending until a decode worker has fetched its KV, until the transfer is released, or
until it expires.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.kv_transfer.guard import TransferGuard
from dynamo_trtllm.kv_transfer.memory import MemoryRegion
from dynamo_trtllm.kv_transfer.transfer_backend import (
    TRANSFER_PARAMS_VERSION,
    Destination,
    TransferBackend,
    TransferIdentity,
    check_params,
    first_deadline,
)
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent
from dynamo_trtllm.protocol.clocks import SYSTEM_CLOCKS, Clocks
from dynamo_trtllm.protocol.errors import (
    DynamoError,
    RequestRejected,
    TransferExpired,
    TransferMismatch,
    TransferTimeout,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    GenerateRequest,
    KvLayout,
    KvTransferParams,
    ReleaseOutcome,
)

log = logging.getLogger(__name__)

_ID_BYTES = 16  # size of the random part of a transfer id

OnEnd: TypeAlias = Callable[[ReleaseOutcome | None], None]
"""A callback for the end of a transfer. None: the transfer has expired."""


class _PendingTransfer(NamedTuple):
    request_id: str
    prompt_tokens: int
    expiry: asyncio.TimerHandle
    on_end: OnEnd


class PendingTransfers:
    """The pending KV transfers of one engine. All methods are called on the event loop.

    Args:
        identity: the part of the parameters that all transfers of the engine have in common.
        ttl_s: seconds until a transfer expires.
        clocks: the clocks of the process.
    """

    def __init__(
        self, identity: TransferIdentity, *, ttl_s: float, clocks: Clocks = SYSTEM_CLOCKS
    ) -> None:
        self.identity = identity
        self._epoch = clocks.epoch
        self._ttl_s = ttl_s
        self._pending: dict[str, _PendingTransfer] = {}

    @property
    def prompt_tokens(self) -> list[int]:
        """The length of the prompt of each pending transfer."""
        return [transfer.prompt_tokens for transfer in self._pending.values()]

    def add(
        self, request: GenerateRequest, first: Chunk, kv_bytes: int, on_end: OnEnd
    ) -> KvTransferParams:
        """Begin the transfer of a prefill call. The transfer is pending from now on.

        Args:
            request: the call.
            first: the first output token.
            kv_bytes: size of the KV.
            on_end: called once, at the end of the transfer.

        Returns:
            The KV transfer parameters, without engine state.
        """
        # The id is secret, because a worker that knows it can release the transfer and read its KV.
        transfer_id = f"{self.identity.prefill_instance_id:x}-{secrets.token_hex(_ID_BYTES)}"
        expiry = asyncio.get_running_loop().call_later(self._ttl_s, self._expire, transfer_id)
        prompt_tokens = len(request.token_ids)
        self._pending[transfer_id] = _PendingTransfer(
            request.request_id, prompt_tokens, expiry, on_end
        )
        return KvTransferParams(
            version=TRANSFER_PARAMS_VERSION,
            transfer_id=transfer_id,
            expires_at=self._epoch() + self._ttl_s,
            prompt_tokens=prompt_tokens,
            first_token_ids=first.token_ids,
            first_logprobs=first.logprobs,
            kv_bytes=kv_bytes,
            engine_state=b"",
            **self.identity._asdict(),
        )

    def validate(
        self, request: GenerateRequest, *, kv_bytes: int | None = None
    ) -> KvTransferParams:
        """Check that the KV transfer parameters of a decode call fit the call and this engine.

        Args:
            request: the call.
            kv_bytes: size of the prompt's KV, or None if the size may differ.

        Returns:
            The KV transfer parameters.

        Raises:
            RequestRejected: the call has no KV transfer parameters.
            TransferExpired: the transfer has expired.
            TransferMismatch: a field differs. The error names it.
        """
        kv_params = request.kv_params
        if kv_params is None:
            raise RequestRejected("a decode call needs KV transfer parameters", field="kv_params")
        check_params(kv_params, self.identity, now=self._epoch())
        _require_equal(kv_params, "prompt_tokens", len(request.token_ids))
        if kv_bytes is not None:
            _require_equal(kv_params, "kv_bytes", kv_bytes)
        if not kv_params.first_token_ids:
            raise TransferMismatch(
                f"KV transfer {kv_params.transfer_id} has no first token", field="first_token_ids"
            )
        return kv_params

    def release(self, transfer_id: str, outcome: ReleaseOutcome = ReleaseOutcome.FETCHED) -> None:
        """End a transfer. Unknown and ended transfers are ignored."""
        self._end(transfer_id, outcome)

    def _end(self, transfer_id: str, outcome: ReleaseOutcome | None) -> None:
        """End a transfer if it is pending. If the transfer has expired, `outcome` is None."""
        ended = self._pending.pop(transfer_id, None)
        if ended is None:
            return
        event = RecordedEvent.KV_EXPIRED if outcome is None else RecordedEvent.KV_RELEASED
        RECORDER.record(ended.request_id, event)
        ended.expiry.cancel()
        ended.on_end(outcome)

    def is_pending(self, transfer_id: str) -> bool:
        """Return whether a transfer is neither released nor expired."""
        return transfer_id in self._pending

    def _expire(self, transfer_id: str) -> None:
        log.warning(
            "KV transfer %s expired after %.0f s without a fetch; check the decode workers",
            transfer_id,
            self._ttl_s,
        )
        self._end(transfer_id, None)


def _require_equal(kv_params: KvTransferParams, name: str, ours: int) -> None:
    """Raise TransferMismatch if a number in the parameters is not `ours`."""
    theirs = getattr(kv_params, name)
    if theirs != ours:
        raise TransferMismatch(
            f"KV transfer {kv_params.transfer_id}: {name} is {theirs} at prefill and {ours}"
            " at decode; retry the request",
            field=name,
        )


class KvTransfers(PendingTransfers):
    """The KV transfers of an engine over a backend.

    This object is the `KvHolder` of the engine's streams.

    Args:
        backend: moves the KV. This object owns the backend.
        config: the configuration of the worker.
        engine: name of the engine.
        instance_id: id of the worker.
        layout: the layout of the KV of the engine.
        clocks: the clocks of the process.
    """

    def __init__(
        self,
        backend: TransferBackend,
        config: WorkerConfig,
        *,
        engine: str,
        instance_id: int,
        layout: KvLayout,
        clocks: Clocks = SYSTEM_CLOCKS,
    ) -> None:
        identity = TransferIdentity(
            engine, instance_id, config.model_name, layout, kv_compat={}, transport=backend.name
        )
        super().__init__(identity, ttl_s=config.kv_transfer_ttl_s, clocks=clocks)
        self.backend = backend
        self._guard = TransferGuard()
        self._timeout_s = config.kv_fetch_timeout_s
        self._unpublishing: set[asyncio.Task[None]] = set()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses to which readers connect, or () if the backend does not know them."""
        return (self.backend.address,) if self.backend.address else ()

    def use_guard(self, guard: TransferGuard) -> None:
        """From now on, let `guard` check the addresses of fetches and the readers of KV."""
        self._guard = guard
        self.backend.guard = guard

    async def publish(
        self,
        request: GenerateRequest,
        first: Chunk,
        regions: Sequence[MemoryRegion],
        on_unpublished: Callable[[], None],
        *,
        ready: int | None = None,
    ) -> KvTransferParams:
        """Publish the KV of a prompt.

        Args:
            request: the prefill call.
            first: the first output token.
            regions: the KV.
            on_unpublished: called once, when the memory is no longer read. This is also called if
                publishing fails.
            ready: see `TransferBackend.publish`.

        Returns:
            The KV transfer parameters. Their engine state is the offer of the backend.
        """
        kv_bytes = sum(region.num_bytes for region in regions)

        def on_end(_: ReleaseOutcome | None) -> None:
            # A transfer ends after `add` has returned, so `kv_params` is set.
            self._begin_unpublish(kv_params.transfer_id, on_unpublished)

        kv_params = self.add(request, first, kv_bytes, on_end)
        try:
            offer = await self.backend.publish(kv_params.transfer_id, regions, ready=ready)
        except BaseException:
            # If this call was cancelled, the backend may have published the memory.
            self.release(kv_params.transfer_id, ReleaseOutcome.ABORTED)
            raise
        RECORDER.record(request.request_id, RecordedEvent.KV_PUBLISHED, kv_bytes)
        return msgspec.structs.replace(kv_params, engine_state=offer)

    async def fetch(self, request: GenerateRequest, offer: bytes, to: Destination) -> None:
        """Read the KV of a decode call's prompt.

        The fetch ends at the deadline of the request, at the expiry of the transfer, or after the
        longest fetch time, whichever comes first.

        Raises:
            DeadlineExceeded: the request's deadline passed.
            TransferTimeout: the fetch took too long.
            TransferExpired: the transfer expired before the fetch could start.
            TransferRejected: the prefill worker has not registered the address in the offer.
            TransferFailed: the read failed.
        """
        kv_params = request.kv_params
        assert kv_params is not None
        await self._check_address(kv_params, offer)
        RECORDER.record(
            request.request_id,
            RecordedEvent.KV_FETCH_STARTED,
            kv_params.prefill_instance_id,
            kv_params.kv_bytes,
        )
        deadline = first_deadline(kv_params, request.deadline, self._timeout_s, self._epoch())
        if deadline.left_s <= 0:
            # A frontend counts a TransferTimeout as a fault of the pair of workers. Here the pair
            # is not at fault: the read has not begun, because this worker had no space in time.
            if deadline.error is TransferTimeout:
                raise TransferExpired(
                    f"KV transfer {kv_params.transfer_id} expired before this worker had space for"
                    " its KV"
                )
            raise deadline.error(deadline.message)
        try:
            await self.backend.read(kv_params.transfer_id, offer, to, timeout_s=deadline.left_s)
        except TransferTimeout as exc:
            raise deadline.error(deadline.message) from exc
        RECORDER.record(request.request_id, RecordedEvent.KV_FETCHED)

    async def _check_address(self, kv_params: KvTransferParams, offer: bytes) -> None:
        address = self.backend.address_in(offer, kv_params.transfer_id)
        # The address is "" if a library chooses it.
        if address:
            await self._guard.check_address(kv_params, address)

    def _begin_unpublish(self, transfer_id: str, on_unpublished: Callable[[], None]) -> None:
        unpublish = self._unpublish(transfer_id, on_unpublished)
        task = asyncio.get_running_loop().create_task(unpublish, name=f"unpublish-{transfer_id}")
        self._unpublishing.add(task)
        task.add_done_callback(self._unpublishing.discard)

    async def _unpublish(self, transfer_id: str, on_unpublished: Callable[[], None]) -> None:
        try:
            await self.backend.unpublish(transfer_id)
        except DynamoError as exc:
            log.warning("KV transfer %s: unpublishing failed: %s", transfer_id, exc)
        except Exception:  # a bug in the backend, after which `aclose` must still close the backend
            log.exception("KV transfer %s: unpublishing failed", transfer_id)
        finally:
            on_unpublished()

    async def aclose(self) -> None:
        """End all transfers, then close the backend."""
        for transfer_id in list(self._pending):
            self.release(transfer_id, ReleaseOutcome.ABORTED)
        await asyncio.gather(*self._unpublishing)
        await self.backend.aclose()
