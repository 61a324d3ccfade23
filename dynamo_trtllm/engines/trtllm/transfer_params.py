"""Convert between KV transfer parameters and TensorRT-LLM's `DisaggregatedParams`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from dynamo_trtllm.engines.external.external_transfers import EngineState, decode_state
from dynamo_trtllm.protocol.errors import (
    ConfigError,
    RequestRejected,
    TransferMismatch,
)
from dynamo_trtllm.protocol.messages import KvTransferParams, encode
from dynamo_trtllm.protocol.number_types import MAX_DP_RANKS, Count, Number, TokenId

ENGINE_STATE_VERSION = 1

_NEEDED = ("first_gen_tokens", "ctx_request_id")
# The field that says where the KV is, and the transceiver that sets it. The C++ transceiver sets a
# state. The Python transceiver sets its address, and leaves the state None
# (KvCacheTransceiverV2._finalize_send in _torch/disaggregation/transceiver.py, main).
_PLACES = {"opaque_state": "CPP", "ctx_info_endpoint": "PYTHON"}
# The log-probability of an excluded token is minus infinity. The bound excludes NaN and infinity.
_LogProbability: TypeAlias = Annotated[float, Meta(le=1e3)]


class _Logprob(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of TensorRT-LLM's `Logprob`."""

    logprob: _LogProbability
    rank: Count | None = None


# The log-probability of the token at a position, or those of the token and its alternatives.
_PositionLogprobs: TypeAlias = _LogProbability | dict[TokenId, _Logprob]


class _SentParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The fields of `DisaggregatedParams` that `library.yaml` names, without `request_type`.

    The ranges are checked, because the executor uses these numbers as ids and indices in C++, where
    a number that is out of range may end the process.
    """

    first_gen_tokens: Annotated[list[TokenId], Meta(min_length=1)]
    # One list, or a list of lists with one for each sequence.
    first_gen_log_probs: list[_PositionLogprobs | list[_PositionLogprobs]] | None = None
    ctx_request_id: Number
    opaque_state: bytes | None = None
    draft_tokens: list[TokenId] | None = None
    disagg_request_id: Number | None = None
    ctx_dp_rank: Annotated[int, Meta(ge=0, lt=MAX_DP_RANKS)] | None = None
    ctx_info_endpoint: str | None = None


class _TrtllmState(EngineState, frozen=True, kw_only=True):
    params: _SentParams


def _is_missing(value: object) -> bool:
    # 0 is a valid id.
    return not value and value != 0


def pack(params: Mapping[str, Any], *, release: str) -> bytes:
    """Encode the fields of a context-only result as engine state.

    Args:
        params: fields of DisaggregatedParams, by name.
        release: name of the installed release.

    Raises:
        RequestRejected: a needed field is missing, or a value can't be encoded.
    """
    missing = [name for name in _NEEDED if _is_missing(params.get(name))]
    if not any(params.get(name) for name in _PLACES):
        missing.append(" or ".join(_PLACES))
    if missing:
        raise RequestRejected(
            f"TensorRT-LLM's context-only result has no {', '.join(missing)}; set"
            " cache_transceiver_config.backend",
            field="cache_transceiver_config.backend",
        )
    plain = {name: _plain(name, value) for name, value in params.items() if value is not None}
    sent = _SentParams(**plain)
    return encode(_TrtllmState(version=ENGINE_STATE_VERSION, release=release, params=sent))


def unpack(
    kv_params: KvTransferParams,
    *,
    known: Iterable[str],
    logprob: Callable[..., Any] | None,
    vocab_size: int,
    runtime: str | None = None,
) -> dict[str, Any]:
    """Decode engine state to the arguments of DisaggregatedParams of a generation-only call.

    Args:
        kv_params: parameters from the prefill worker.
        known: fields that DisaggregatedParams has in the installed release.
        logprob: TensorRT-LLM's log-probability class, if the release has one.
        vocab_size: number of token ids of the model.
        runtime: transceiver of the decode worker, CPP or PYTHON; None: TensorRT-LLM chooses it.

    Raises:
        TransferMismatch: names the field that is unknown, missing or out of range, or of another
            transceiver.
    """
    engine_state = decode_state(kv_params, _TrtllmState, ENGINE_STATE_VERSION)
    params = {
        name: value
        for name, value in msgspec.structs.asdict(engine_state.params).items()
        if value is not None
    }
    unknown = sorted(set(params) - set(known))
    if unknown:
        raise TransferMismatch(
            f"KV transfer {kv_params.transfer_id}: the decode worker's DisaggregatedParams has no"
            f" {unknown[0]}, which prefill's TensorRT-LLM {engine_state.release} sent; run one"
            " release on both",
            field=unknown[0],
        )
    for name in ("first_gen_tokens", "draft_tokens"):
        largest = max(params.get(name, ()), default=0)
        if largest >= vocab_size:
            raise TransferMismatch(
                f"KV transfer {kv_params.transfer_id}: token id {largest} in {name} is out of"
                f" range: the vocabulary has {vocab_size} tokens; run one model on both sides",
                field=name,
            )
    transceivers = [transceiver for name, transceiver in _PLACES.items() if params.get(name)]
    sender = transceivers[0] if transceivers else None
    if sender is None or runtime not in (None, sender):
        raise TransferMismatch(
            f"KV transfer {kv_params.transfer_id} is of the transceiver {sender or 'none'}, and"
            f" this worker's is {runtime or 'chosen by TensorRT-LLM'}; set the same"
            " cache_transceiver_config on both sides",
            field="transceiver_runtime",
        )
    rebuilt = {name: _rebuilt(value, logprob) for name, value in params.items()}
    return rebuilt | {"request_type": "generation_only"}


def _plain(name: str, value: Any) -> Any:
    """Convert a value to numbers, text, bytes, lists and mappings.

    A log-probability object becomes a mapping.
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(name, item) for key, item in value.items()}
    if hasattr(value, "logprob"):
        return {"logprob": float(value.logprob), "rank": value.rank}
    raise RequestRejected(
        f"DisaggregatedParams.{name} contains a {type(value).__name__}, which cannot be sent",
        field=name,
    )


def _rebuilt(value: Any, logprob: Callable[..., Any] | None) -> Any:
    if isinstance(value, list):
        return [_rebuilt(item, logprob) for item in value]
    if isinstance(value, _Logprob) and logprob is not None:
        return logprob(logprob=value.logprob, rank=value.rank)
    if isinstance(value, dict):
        return {key: _rebuilt(field, logprob) for key, field in value.items()}
    return value


NO_RETRY = "TRTLLM_ENABLE_CONTEXT_FIRST_NO_RETRY_KV_TRANSFER_RETIREMENT"


def forbids_retries(value: str) -> bool:
    """Return True if this value of the variable NO_RETRY switches it on."""
    return value.strip().lower() not in ("", "0", "false", "off", "no")


def check_retries(variable: Callable[[str], str]) -> None:
    """Check that the variable NO_RETRY is off, so that prefill calls may be repeated.

    Frontends repeat prefill calls after a failed transfer. If the variable is on, prefill calls
    must not be repeated, and a rank ends its process when a transfer is unfinished after twice its
    timeout (pull request 18163 of TensorRT-LLM; the deadlines are in
    _torch/disaggregation/native/retirement.py).

    Args:
        variable: returns an environment variable of the engine; "" if it is not set.

    Raises:
        ConfigError: the variable is on.
    """
    value = variable(NO_RETRY)
    if forbids_retries(value):
        raise ConfigError(
            f"{NO_RETRY} is {value!r}: with it, prefill calls must not be repeated, but frontends"
            " repeat them after a failed KV transfer, and ranks end their process; unset it",
            field=NO_RETRY,
        )


# Positive 64-bit integers with this bit are ids of the whole cluster. The executor's own ids are
# below 2**40 (MIN_GLOBAL_ID in llmapi/disagg_utils.py, main of 2026).
_GLOBAL = 1 << 62
# The bits of the call's number. With a thousand prompts per second, a worker repeats an id after
# twelve days.
_COUNTER_BITS = 30
_WORKER_BITS = 32  # bits of the random instance id


def context_params(
    prefill_instance_id: int, number: int, *, known: Iterable[str]
) -> dict[str, Any]:
    """Return the arguments of DisaggregatedParams of a context-only call.

    Args:
        prefill_instance_id: id of the worker.
        number: the number of the call. Calls are counted from 1.
        known: fields that DisaggregatedParams has in the installed release.
    """
    params: dict[str, Any] = {"request_type": "context_only"}
    if "disagg_request_id" in known:
        worker = prefill_instance_id % (1 << _WORKER_BITS)
        count = number % (1 << _COUNTER_BITS)
        params["disagg_request_id"] = _GLOBAL | (worker << _COUNTER_BITS) | count
    return params
