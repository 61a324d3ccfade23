"""Convert a prefill, decode or aggregated call to plain arguments of `AsyncLLM.add_request`.

Requests with unsupported fields are rejected before vLLM receives them.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_trtllm.engines.engine_interface import (
    EngineInfo,
    PromptLimit,
    check_request,
    stop_token_ids,
)
from dynamo_trtllm.engines.external.library import guided_params, queue_priority
from dynamo_trtllm.engines.vllm.chunk_threshold import ITL_LIMIT_S
from dynamo_trtllm.protocol.errors import RequestRejected
from dynamo_trtllm.protocol.messages import GenerateRequest, Phase, Role, Sampling

# Two keys of the `kv_transfer_params` of a decode call.
READ_TIMES = "dynamo_read_times"  # the times that `read_parts` uses
EXPIRES_AT = "dynamo_expires_at"  # when the transfer expires, in seconds since the epoch
_SEED_BITS = 63
_PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
# Fields that have the same name in `Sampling` and in vLLM.
_SAME_NAME = ("temperature", "top_p", "top_k", "min_p", *_PENALTIES, "logprobs")
# `kv_transfer_params` of a prefill call.
_TO_DECODE: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmModelLimits:
    """The limits that the model and the engine arguments set to every request."""

    role: Role
    info: EngineInfo
    max_logprobs: int  # -1: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedKv:
    """The part of KV transfer parameters that the decode call uses."""

    first_token: int
    seed: int | None  # the seed that the prefill engine drew; None: it drew no seed
    kv_transfer_params: Mapping[str, Any]


class VllmRequest:
    """A checked request as arguments of one call of `AsyncLLM.add_request`, as plain values.

    Args:
        fetched_kv: for a decode call, from its KV transfer parameters.

    Raises:
        ContextTooLong: the prompt leaves no space for output.
        RequestRejected: a field is not supported. The error names the field.
    """

    def __init__(
        self,
        request: GenerateRequest,
        model_limits: VllmModelLimits,
        fetched_kv: FetchedKv | None = None,
    ) -> None:
        _check(request, model_limits)
        sampling = request.sampling
        self.prompt = list(request.token_ids)
        self.cache_salt = request.cache_salt
        self.priority = queue_priority(request, model_limits.info)
        # Arguments of StructuredOutputsParams.
        self.guided = None if sampling.guided is None else guided_params(sampling.guided)
        self.stop_ids = stop_token_ids(sampling, model_limits.info)
        self.seed = sampling.seed  # prefill call and decode call must use the same seed
        # Tokens from the prefill engine, which this engine gets in its prompt. They are output
        # before this engine's own tokens.
        self.tokens_of_prefill: tuple[int, ...] = ()
        max_tokens = min(
            sampling.max_tokens, model_limits.info.context_length - len(request.token_ids)
        )
        min_tokens = sampling.min_tokens
        # True if the KV of this prefill call is held for a decode worker. A request for one token
        # ends in prefill. No decode worker would fetch its KV, so its KV must not be held.
        self.exports_kv = request.phase is Phase.PREFILL and max_tokens > 1
        transfer: Mapping[str, Any] | None = None
        if self.exports_kv:
            transfer = _TO_DECODE
            max_tokens = 1
            if self.seed is None and sampling.temperature > 0 and resamples_first_token(request):
                self.seed = secrets.randbits(_SEED_BITS)
        elif fetched_kv is not None:
            transfer = fetched_kv.kv_transfer_params
            if self.seed is None:
                self.seed = fetched_kv.seed
            if max_tokens <= 1:
                raise RequestRejected(
                    "the prefill worker generated all requested tokens; increase max_tokens to"
                    " decode more",
                    field="max_tokens",
                )
            if not resamples_first_token(request):
                self.prompt.append(fetched_kv.first_token)
                self.tokens_of_prefill = (fetched_kv.first_token,)
                max_tokens -= 1
                min_tokens = max(0, min_tokens - 1)
        # Arguments of SamplingParams.
        self.sampling = _sampling(
            sampling, self.stop_ids, max_tokens=max_tokens, min_tokens=min_tokens, seed=self.seed
        )
        if sampling.prompt_logprobs is not None and request.phase is not Phase.DECODE:
            self.sampling["prompt_logprobs"] = sampling.prompt_logprobs
        extra = _extra_args(request, transfer)
        if extra:
            self.sampling["extra_args"] = extra


def _extra_args(request: GenerateRequest, transfer: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the `extra_args` of SamplingParams, which vLLM's scheduler and its connector read."""
    extra: dict[str, Any] = {}
    if transfer is not None:
        extra["kv_transfer_params"] = dict(transfer)
    if request.slo is not None and request.slo.itl_s is not None:
        extra[ITL_LIMIT_S] = request.slo.itl_s
    return extra


def resamples_first_token(request: GenerateRequest) -> bool:
    """Return whether the decode engine samples the first token again.

    If not, the decode engine gets the token as part of its prompt, which costs no step. But
    penalties, grammars and seeds depend on which tokens are output and not in the prompt. So for
    requests with these, the decode engine samples the first token again.
    """
    sampling = request.sampling
    # repetition_penalty counts the tokens of the prompt, too.
    has_penalty = sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
    uses_seed = sampling.seed is not None and sampling.temperature > 0
    has_grammar = sampling.guided is not None
    return has_penalty or uses_seed or has_grammar


def _check(request: GenerateRequest, model_limits: VllmModelLimits) -> None:
    context = model_limits.info.context_length
    check_request(
        request,
        model_limits.info,
        transfers_kv=model_limits.role is not Role.AGGREGATED,
        engine="vLLM",
        limit=PromptLimit(context - 1, f"max_model_len {context}"),
        priority_argument="scheduling_policy",
    )
    num_logprobs = request.sampling.logprobs
    max_logprobs = model_limits.max_logprobs
    has_limit = max_logprobs >= 0
    if has_limit and num_logprobs is not None and num_logprobs > max_logprobs:
        raise RequestRejected(
            f"logprobs {num_logprobs} is more than max_logprobs {max_logprobs} of this worker",
            field="logprobs",
        )


def _sampling(
    sampling: Sampling,
    stop_ids: frozenset[int],
    *,
    max_tokens: int,
    min_tokens: int,
    seed: int | None,
) -> dict[str, Any]:
    """Return all arguments of SamplingParams.

    All are set, because vLLM would otherwise add the stop tokens of the model's
    generation_config.json.
    """
    return {name: getattr(sampling, name) for name in _SAME_NAME} | {
        "max_tokens": max_tokens,
        "min_tokens": min(min_tokens, max_tokens),
        "logit_bias": dict(sampling.logit_bias) or None,
        "seed": seed,
        "stop_token_ids": sorted(stop_ids),
        "ignore_eos": True,  # stop_token_ids has all stop tokens
        "detokenize": False,
    }
