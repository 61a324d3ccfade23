"""The vendor's sampling parameters as the torch engine's, and when a request stops."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_trtllm.engines.engine_interface import EngineInfo
from dynamo_trtllm.protocol.messages import OutputFormat, Sampling, StructuredOutput
from tensorrt_llm.standin import traps


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """TensorRT-LLM stops at the end id and at stop words, and knows no model's own stop tokens
    besides.
    """

    end_id: int | None  # None: goes on past it
    words: frozenset[int]

    def ends_at(self, token: int) -> bool:
        return token == self.end_id or token in self.words

    def is_word(self, token: int) -> bool:
        return token != self.end_id


_IGNORED = {  # by the PyTorch sampler
    "min_tokens_ignored": ("min_tokens",),
    "min_p_ignored": ("min_p",),
    "penalties_ignored": ("frequency_penalty", "presence_penalty", "repetition_penalty"),
    "seed_ignored": ("seed",),
}


def sampling_of(params: Any, info: EngineInfo, args: Mapping[str, Any]) -> tuple[Sampling, Stop]:
    """Raises ValueError for what the played engine refuses."""
    drops = params.ignore_eos and traps.is_on("ignore_eos_drops_stop_words")
    stop = Stop(
        end_id=None if params.ignore_eos or params.end_id == -1 else params.end_id,
        words=frozenset(() if drops else params.stop_token_ids or ()),
    )
    is_torch = str(args.get("sampler_type")) != "TRTLLMSampler"
    wanted = stop.words | ({stop.end_id} if stop.end_id is not None else set())
    own = frozenset(info.eos_token_ids)
    ignored = {
        name for trap, names in _IGNORED.items() if is_torch and traps.is_on(trap) for name in names
    }
    chosen = {
        "max_tokens": params.max_tokens or info.context_length,
        "min_tokens": params.min_tokens,
        "temperature": 0.0
        if params._greedy_decoding
        else (1.0 if params.temperature is None else params.temperature),
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": _bias(params.embedding_bias),
        "seed": params.seed,
        "logprobs": params.logprobs,
        "guided": _guided(params.guided_decoding, args),
        "stop_token_ids": tuple(sorted(wanted)),
        "ignore_eos": not own <= wanted,
    }
    return Sampling(
        **{
            name: value
            for name, value in chosen.items()
            if value is not None and name not in ignored
        }
    ), stop


def _bias(bias: Any) -> tuple[tuple[int, float], ...] | None:
    """A tensor over the vocabulary."""
    if bias is None:
        return None
    return tuple((token, value) for token, value in enumerate(bias.flatten().tolist()) if value)


def _guided(params: Any, args: Mapping[str, Any]) -> StructuredOutput | None:
    if params is None:
        return None
    if args["guided_decoding_backend"] is None:
        raise ValueError("Guided decoding is not enabled: set guided_decoding_backend")
    if params.json_object:
        return StructuredOutput(alternatives=(OutputFormat(json_schema="{}"),))
    if params.json is not None:
        schema = params.json if isinstance(params.json, str) else json.dumps(params.json)
        return StructuredOutput(alternatives=(OutputFormat(json_schema=schema),))
    raise ValueError("the stand-in guides by json and json_object only")
