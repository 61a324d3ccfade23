"""Where tickets are written, counted and redeemed, on the event loop.

TensorRT-LLM does not tell when a decode engine has fetched a request's KV: what is held here is what the pipeline
has not released yet, and what has not expired.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dynamo_trtllm import codec
from dynamo_trtllm.engines.pending_transfers import (
    EngineState,
    PendingTransfers,
    PrefillResult,
    TransferIdentity,
    decode_state,
)
from dynamo_trtllm.engines.trtllm.bindings import Capabilities
from dynamo_trtllm.errors import RequestRejected, TransferMismatch
from dynamo_trtllm.messages import GenerateRequest, KvTransferParams, TokenLogprob

ENGINE_STATE_VERSION = 1

# What a decode engine needs of the context engine's answer. Ids are 64 bits wide, the state is bytes: both travel as
# they are. Left out on purpose: the request type (each call's own), logits (never asked for), schedule_style
# (context first is the default) and ctx_usage (the frontend counts).
TRANSFERRED_FIELDS = (
    "first_gen_tokens",
    "first_gen_log_probs",
    "ctx_request_id",
    "opaque_state",
    "draft_tokens",
    "disagg_request_id",
    "ctx_dp_rank",
    "ctx_info_endpoint",
)
_NEEDED = ("first_gen_tokens", "ctx_request_id", "opaque_state")
_LOGPROB_KEYS = {"logprob", "rank"}


class _TrtllmState(EngineState, frozen=True, kw_only=True):
    params: dict[str, Any]


def transferred_fields(known: Iterable[str]) -> tuple[str, ...]:
    """What is taken from a context-only answer of a release that has these fields."""
    return tuple(name for name in TRANSFERRED_FIELDS if name in set(known))


def pack(params: Mapping[str, Any], *, release: str) -> bytes:
    """Raises RequestRejected when something a decode engine can't do without is missing, or can't travel."""
    missing = [name for name in _NEEDED if not params.get(name) and params.get(name) != 0]
    if missing:
        raise RequestRejected(
            f"TensorRT-LLM's context-only answer has no {', '.join(missing)}; set cache_transceiver_config.backend",
            field="cache_transceiver_config.backend",
        )
    plain = {name: _plain(name, value) for name, value in params.items() if value is not None}
    return codec.encode(_TrtllmState(version=ENGINE_STATE_VERSION, release=release, params=plain))


def unpack(ticket: KvTransferParams, *, known: Iterable[str], logprob: Callable[..., Any] | None) -> dict[str, Any]:
    """Arguments of DisaggregatedParams. `logprob` makes the vendor's log-probability objects, where it has them.

    Raises TransferMismatch naming the field.
    """
    engine_state = decode_state(ticket, _TrtllmState, ENGINE_STATE_VERSION)
    unknown = sorted(set(engine_state.params) - set(known))
    if unknown:
        raise TransferMismatch(
            f"ticket {ticket.ticket_id}: DisaggregatedParams of the decode worker's TensorRT-LLM lacks {unknown[0]}, "
            f"which prefill's {engine_state.release} sent; run one release on both",
            field=unknown[0],
        )
    missing = [name for name in _NEEDED if name not in engine_state.params]
    if missing:
        raise TransferMismatch(f"ticket {ticket.ticket_id} has no {missing[0]}", field=missing[0])
    return {name: _rebuilt(value, logprob) for name, value in engine_state.params.items()}


def _plain(name: str, value: Any) -> Any:
    """Numbers, text, bytes, and lists and mappings of them; a log-probability object becomes a mapping."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(name, each) for each in value]
    if isinstance(value, Mapping):
        return {key: _plain(name, each) for key, each in value.items()}
    if hasattr(value, "logprob"):
        return {"logprob": float(value.logprob), "rank": value.rank}
    raise RequestRejected(f"DisaggregatedParams.{name} holds a {type(value).__name__}, which can't travel", field=name)


def _rebuilt(value: Any, logprob: Callable[..., Any] | None) -> Any:
    if isinstance(value, list):
        return [_rebuilt(each, logprob) for each in value]
    if isinstance(value, dict):
        if logprob is not None and set(value) == _LOGPROB_KEYS:
            return logprob(**value)
        return {key: _rebuilt(each, logprob) for key, each in value.items()}
    return value


_COUNTER_BITS = 20
_GLOBAL = 1 << 62  # keeps our ids apart from those that an engine counts itself


class TrtllmTransfers(PendingTransfers):
    """`capabilities`: of the installed release."""

    def __init__(
        self, identity: TransferIdentity, capabilities: Capabilities, *, ttl_s: float, on_change: Callable[[], None]
    ) -> None:
        super().__init__(identity, ttl_s=ttl_s, on_change=on_change)
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
        return _GLOBAL | (self._identity.prefill_instance_id << _COUNTER_BITS) & (_GLOBAL - 1) | count

    def export_kv(
        self,
        request: GenerateRequest,
        params: Mapping[str, Any],
        logprobs: tuple[TokenLogprob, ...],
        abort: Callable[[], None],
    ) -> KvTransferParams:
        """Return a ticket for a context-only call's KV. `abort`: asks the engine to drop KV that is not fetched."""
        engine_state = pack(params, release=self._capabilities.release)
        return self.create(request, PrefillResult(params["first_gen_tokens"][:1], logprobs, engine_state, abort))

    def import_kv(self, request: GenerateRequest, logprob: Callable[..., Any] | None) -> dict[str, Any]:
        """Arguments of the generation-only call's DisaggregatedParams. Raises TransferMismatch or TransferExpired."""
        params = unpack(self.validate(request), known=self._capabilities.disagg_fields, logprob=logprob)
        return params | {"request_type": "generation_only"}
