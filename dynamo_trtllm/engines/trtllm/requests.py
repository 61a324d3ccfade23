"""From a prefill, decode or whole call to the arguments of `LLM.generate_async`. Pure: plain values, no vendor objects.

Unsupported fields are rejected here, by name, before the engine sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dynamo_trtllm.engines.request_checks import check, guided_params, is_plain, stop_token_ids
from dynamo_trtllm.errors import ContextTooLong, RequestRejected
from dynamo_trtllm.messages import GenerateRequest, Phase, Role, Sampling

_NO_END = -1  # what TensorRT-LLM itself sends for a request that never ends by token


class PromptLimit(NamedTuple):
    """The longest prompt."""

    tokens: int
    why: str  # the argument that sets it, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmModelLimits:
    """What model, arguments and release say about every request; made once."""

    role: Role
    context_length: int  # prompt and output
    prompt_limits: Mapping[Phase, PromptLimit]  # each leaves space for one output token in the context
    vocab_size: int
    end_ids: tuple[int, ...]  # the model's own stop tokens, the chief one first
    unsupported_features: tuple[str, ...]  # fields of Sampling, and "cache_salt"
    structural_tags: bool  # the guided-decoding backend takes them, in their newer form


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmCall:
    """One call of `generate_async`. Made anew for each: the vendor writes into what it is given."""

    prompt: list[int]
    streaming: bool
    max_tokens: int  # what may still be generated for the request, in any phase
    sampling: dict[str, Any]  # of SamplingParams
    guided: dict[str, Any] | None  # of GuidedDecodingParams
    bias: tuple[tuple[int, float], ...]  # becomes a tensor where the vendor's classes are
    cache_salt: str | None
    stop_ids: frozenset[int]
    exports_kv: bool  # a context-only call, whose KV stays for a decode worker


def build_call(request: GenerateRequest, model_limits: TrtllmModelLimits) -> TrtllmCall:
    """Raises ContextTooLong, or RequestRejected naming the field."""
    _check(request, model_limits)
    sampling = request.sampling
    max_tokens = min(sampling.max_tokens, model_limits.context_length - len(request.token_ids))
    stop_ids = stop_token_ids(sampling, model_limits.end_ids)
    # A request for one token is whole after the prompt: nothing may be left waiting for a decode worker.
    exports_kv = request.phase is Phase.PREFILL and max_tokens > 1
    return TrtllmCall(
        prompt=list(request.token_ids),
        streaming=request.phase is not Phase.PREFILL,
        max_tokens=max_tokens,
        sampling=_sampling(sampling, model_limits, stop_ids, 1 if exports_kv else max_tokens),
        guided=None if sampling.guided is None else guided_params(sampling.guided),
        bias=sampling.logit_bias,
        cache_salt=request.cache_salt,
        stop_ids=stop_ids,
        exports_kv=exports_kv,
    )


def _check(request: GenerateRequest, model_limits: TrtllmModelLimits) -> None:
    check(
        request,
        role=model_limits.role,
        vocab_size=model_limits.vocab_size,
        unsupported_features=model_limits.unsupported_features,
        library="TensorRT-LLM",
    )
    tokens, limit = len(request.token_ids), model_limits.prompt_limits[request.phase]
    if tokens > limit.tokens:
        raise ContextTooLong(
            f"a prompt of {tokens} tokens is longer than this worker takes, {limit.tokens} ({limit.why}); shorten it"
        )
    if (
        request.sampling.guided is not None
        and not is_plain(request.sampling.guided)
        and not model_limits.structural_tags
    ):
        raise RequestRejected(
            "a form for part of the answer needs guided_decoding_backend: xgrammar and TensorRT-LLM 1.2 or newer",
            field="guided",
        )


def _sampling(
    sampling: Sampling, model_limits: TrtllmModelLimits, stop_ids: frozenset[int], max_tokens: int
) -> dict[str, Any]:
    # With an end id the vendor leaves these values as they are; without one it would ask its tokenizer, add the
    # checkpoint's stop tokens in some releases, and change the object.
    end_id = model_limits.end_ids[0] if model_limits.end_ids else _NO_END
    values: dict[str, Any] = {
        "end_id": end_id,
        "ignore_eos": sampling.ignore_eos,
        "max_tokens": max_tokens,
        "stop_token_ids": sorted(stop_ids - {end_id}) or None,
        "include_stop_str_in_output": True,  # what ended the answer must be seen: a Harmony call token is output
        "detokenize": False,
        "seed": sampling.seed,
        # 0 would mean none to the vendor; the surplus alternative is left out of the answer
        "logprobs": None if sampling.logprobs is None else max(1, sampling.logprobs),
    }
    if sampling.min_tokens > 0:
        values["min_tokens"] = sampling.min_tokens  # the vendor keeps the end id back; other stop tokens still stop
    if sampling.min_p > 0:
        values["min_p"] = sampling.min_p
    values |= _greedy() if sampling.temperature == 0 else _random(sampling)
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return values | {name: value for name in neutral if (value := getattr(sampling, name)) != neutral[name]}


def _greedy() -> dict[str, Any]:
    return {"top_k": 1}  # temperature 0 is greedy only from 1.2 on; top_k 1 is in every release


def _random(sampling: Sampling) -> dict[str, Any]:
    # All three are passed: a release that gets none of them decodes greedily.
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or None}
