"""Where tickets are written, counted and redeemed, on the event loop.

TensorRT-LLM does not tell when a decode engine has fetched a request's KV: what is held here is what the pipeline
has not released yet, and what has not expired.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from dynamo_trtllm.engines.pending_transfers import PendingTransfers, PrefillResult, TransferIdentity
from dynamo_trtllm.engines.trtllm import transfer_params as wire
from dynamo_trtllm.engines.trtllm.bindings import Capabilities
from dynamo_trtllm.messages import GenerateRequest, KvTransferParams, TokenLogprob

_COUNTER_BITS = 20
_GLOBAL = 1 << 62  # keeps our ids apart from those that an engine counts itself


class TrtllmTransfers(PendingTransfers):
    """`capabilities`: of the installed release."""

    def __init__(
        self, terms: TransferIdentity, capabilities: Capabilities, *, ttl_s: float, on_change: Callable[[], None]
    ) -> None:
        super().__init__(terms, ttl_s=ttl_s, on_change=on_change)
        self._capabilities = capabilities
        self._requests = itertools.count(1)

    def context_params(self) -> dict[str, Any]:
        """Arguments of the context-only call's DisaggregatedParams."""
        params: dict[str, Any] = {"request_type": "context_only"}
        if "disagg_request_id" in self._capabilities.disagg_fields:
            params["disagg_request_id"] = self._disagg_request_id()
        return params

    def _disagg_request_id(self) -> int:
        """Unique in the cluster: 42 bits of the instance id, which is random, and a counter; never time or pid."""
        count = next(self._requests) & ((1 << _COUNTER_BITS) - 1)
        return _GLOBAL | (self._terms.holder << _COUNTER_BITS) & (_GLOBAL - 1) | count

    def hand_out(
        self,
        request: GenerateRequest,
        params: Mapping[str, Any],
        logprobs: tuple[TokenLogprob, ...],
        give_up: Callable[[], None],
    ) -> KvTransferParams:
        """Return a ticket for a context-only call's KV. `give_up`: asks the engine to drop KV that is not fetched."""
        opaque = wire.pack(params, release=self._capabilities.release)
        return self.write(request, PrefillResult(params["first_gen_tokens"][:1], logprobs, opaque, give_up))

    def redeem(self, request: GenerateRequest, logprob: Callable[..., Any] | None) -> dict[str, Any]:
        """Arguments of the generation-only call's DisaggregatedParams. Raises TransferMismatch or TransferExpired."""
        params = wire.unpack(self.accept(request), known=self._capabilities.disagg_fields, logprob=logprob)
        return params | {"request_type": "generation_only"}
