"""What follows from arguments, release and checkpoint once and for all: limits, layout, pairing, what is refused.

Pure functions of values.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from dynamo_trtllm.engines.checkpoint import Checkpoint
from dynamo_trtllm.engines.request_checks import HARMONY_STOP_IDS
from dynamo_trtllm.engines.trtllm.api_manifests import ApiManifest, Presence
from dynamo_trtllm.engines.trtllm.bindings import Capabilities
from dynamo_trtllm.engines.trtllm.preflight import facts as preflight
from dynamo_trtllm.engines.trtllm.preflight.facts import BUFFER, TIMEOUT, RoleFacts
from dynamo_trtllm.engines.trtllm.requests import PromptLimit, TrtllmModelLimits
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.messages import Limits, Phase

_log = logging.getLogger(__name__)

_ATTENTION = "TRTLLM"  # the default back end of attention, and the one whose KV fits another number of ranks
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


class LlmArguments(preflight.RoleArguments, Protocol):
    """The merged arguments, and the keywords they make."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Nested as `LLM` takes them."""
        ...


def llm_values(args: LlmArguments, *, model: str) -> dict[str, Any]:
    """The keywords of `LLM`."""
    return {**args.values, "model": model, "backend": "pytorch"}


def has_statistics(args: LlmArguments) -> bool:
    return bool(args.values.get("enable_iter_perf_stats"))


def unsupported_features(args: LlmArguments, release: ApiManifest, *, cache_salt: bool) -> tuple[str, ...]:
    """Fields of Sampling, and "cache_salt", that this release can't honor with these arguments."""
    found = [] if cache_salt else ["cache_salt"]
    if not args.get("guided_decoding_backend"):
        found.append("guided")
    if release.presence("TorchLlmArgs", "sampler_type") is Presence.PRESENT:
        # Up to 1.2 the penalties and min_p are documented for the TRTLLM sampler, which is not the default.
        if str(args.get("sampler_type")).rpartition(".")[2] != "TRTLLMSampler":
            found += [*_PENALTIES, "min_p"]
    elif args.values.get("enable_mixed_sampler"):
        found += [*_PENALTIES, "min_p", "logit_bias"]
    if found:
        _log.info(
            "requests with %s are refused; TensorRT-LLM %s takes them with guided_decoding_backend, or sampler_type: "
            "TRTLLMSampler, where it has these",
            ", ".join(found),
            release.title,
        )
    return tuple(found)


def kv_compat(facts: RoleFacts, line: str) -> dict[str, str]:
    """What else prefill and decode must share. Their TP may differ only where the attention backend allows it."""
    if not facts.is_disaggregated:
        return {}
    attention = str(facts.args.get("attn_backend") or _ATTENTION)
    found = {"release": line, "transceiver": str(facts.transceiver), "attn_backend": attention}
    runtime = facts.args.get("cache_transceiver_config.transceiver_runtime")
    if runtime is not None:
        found["transceiver_runtime"] = str(runtime)
    if attention != _ATTENTION:
        found["tensor_parallel_size"] = str(facts.tensor_parallel)
    return found


def ticket_ttl_s(facts: RoleFacts, asked_s: float) -> float:
    """How long a ticket may promise its KV: the vendor's own time-out for transfers may come first."""
    timeout_ms = facts.number(TIMEOUT)
    if not facts.is_disaggregated or timeout_ms is None or timeout_ms / 1000 >= asked_s:
        return asked_s
    _log.warning(
        "--ticket-ttl-s %g is cut to %g, for TensorRT-LLM frees KV after %s", asked_s, timeout_ms / 1000, TIMEOUT
    )
    return timeout_ms / 1000


def limits(facts: RoleFacts) -> Limits:
    return Limits(max_batch_size=facts.max_batch_size, max_num_tokens=facts.max_num_tokens)


def context_length(facts: RoleFacts) -> int:
    """Raises ConfigError when neither arguments nor model say it."""
    if not facts.max_seq_len:
        raise ConfigError("the model does not say how long its context is; give --max-seq-len", field="max_seq_len")
    return facts.max_seq_len


def end_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The model's own stop tokens, the chief one first."""
    harmony = HARMONY_STOP_IDS if checkpoint.renderer == "harmony" else ()
    return tuple(dict.fromkeys(each for each in (*harmony, *checkpoint.eos_token_ids) if each < checkpoint.vocab_size))


def prompt_limit(facts: RoleFacts, phase: Phase) -> PromptLimit:
    """Return the longest prompt of a call in this phase, and the argument that sets it."""
    context = context_length(facts)
    found = [PromptLimit(context - 1, f"max_seq_len {context}")]
    buffer = facts.number(BUFFER)
    if buffer and phase is not Phase.AGGREGATED:  # a longer prompt falls back to a path that fails with NIXL
        found.append(PromptLimit(buffer, BUFFER))
    if phase is not Phase.DECODE and not facts.on("enable_chunked_prefill"):
        found.append(PromptLimit(facts.max_num_tokens, "max_num_tokens, with no enable_chunked_prefill"))
    return min(found)


def model_limits(
    facts: RoleFacts, checkpoint: Checkpoint, capabilities: Capabilities, refused: tuple[str, ...]
) -> TrtllmModelLimits:
    xgrammar = facts.args.get("guided_decoding_backend") == "xgrammar"
    return TrtllmModelLimits(
        role=facts.role,
        context_length=context_length(facts),
        prompt_limits={phase: prompt_limit(facts, phase) for phase in Phase},
        vocab_size=checkpoint.vocab_size,
        end_ids=end_ids(checkpoint),
        unsupported_features=refused,
        structural_tags=xgrammar and capabilities.structural_tag_format,
    )
