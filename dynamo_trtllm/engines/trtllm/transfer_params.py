"""`DisaggregatedParams` to the opaque part of a ticket and back. Pure: plain values, no vendor objects.

Only names that the installed release knows are passed on; a ticket with others is refused, field by field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dynamo_trtllm import codec
from dynamo_trtllm.engines.pending_transfers import EngineState, decode_state
from dynamo_trtllm.errors import RequestRejected, TransferMismatch
from dynamo_trtllm.messages import KvTransferParams

OPAQUE_VERSION = 1

# What a decode engine needs of the context engine's answer. Ids are 64 bits wide, the state is bytes: both travel as
# they are. Left out on purpose: the request type (each call's own), logits (never asked for), schedule_style
# (context first is the default) and ctx_usage (the frontend counts).
CARRIED = (
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


def carried(known: Iterable[str]) -> tuple[str, ...]:
    """What is taken from a context-only answer of a release that has these fields."""
    return tuple(name for name in CARRIED if name in set(known))


def pack(params: Mapping[str, Any], *, release: str) -> bytes:
    """Raises RequestRejected when something a decode engine can't do without is missing, or can't travel."""
    missing = [name for name in _NEEDED if not params.get(name) and params.get(name) != 0]
    if missing:
        raise RequestRejected(
            f"TensorRT-LLM's context-only answer has no {', '.join(missing)}; set cache_transceiver_config.backend",
            field="cache_transceiver_config.backend",
        )
    plain = {name: _plain(name, value) for name, value in params.items() if value is not None}
    return codec.encode(_TrtllmState(version=OPAQUE_VERSION, release=release, params=plain))


def unpack(ticket: KvTransferParams, *, known: Iterable[str], logprob: Callable[..., Any] | None) -> dict[str, Any]:
    """Arguments of DisaggregatedParams. `logprob` makes the vendor's log-probability objects, where it has them.

    Raises TransferMismatch naming the field.
    """
    opaque = decode_state(ticket, _TrtllmState, OPAQUE_VERSION)
    unknown = sorted(set(opaque.params) - set(known))
    if unknown:
        raise TransferMismatch(
            f"ticket {ticket.ticket_id}: DisaggregatedParams of the decode worker's TensorRT-LLM lacks {unknown[0]}, "
            f"which prefill's {opaque.release} sent; run one release on both",
            field=unknown[0],
        )
    missing = [name for name in _NEEDED if name not in opaque.params]
    if missing:
        raise TransferMismatch(f"ticket {ticket.ticket_id} has no {missing[0]}", field=missing[0])
    return {name: _rebuilt(value, logprob) for name, value in opaque.params.items()}


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
