"""Where tickets are written, counted and redeemed, on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec

from dynamo_trtllm import codec
from dynamo_trtllm.engines.external import EngineOutput
from dynamo_trtllm.engines.pending_transfers import (
    EngineState,
    PendingTransfers,
    PrefillResult,
    TransferIdentity,
    decode_state,
)
from dynamo_trtllm.engines.vllm.requests import EXPIRES_AT, FetchedKv
from dynamo_trtllm.errors import RequestRejected
from dynamo_trtllm.messages import GenerateRequest, KvTransferParams

ENGINE_STATE_VERSION = 1


class TransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """What NixlConnector's request_finished answers, as of connector version 4."""

    do_remote_prefill: bool
    do_remote_decode: bool
    remote_block_ids: list[list[int]]  # per group of layers with KV of one kind
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    tp_size: int
    remote_num_tokens: int = 0


class _VllmState(EngineState, frozen=True, kw_only=True):
    params: TransferParams
    seed: int | None = None  # of a request without one, where prefill and decode each sample the first token


def pack(params: Mapping[str, Any] | None, *, release: str, seed: int | None) -> bytes:
    """Raises RequestRejected when the connector answered nothing, or what can't travel."""
    if not params or not params.get("remote_block_ids"):
        raise RequestRejected(
            "vLLM's connector left nothing to hand over; see its log for NixlConnector", field="kv_transfer_config"
        )
    try:
        typed = msgspec.convert(params, TransferParams, strict=False)
    except msgspec.ValidationError as exc:
        raise RequestRejected(
            f"vLLM {release} answers kv_transfer_params of another form: {exc}", field="kv_transfer_config"
        ) from exc
    return codec.encode(_VllmState(version=ENGINE_STATE_VERSION, release=release, params=typed, seed=seed))


class Unpacked(msgspec.Struct, frozen=True, kw_only=True):
    params: dict[str, Any]  # plain, for `extra_args`
    seed: int | None


def unpack(ticket: KvTransferParams) -> Unpacked:
    """Raises TransferMismatch naming the field."""
    engine_state = decode_state(ticket, _VllmState, ENGINE_STATE_VERSION)
    return Unpacked(params=msgspec.structs.asdict(engine_state.params), seed=engine_state.seed)


class VllmTransfers(PendingTransfers):
    """`release`: vLLM's, for people."""

    def __init__(
        self, identity: TransferIdentity, release: str, *, ttl_s: float, on_change: Callable[[], None]
    ) -> None:
        super().__init__(identity, ttl_s=ttl_s, on_change=on_change)
        self._release = release

    def export_kv(
        self,
        request: GenerateRequest,
        params: Mapping[str, Any] | None,
        step: EngineOutput,
        *,
        seed: int | None,
        abort: Callable[[], None],
    ) -> KvTransferParams:
        """Return a ticket for a prefill call's KV. `abort`: asks the engine to drop KV that is not fetched."""
        engine_state = pack(params, release=self._release, seed=seed if request.sampling.seed is None else None)
        return self.create(request, PrefillResult(step.token_ids[:1], step.logprobs[:1], engine_state, abort))

    def import_kv(self, request: GenerateRequest) -> FetchedKv:
        """Raises TransferMismatch or TransferExpired."""
        ticket = self.validate(request)
        found = unpack(ticket)
        params = found.params | {EXPIRES_AT: ticket.expires_at}
        return FetchedKv(first_token=ticket.first_token_ids[0], seed=found.seed, kv_transfer_params=params)


_log = logging.getLogger(__name__)
_TRIES = 4
_AGAIN_S = 0.25
_GRACE_S = 1.0

Release = Callable[[list[str]], Awaitable[Iterable[Iterable[str]]]]  # ids -> per worker, those that it had


class KvReleaser:
    """`release` calls the workers."""

    def __init__(self, release: Release) -> None:
        self._release = release
        self._wanted: dict[str, int] = {}  # id -> how often it was asked for
        self._wake = asyncio.Event()
        self._again: set[asyncio.TimerHandle] = set()
        self._task: asyncio.Task[None] | None = None

    def post(self, request_id: str, tried: int = 0) -> None:
        self._wanted[request_id] = tried
        self._wake.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="vllm-reclaim")

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._wanted = self._wanted, {}
            try:
                released = await self._release(sorted(batch))
            except Exception as exc:  # noqa: BLE001  # vLLM wraps what fails in its workers in a bare one
                _log.warning("vLLM could not free the KV of %d requests: %s", len(batch), exc)
                continue
            found = {each for worker in released for each in worker}
            for request_id, tried in batch.items():
                if request_id not in found and tried + 1 < _TRIES:
                    self._later(request_id, tried + 1)

    def post_later(self, request_id: str) -> None:
        """Once a decode engine, which may read it until its ticket expires by its own clock, has surely let go."""
        self._later(request_id, 0, _GRACE_S)

    def _later(self, request_id: str, tried: int, wait_s: float = _AGAIN_S) -> None:
        def again() -> None:
            self._again.discard(handle)
            self.post(request_id, tried)

        handle = asyncio.get_running_loop().call_later(wait_s, again)
        self._again.add(handle)

    async def aclose(self) -> None:
        """Idempotent."""
        for handle in self._again:
            handle.cancel()
        self._again.clear()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
