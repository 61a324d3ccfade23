"""From a leg of a request to the arguments of `LLM.generate_async`. Pure: plain values, no vendor objects.

What can't be served is refused here, by name, before the engine sees it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dynamo_trtllm.engine.asking import is_plain, stop_token_ids, structural_tag
from dynamo_trtllm.errors import ContextTooLong, EngineRefused
from dynamo_trtllm.messages import GenerateRequest, Guided, Phase, Role, Sampling

_DEFAULTS = Sampling(max_tokens=1)
_NO_END = -1  # what TensorRT-LLM itself sends for a request that never ends by token


class PromptLimit(NamedTuple):
    """The longest prompt."""

    tokens: int
    why: str  # the argument that sets it, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What model, arguments and release say about every request; made once."""

    role: Role
    context_length: int  # prompt and output
    prompt_limits: Mapping[Phase, PromptLimit]  # each leaves room for a token in the context
    vocab_size: int
    end_ids: tuple[int, ...]  # the model's own stop tokens, the chief one first
    refuses: tuple[str, ...]  # fields of Sampling, and "cache_salt"
    structural_tags: bool  # the guided-decoding backend takes them, in their newer form


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of `generate_async`. Made anew for each: the vendor writes into what it is given."""

    prompt: list[int]
    streaming: bool
    max_tokens: int  # what may still be generated for the request, whatever the leg
    sampling: dict[str, Any]  # of SamplingParams
    guided: dict[str, Any] | None  # of GuidedDecodingParams
    bias: tuple[tuple[int, float], ...]  # becomes a tensor where the vendor's classes are
    cache_salt: str | None
    stop_ids: frozenset[int]
    hands_over: bool  # a context-only call, whose KV stays for a decode worker


def make_call(request: GenerateRequest, rules: Rules) -> Call:
    """Raises ContextTooLong, or EngineRefused naming the field."""
    _check(request, rules)
    sampling = request.sampling
    max_tokens = min(sampling.max_tokens, rules.context_length - len(request.token_ids))
    stop_ids = stop_token_ids(sampling, rules.end_ids)
    # A request for one token is whole after the prompt: nothing may be left waiting for a decode worker.
    hands_over = request.phase is Phase.PREFILL and max_tokens > 1
    return Call(
        prompt=list(request.token_ids),
        streaming=request.phase is not Phase.PREFILL,
        max_tokens=max_tokens,
        sampling=_sampling(sampling, rules, stop_ids, 1 if hands_over else max_tokens),
        guided=None if sampling.guided is None else guided_params(sampling.guided, rules),
        bias=sampling.logit_bias,
        cache_salt=request.cache_salt,
        stop_ids=stop_ids,
        hands_over=hands_over,
    )


def _check(request: GenerateRequest, rules: Rules) -> None:
    tokens = len(request.token_ids)
    if tokens == 0:
        raise EngineRefused("the prompt is empty", field="token_ids")
    limit = rules.prompt_limits[request.phase]
    if tokens > limit.tokens:
        raise ContextTooLong(
            f"a prompt of {tokens} tokens is longer than this worker takes, {limit.tokens} ({limit.why}); shorten it"
        )
    if max(request.token_ids) >= rules.vocab_size:
        raise EngineRefused(
            f"token id {max(request.token_ids)} is not in the vocabulary of {rules.vocab_size}", field="token_ids"
        )
    if request.phase is not Phase.WHOLE and rules.role is Role.AGGREGATED:
        raise EngineRefused(f"this worker is aggregated and serves no {request.phase} leg", field="phase")
    for name in rules.refuses:
        if _is_used(request, name):
            raise EngineRefused(
                f"{name} can't be honoured by this worker's TensorRT-LLM; leave it out, or see why in its log",
                field=name,
            )


def _is_used(request: GenerateRequest, name: str) -> bool:
    if name == "cache_salt":
        return request.cache_salt is not None
    return bool(getattr(request.sampling, name) != getattr(_DEFAULTS, name))


def _sampling(sampling: Sampling, rules: Rules, stop_ids: frozenset[int], max_tokens: int) -> dict[str, Any]:
    # With an end id the vendor leaves these values as they are; without one it would ask its tokenizer, add the
    # checkpoint's stop tokens in some releases, and change the object.
    end_id = rules.end_ids[0] if rules.end_ids else _NO_END
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
    # Said in full: a release that is told nothing decodes greedily.
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or None}


# --- guided decoding -----------------------------------------------------------------------------------
# This was not run against the real package.


def guided_params(guided: Guided, rules: Rules) -> dict[str, Any]:
    """Arguments of GuidedDecodingParams. Raises EngineRefused for a form that the release or backend can't take."""
    if is_plain(guided):
        first = guided.alternatives[0]
        return {"json_object": True} if first.json_schema == "{}" else {"json": first.json_schema}
    if not rules.structural_tags:
        raise EngineRefused(
            "a form for part of the answer needs guided_decoding_backend: xgrammar and TensorRT-LLM 1.2 or newer",
            field="guided",
        )
    return {"structural_tag": structural_tag(guided)}
