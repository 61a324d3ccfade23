"""Where tickets are written, counted and redeemed, on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dynamo_trtllm.engines.outputs import EngineOutput
from dynamo_trtllm.engines.pending_transfers import PendingTransfers, PrefillResult, TransferIdentity
from dynamo_trtllm.engines.vllm import transfer_params as wire
from dynamo_trtllm.engines.vllm.requests import EXPIRES_AT, FetchedKv
from dynamo_trtllm.messages import GenerateRequest, KvTransferParams


class VllmTransfers(PendingTransfers):
    """`release`: vLLM's, for people."""

    def __init__(self, terms: TransferIdentity, release: str, *, ttl_s: float, on_change: Callable[[], None]) -> None:
        super().__init__(terms, ttl_s=ttl_s, on_change=on_change)
        self._release = release

    def hand_out(
        self,
        request: GenerateRequest,
        params: Mapping[str, Any] | None,
        step: EngineOutput,
        *,
        seed: int | None,
        give_up: Callable[[], None],
    ) -> KvTransferParams:
        """Return a ticket for a prefill call's KV. `give_up`: asks the engine to drop KV that is not fetched."""
        opaque = wire.pack(params, release=self._release, seed=seed if request.sampling.seed is None else None)
        return self.write(request, PrefillResult(step.token_ids[:1], step.logprobs[:1], opaque, give_up))

    def redeem(self, request: GenerateRequest) -> FetchedKv:
        """Raises TransferMismatch or TransferExpired."""
        ticket = self.accept(request)
        found = wire.unpack(ticket)
        params = found.params | {EXPIRES_AT: ticket.expires_at}
        return FetchedKv(first_token=ticket.first_token_ids[0], seed=found.seed, kv_transfer_params=params)
